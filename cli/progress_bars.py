"""Live progress on stderr. On a terminal, it is shown as bars, and elsewhere as a line of text every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..tapes.common.progress import Progress
from ..tapes.common.text import safe
from .console import console_for, say

SECONDS_BETWEEN_LINES = 5.0
LONG = 60.0
"""Seconds after which a line of text says how long the rest of the phase will take."""


@contextmanager
def live_progress() -> Iterator[Progress]:
    """Provide a progress callback. On a terminal, it draws a bar for each phase. Elsewhere, it prints a line every few
    seconds and at the end of each phase."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _line_reporter()


def _line_reporter() -> Progress:
    last = {"at": 0.0, "phase": ""}
    begun: dict[str, tuple[float, int]] = {}

    def report(phase: str, done: int, of: int, note: str) -> None:
        now = time.monotonic()
        at, before = begun.setdefault(phase, (now, done))  # a resumed run begins in the middle
        if phase != last["phase"] or done == of or now - last["at"] > SECONDS_BETWEEN_LINES:
            last.update(at=now, phase=phase)
            left = (now - at) / (done - before) * (of - done) if done > before else 0.0
            rest = [f"about {timedelta(seconds=round(left))} left"] * (now - at >= LONG and left >= 1)
            say(safe(", ".join([f"{phase}: {done}/{of} {note}".rstrip(), *rest])))

    return report


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bars(*columns, console=console_for(sys.stderr)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, of: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(safe(phase), total=of, note="")
            bars.update(tasks[phase], completed=done, total=of, note=safe(note))

        yield report
