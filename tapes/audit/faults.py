"""Faults are the errors that ended episodes. Each is listed once, with its cause, its line and a tape to inspect."""

from __future__ import annotations

from ..records import Cause
from ..value import Value


class Fault(Value):
    """An error that ended episodes."""

    cause: str
    """Who caused the error, as a `CauseType`."""
    error: str
    """Class and message of the error."""
    raised_at: str | None
    """Where the error was raised, as `file:line in function`, or None if this isn't known."""
    episodes: int
    tape: str
    """The first tape that the error ended."""

    def __str__(self) -> str:
        at = f" ({self.raised_at})" if self.raised_at else ""
        return f"{self.episodes:,} x error of the {self.cause}: {self.error[:300]}{at}, first on tape {self.tape}"


class Faults:
    """Counts faults. Errors with the same class and the same place are one fault, which keeps the message of the first
    error."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None, str | None], Fault] = {}

    def count(self, tape: str, cause: Cause) -> None:
        """Count an episode that an error ended."""
        key = (cause.type.value, cause.error, cause.frame)
        error = ": ".join(part for part in (cause.error, cause.message) if part)
        first = Fault(cause=cause.type.value, error=error, raised_at=cause.frame, episodes=0, tape=tape)
        fault = self._found.get(key, first)
        self._found[key] = fault.model_copy(update={"episodes": fault.episodes + 1})

    def most(self, n: int = 10) -> tuple[Fault, ...]:
        """Return the `n` faults that ended most episodes, the most frequent first."""
        return tuple(sorted(self._found.values(), key=lambda fault: -fault.episodes)[:n])
