"""The progress callback that long work calls. How it is shown is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, str], None]
"""(phase, done, of, note): may be called as often as the work likes."""


def silent(phase: str, done: int, of: int, note: str) -> None:
    """Shows nothing: the default where no progress display is wanted."""
