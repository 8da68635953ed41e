"""Limits of one episode, and how reaching one stops it."""

from __future__ import annotations

from pydantic import Field

from ..tapes import CauseType
from ..tapes.value import Value


class Limits(Value):
    """What one episode may use. Reaching a limit is an end, not a crash; the tape says which one."""

    turns: int | None = Field(default=100, ge=1)
    """Actions; None for no limit."""
    calls: int | None = Field(default=None, ge=1)
    """Questions to the model; reaching it counts as a limit of turns."""
    tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens over all calls."""
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
