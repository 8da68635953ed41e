"""The curves of a training run, from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tapes.rundir import read_metrics
from .plots import Curve, Level

MEAN_OF = 5
"""Updates that the thick line of a reward curve averages over."""


def reward_curve(name: str, metrics: Path) -> Curve:
    """Mean reward of each update of the loop; NaN where a batch was not scored."""
    rewards = [_number(line.get("reward")) for line in read_metrics(metrics) if line.get("phase") == "rl"]
    return Curve(name=name, x=tuple(float(k + 1) for k in range(len(rewards))), y=tuple(rewards), mean_of=MEAN_OF)


def agent_curves(paths: Sequence[str], metrics: Path) -> list[Curve]:
    """The same of the agents at these paths, each of which is compared with itself."""
    lines = [line for line in read_metrics(metrics) if line.get("phase") == "rl"]
    return [Curve(name=path, x=tuple(float(k + 1) for k in range(len(lines))),
                  y=tuple(_number(line.get(f"reward/{path}")) for line in lines), mean_of=MEAN_OF)
            for path in paths]  # fmt: skip


def held_out_levels(results: dict[str, Any], evaluation: str) -> tuple[Level, ...]:
    """The held-out reward before and after, as far as it was measured."""
    found = ((name, results.get(name)) for name in ("before", "after"))
    return tuple(Level(name=f"held out, {name}", value=part[evaluation]["mean"]) for name, part in found
                 if part and part[evaluation]["mean"] is not None)  # fmt: skip


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
