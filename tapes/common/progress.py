"""The progress callback for long-running work. The caller decides how to show progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, str], None]
"""The arguments are (phase, done, of, note). The work may call it any number of times."""


def silent(phase: str, done: int, of: int, note: str) -> None:
    """Show nothing. This is the default."""
