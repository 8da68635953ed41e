"""Scores as lines of text, for the verbs `run` and `scores`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tapes.common.text import counted
from ..tapes.errors import UsageError

if TYPE_CHECKING:
    from ..agents.runs.pass_at_k import Scores


def read_k(text: str) -> tuple[int, ...]:
    """Parse a list of numbers such as `1,4,16`. Raises UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--k {text!r} is not a list of numbers above 0; write, for example, --k 1,4,16")
    return tuple(map(int, parts))


def lost_line(scores: Scores) -> str:
    """Describe the share of tasks without a result. This line precedes the means, because they omit these tasks."""
    if scores.tasks and not scores.without:
        return f"all {counted(scores.tasks, 'task')} have a result" if scores.tasks > 1 else "the task has a result"
    share = scores.without / scores.tasks if scores.tasks else 0.0
    return f"{share:.1%} of the tasks have no result ({scores.without:,} of {scores.tasks:,})"


def cut_lines(cut: int, answers: int) -> list[str]:
    """Return one line if a limit on tokens cut answers off."""
    return [f"{cut:,} of {counted(answers, 'answer')} cut off at max_tokens"] if cut else []


def score_lines(scores: Scores, indent: str = "") -> list[str]:
    """Return one line each for the mean reward, pass@k and the labels, with their intervals."""
    lines = [f"{indent}{lost_line(scores)}"]
    if scores.reward is not None:
        lines.append(f"{indent}reward {scores.reward} over {scores.reward.tasks:,} tasks")
    for k, found in scores.pass_at.items():
        short = f"; {scores.short[k]:,} with fewer than {k} scored attempts left out" if scores.short[k] else ""
        text = f"no task has {k} scored attempts" if found is None else f"{found} over {found.tasks:,} tasks{short}"
        lines.append(f"{indent}pass@{k} {text}")
    if scores.unscored:
        lines.append(f"{indent}{scores.unscored:,} of {scores.attempts:,} attempts are unscored: neither success nor 0")
    lines += [f"{indent}{line}" for line in cut_lines(scores.cut, scores.answers)]
    for label, part in scores.by_label.items():
        lines += [f"{indent}{label}:", *score_lines(part, indent + "  ")]
    return lines
