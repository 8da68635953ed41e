"""The limits of one episode, and the exception that ends it when one is reached."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal, Self

from pydantic import Field, JsonValue, ValidationError

from ...tapes import CauseType
from ...tapes.errors import USE_ITS_VERSION, UsageError
from ...tapes.value import Value


class Limits(Value):
    """What one episode may use. Reaching a limit ends the episode without an error, and the tape names the limit."""

    turns: int | None = Field(default=100, ge=1)
    """Actions; None for no limit."""
    calls: int | None = Field(default=None, ge=1)
    """Calls of the model; reaching this limit is recorded as a limit of turns."""
    tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens over all calls; a call in flight counts with all tokens that it may still sample."""
    context: int | None = Field(default=None, ge=2)
    """Tokens of prompt and completion of one call; the engine's own limit applies too."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the prompt of one call; a longer prompt is a limit of context, unless `keep_prompt` is set."""
    keep_prompt: Literal["start", "end"] | None = None
    """The part that a long prompt keeps: it is cut to `prompt_tokens`, and leaves room for an answer of `max_tokens` in
    the context. None: no prompt is cut."""
    agent_seconds: float | None = Field(default=600.0, gt=0)
    """Seconds of the agent's own code, of its tools, and of its model calls while the model computes. An episode that
    reaches this limit is scored and trained on, as at the limit of turns."""
    system_seconds: float | None = Field(default=1800.0, gt=0)
    """All other seconds of an episode up to its last step: the engine's queue, the environment, Tapereel. The wait for
    servers that don't answer has its own limit, `engine.patience`. An episode that reaches this limit is never trained
    on, and is repeated."""
    environment_seconds: float | None = Field(default=60.0, gt=0)
    """Wall clock of each `reset`, `step`, `finish` and `close`; a longer call is an error of the environment."""

    @classmethod
    def recorded(cls, limits: dict[str, JsonValue] | None, **changes: JsonValue) -> Self:
        """The limits on a tape, with `changes`. A missing one is unlimited. Raises UsageError for a limit that can't be
        read."""
        try:
            return cls.model_validate({**dict.fromkeys(cls.model_fields), **(limits or {}), **changes})
        except ValidationError as error:
            found = error.errors()[0]
            name = ".".join(map(str, found["loc"]))
            raise UsageError(f"the tape's limit {name} can't be read: {found['msg']}; {USE_ITS_VERSION}") from error


class LimitReached(BaseException):
    """`LLM` raises this in the agent when a limit is reached.

    Not an Exception, so that an agent's `except Exception` doesn't swallow it. `LLM` also latches the limit: every
    later call raises it again.
    """

    def __init__(self, limit: CauseType, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class TokenBudget:
    """Tokens that an episode may sample, shared by its concurrent calls.

    Invariant: `used` + tokens held by calls in flight never exceed `limit`. A call that finds no token left waits,
    first come first served, until another call gives some back. Without the waiting, concurrent calls would together
    sample more than the limit, or one would fail although tokens remain.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        """None: no limit, and no call waits."""
        self.used = 0
        """Sampled so far."""
        self._held = 0
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        """(future, tokens wanted) of each waiting call, in order."""

    @property
    def spent(self) -> bool:
        """Whether all tokens of the limit were sampled."""
        return self.limit is not None and self.used >= self.limit

    async def take(self, wanted: int) -> int:
        """Take at least one token and at most `wanted`; return them by `give`. 0 where all are spent."""
        if self.limit is None:
            return wanted
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, wanted))
        self._next()
        try:
            return turn.result() if turn.done() else await turn
        except asyncio.CancelledError:
            # Cancelled after the tokens were assigned, but before the call ran: without this they would be lost.
            if not turn.cancelled():
                self.give(turn.result())
            raise

    def hold(self, tokens: int) -> int:
        """Take `tokens` without regard to the limit, as a replay does; returns them."""
        self._held += tokens
        return tokens

    def give(self, tokens: int) -> None:
        """Return tokens that `take` or `hold` gave. Add the sampled ones to `used` before."""
        if self.limit is not None:
            self._held -= tokens
            self._next()

    def _next(self) -> None:
        assert self.limit is not None
        while self._waiting:
            left = self.limit - self.used - self._held
            if left < 1 and self._held:
                return  # a call in flight may give some back
            turn, wanted = self._waiting[0]
            self._waiting.popleft()
            if not turn.done():  # a done future was cancelled: its call no longer waits
                turn.set_result(self.hold(max(min(wanted, left), 0)))
