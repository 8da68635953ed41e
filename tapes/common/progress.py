"""The progress callback for long-running work. The caller decides how to show progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, str], None]
"""A callback with the arguments (phase, done, of, note). It may be called any number of times."""


def silent(phase: str, done: int, of: int, note: str) -> None:
    """Show nothing. This is the default."""
