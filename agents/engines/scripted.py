"""`ScriptedEngine` returns prepared answers, for examples, tests and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...tapes.common.arguments import check_arguments
from .engine import Capability, Completion, EngineError, Request

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer

Policy = Callable[[Request], str]


class ScriptedEngine:
    """Returns prepared answers in order, or the result of a function that receives the request.

    With a renderer, the answers are recorded as tokens, including the token that ends the turn. No model sampled these
    tokens, so they have no log-probs. They are suitable for imitation (SFT) and not for reinforcement learning.
    """

    name = "scripted"

    @check_arguments
    def __init__(self, answers: Iterable[str] | Policy, *, renderer: Renderer | None = None) -> None:
        self._policy = answers if callable(answers) else None
        self._answers = None if callable(answers) else iter(answers)
        self._count = 0
        self.renderer = renderer
        self.context: int | None = None
        # The script reads no prompt, but a renderer turns the prompt into token ids, so it must support pictures.
        sees = renderer is None or renderer.pictures is not None
        self.can: frozenset[Capability] = frozenset({"pictures"} if sees else ())

    async def complete(self, request: Request) -> Completion:
        if request.on_start is not None:
            request.on_start()
        if self._policy is not None:
            text = self._policy(request)
        else:
            assert self._answers is not None
            # Requests get the answers in order. Concurrent episodes need a function, which sees the conversation.
            try:
                text = next(self._answers)
            except StopIteration:
                raise EngineError(f"the script has {self._count} answers, and one more was requested") from None
        self._count += 1
        return Completion(text=text)

    def forget(self, cache_key: str) -> None:
        """Do nothing, because the engine has no KV cache."""

    async def close(self) -> None:
        """Do nothing, because the engine holds no resources."""
