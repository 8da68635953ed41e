"""`ScriptedEngine` returns prepared answers, for examples, tests and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from ...tapes.common.arguments import check_arguments
from .engine import Capability, Completion, EngineError, Request

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer

Policy = Callable[[Request], str]


class ScriptedEngine:
    """Returns prepared answers in order, or the result of a function that receives the request.

    Each episode gets the answers from the first one on: the k-th answer for the episode's k-th request to this engine.
    Requests outside an episode, such as a judge's, are counted together.

    With a renderer, the answers are recorded as tokens, including the token that ends the turn. No model sampled these
    tokens, so they have no log-probs. They are suitable for imitation (SFT) and not for reinforcement learning.
    """

    name = "scripted"

    @check_arguments
    def __init__(self, answers: Iterable[str] | Policy, *, renderer: Renderer | None = None) -> None:
        self._policy = answers if callable(answers) else None
        self._answers = iter(()) if callable(answers) else iter(answers)
        self._read: list[str] = []
        """The answers that were taken from the iterable so far. It may be endless."""
        self._outside = 0
        """Number of requests outside an episode."""
        self.renderer = renderer
        self.context: int | None = None
        # The script reads no prompt, but a renderer turns the prompt into token ids, so it must support pictures.
        sees = renderer is None or renderer.pictures is not None
        self.can: frozenset[Capability] = frozenset({"pictures"} if sees else ())

    async def complete(self, request: Request) -> Completion:
        if request.on_start is not None:
            request.on_start()
        return Completion(text=self._policy(request) if self._policy is not None else self._in_turn(request))

    def _in_turn(self, request: Request) -> str:
        k = request.number
        if k is None:
            k, self._outside = self._outside, self._outside + 1
        self._read += islice(self._answers, max(k + 1 - len(self._read), 0))
        if k >= len(self._read):
            raise EngineError(
                f"the script has {len(self._read)} answers, and an episode asked for one more: add answers, or set "
                "`limits.calls`"
            )
        return self._read[k]

    def forget(self, cache_key: str) -> None:
        """Do nothing, because the engine has no KV cache."""

    async def close(self) -> None:
        """Do nothing, because the engine holds no resources."""
