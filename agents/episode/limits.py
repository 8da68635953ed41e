"""Limits of one episode, and how reaching one stops it."""

from __future__ import annotations

import asyncio
from collections import deque

from pydantic import Field

from ...tapes import CauseType
from ...tapes.value import Value


class Limits(Value):
    """What one episode may use. Reaching a limit is an end, not a crash; the tape says which one."""

    turns: int | None = Field(default=100, ge=1)
    """Actions; None for no limit."""
    calls: int | None = Field(default=None, ge=1)
    """Questions to the model; reaching it counts as a limit of turns."""
    tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens over all calls; what is under way counts with all that it may still sample."""
    context: int | None = Field(default=None, ge=2)
    """Prompt and completion of one call together; the engine's own limit holds too."""
    seconds: float | None = Field(default=600.0, gt=0)
    """Wall clock of the whole episode. An episode that ends so is never trained on."""
    environment_seconds: float | None = Field(default=60.0, gt=0)
    """Wall clock of each `reset`, `step`, `finish` and `close`; beyond it the environment is at fault."""


class LimitReached(BaseException):
    """Raised in the agent by the door when a limit is reached. Not an Exception, so that an agent's
    `except Exception` doesn't swallow it; the door latches besides: every later call raises again."""

    def __init__(self, limit: CauseType, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class TokenBudget:
    """Tokens that an episode may sample, shared by questions that are under way at once: never more are handed out
    than there are, and whoever finds none waits, in turn, for those that others give back."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        """None: no bound, and nobody waits."""
        self.used = 0
        """Sampled so far."""
        self._held = 0
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        """Whoever waits, and how many they want."""

    @property
    def spent(self) -> bool:
        """Whether all of it was sampled."""
        return self.limit is not None and self.used >= self.limit

    async def take(self, wanted: int) -> int:
        """At least one token and at most `wanted`, to be given back by `give`; 0 where all are spent."""
        if self.limit is None:
            return wanted
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, wanted))
        self._next()
        try:
            return turn.result() if turn.done() else await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(turn.result())
            raise

    def hold(self, tokens: int) -> int:
        """Take so many, whether they are there or not."""
        self._held += tokens
        return tokens

    def give(self, tokens: int) -> None:
        """What was taken is over, and what it sampled is in `used`."""
        if self.limit is not None:
            self._held -= tokens
            self._next()

    def _next(self) -> None:
        assert self.limit is not None
        while self._waiting:
            left = self.limit - self.used - self._held
            if left < 1 and self._held:
                return  # something under way may leave some
            turn, wanted = self._waiting[0]
            self._waiting.popleft()
            if not turn.done():  # else whoever waited has gone
                turn.set_result(self.hold(max(min(wanted, left), 0)))
