"""The progress callback that long work calls. The caller decides how to show progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, str], None]
"""(phase, done, of, note). The work may call it any number of times."""


def silent(phase: str, done: int, of: int, note: str) -> None:
    """Shows nothing: the default."""
