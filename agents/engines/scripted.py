"""ScriptedEngine: answers that somebody wrote, for examples, tests and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .engine import Completion, EngineError, Request

Policy = Callable[[Request], str]


class ScriptedEngine:
    """Gives the answers in order, or what a function of the request returns.

    With a renderer the answers are recorded as tokens, the turn-ending one included, but nobody sampled them: they
    have no log-probs, so they can be imitated (SFT), not reinforced.
    """

    name = "scripted"

    def __init__(self, answers: Iterable[str] | Policy, *, renderer: Any | None = None) -> None:
        self._policy = answers if callable(answers) else None
        self._answers = None if callable(answers) else iter(answers)
        self._given = 0
        self.renderer = renderer
        self.context: int | None = None

    async def complete(self, request: Request) -> Completion:
        if self._policy is not None:
            text = self._policy(request)
        else:
            assert self._answers is not None
            try:
                text = next(self._answers)
            except StopIteration:
                raise EngineError(f"the script has {self._given} answers, and one more was asked for") from None
        self._given += 1
        return Completion(text=text)

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""
