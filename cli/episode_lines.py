"""An episode as a few lines of progress, for the verbs that train."""

from __future__ import annotations

import json
import shutil

from ..tapes import Tape
from ..tapes.common.stats import number
from ..tapes.records import Cause
from ..tapes.steps import role_of
from ..tapes.transcript import shown
from .console import say, styled

STEPS = 8
"""Maximum number of lines for the steps of an episode."""


def say_episode(update: int, tape: Tape) -> None:
    """Print an episode from the batch of this update to stderr."""
    say("\n".join(episode_lines(update, tape, shutil.get_terminal_size().columns)))


def episode_lines(update: int, tape: Tape, width: int) -> list[str]:
    """Return the episode's reward, its steps and the expected answer if the task has one. Of a long episode, the last
    step and the first ones are shown. Longer lines are cut to `width` columns."""
    agents = {entry.by for entry in tape.entries if role_of(entry.step) == "action"}
    rows = list[tuple[str, str]]()
    for entry in tape.entries:
        role, text = role_of(entry.step), shown(entry.step)
        label = f"turn {entry.turn + 1}" if role == "action" else role if rows else "question"
        rows.append((label, f"{entry.by}: {text}" if len(agents) > 1 and role == "action" else text))
    if len(rows) > STEPS:
        rows[STEPS - 2 : -1] = [("...", f"{len(rows) - STEPS + 1} more steps")]
    if (expected := tape.begin.task.expected) is not None:
        rows.append(("expected", expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False)))
    ended = "" if tape.cause is None else f", {tape.status}: {_why(tape.cause)}"
    head = f"update {update}, one of its episodes: reward {number(tape.reward)}{ended}"
    return [_one_line(line, width) for line in (head, *(f"  {label:<11} {text}" for label, text in rows))]


def _why(cause: Cause) -> str:
    return ": ".join(filter(None, (cause.error, cause.message))) or cause.type


def _one_line(text: str, width: int) -> str:
    line = styled(" ".join(text[: 4 * width].splitlines()).replace("\t", " "))
    line.truncate(width, overflow="ellipsis")
    return line.plain
