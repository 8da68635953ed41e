"""The limits of one episode, and the exception that ends the episode when a limit is reached."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, Self

from pydantic import Field, JsonValue, ValidationError

from ...tapes import CauseType, Message
from ...tapes.errors import USE_ITS_VERSION, UsageError
from ...tapes.value import Value


class Limits(Value):
    """What one episode may use. Reaching a limit ends the episode without an error, and the tape names the limit."""

    turns: int | None = Field(default=100, ge=1)
    """Maximum number of Actions. None means no limit."""
    calls: int | None = Field(default=None, ge=1)
    """Maximum number of model calls. Reaching this limit is recorded as a limit of turns."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens sampled in all calls together. A call in flight counts with the maximum that it may sample."""
    context: int | None = Field(default=None, ge=2)
    """Maximum tokens in one call's prompt and completion. The engine's own limit applies too."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens in one call's prompt. A longer prompt is cut if `keep_prompt` is set. Otherwise it ends the
    episode at the context limit."""
    keep_prompt: Literal["start", "end"] | None = None
    """Which messages are kept if the prompt is too long: after the system prompt and the first observation, the oldest
    (`start`) or the newest (`end`). Whole messages are left out, each answer with the observation that followed, until
    the prompt has at most `prompt_tokens` tokens and leaves space in the context for an answer of `max_tokens`. The
    system prompt and the newest observation are always kept. If they alone are too long, the episode ends at the
    context limit. If this is None, no prompt is cut."""
    agent_seconds: float | None = Field(default=600.0, gt=0)
    """Maximum seconds for the agent's own code, its tools, and its model calls while the model computes. An episode
    that reaches this limit is scored and trained on, like one that reaches the limit of turns."""
    system_seconds: float | None = Field(default=1800.0, gt=0)
    """Maximum seconds for everything but agent time, up to the episode's last step: the engine's queue, the environment
    and Tapereel. The wait for servers that don't answer has its own limit, `engine.patience`. An episode that reaches
    this limit is never trained on, and is repeated."""
    environment_seconds: float | None = Field(default=60.0, gt=0)
    """Wall-clock limit for each `reset`, `restore`, `step`, `finish` or `close`, in seconds. A longer call is an
    environment error."""

    @classmethod
    def recorded(cls, limits: dict[str, JsonValue] | None, **changes: JsonValue) -> Self:
        """Return the limits that a tape records, with `changes`. A limit that isn't recorded doesn't apply.

        Raises UsageError if a limit can't be read.
        """
        try:
            return cls.model_validate({**dict.fromkeys(cls.model_fields), **(limits or {}), **changes})
        except ValidationError as error:
            found = error.errors()[0]
            name = ".".join(map(str, found["loc"]))
            raise UsageError(f"the tape's limit {name} can't be read: {found['msg']}; {USE_ITS_VERSION}") from error


class LimitReached(BaseException):
    """`LLM` raises this in the agent when a limit is reached.

    This class doesn't derive from Exception, so that an agent's `except Exception` doesn't catch it. `LLM` also
    remembers the limit, and every later call raises it again.
    """

    def __init__(self, limit: CauseType, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class TokenBudget:
    """Tokens that an episode may sample, shared by its concurrent calls.

    Invariant: the sum of `used` and the tokens held by calls in flight never exceeds `limit`. If no tokens are left, a
    call waits until another call returns some. Waiting calls are served in order of arrival. Without this wait,
    concurrent calls could sample more than the limit, or a call could fail just before others return tokens. Only a
    replay may exceed the limit, because it takes the recorded numbers (`hold`).
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        """Maximum number of tokens. None means that no call waits."""
        self.used = 0
        """Number of tokens sampled so far."""
        self._held = 0
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        """(future, tokens wanted) for each waiting call, in order of arrival."""

    @property
    def spent(self) -> bool:
        """Whether the sampled tokens have reached the limit."""
        return self.limit is not None and self.used >= self.limit

    async def take(self, wanted: int) -> int:
        """Take 1 to `wanted` tokens and return their number, or 0 if all are spent. Give them back with `give`."""
        if self.limit is None:
            return wanted
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, wanted))
        self._next()
        try:
            return turn.result() if turn.done() else await turn
        except asyncio.CancelledError:
            # A call may be cancelled after it got tokens, but before it continued. These tokens must be given back.
            if not turn.cancelled():
                self.give(turn.result())
            raise

    def hold(self, tokens: int) -> int:
        """Take exactly `tokens` tokens, even if fewer are left, and return this number. Used in a replay."""
        self._held += tokens
        return tokens

    def give(self, tokens: int) -> None:
        """Give back the tokens from `take` or `hold`. The caller must first add the sampled tokens to `used`."""
        if self.limit is not None:
            self._held -= tokens
            self._next()

    def _next(self) -> None:
        assert self.limit is not None
        while self._waiting:
            left = self.limit - self.used - self._held
            if left < 1 and self._held:
                return  # a call in flight may return some
            turn, wanted = self._waiting[0]
            self._waiting.popleft()
            if not turn.done():  # a done future was cancelled, so its call no longer waits
                turn.set_result(self.hold(max(min(wanted, left), 0)))


def shorter_prompts(messages: Sequence[Message], keep: Literal["start", "end"]) -> Iterator[list[Message]]:
    """Yield the conversation with more and more messages left out, as `Limits.keep_prompt` describes."""
    said = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    system = next((k for k, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    if not said or said[0] < system:
        return
    first, last = said[0], said[-1]
    for k in said[1:] if keep == "end" else said[-2::-1]:
        yield [*messages[:first], *messages[k:]] if keep == "end" else [*messages[:k], *messages[last:]]
    newest = messages[last + 1 :]
    if newest and newest[0]["role"] != "tool":  # a tool's result isn't read without its call
        yield [*messages[:system], *newest]
