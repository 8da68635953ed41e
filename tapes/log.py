"""Parts of a tape's log: entries (steps with bookkeeping), cuts between turns, tape ids, and records of steps."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from .records import StepRecord
from .steps import Step, role_of


class Entry(NamedTuple):
    """A step with its bookkeeping."""

    step: Step
    by: str
    calls: tuple[tuple[str, int, int], ...]
    at: float
    turn: int
    """Counted from 0; the environment's reaction belongs to the turn of the action."""
    turns: int
    """Actions taken up to and including this step."""


class Cut(NamedTuple):
    """A place between turns: the number of steps and of records before it."""

    steps: int
    records: int


def new_tape_id() -> str:
    """22 hex digits: 12 of milliseconds since 1970, so that names sort by time, and 10 random ones."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(5).hex()}"


def step_record(tape: str, step: Step, *, by: str, calls: tuple[tuple[str, int, int], ...] = ()) -> StepRecord:
    """The record around a step, stamped now."""
    return StepRecord(tape=tape, by=by, role=role_of(step), kind=step.kind, calls=calls, content=step, at=time.time())
