"""The curves of a training run, from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...tapes.store.run_directory import read_metrics
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
    return [
        Curve(
            name=path,
            x=tuple(float(k + 1) for k in range(len(lines))),
            y=tuple(_number(line.get(f"reward/{path}")) for line in lines),
            mean_of=MEAN_OF,
        )
        for path in paths
    ]


def held_out_levels(results: dict[str, Any], evaluation: str) -> tuple[Level, ...]:
    """The held-out reward before and after, as far as it was measured."""
    found = ((name, results.get(name)) for name in ("before", "after"))
    return tuple(
        Level(name=f"held out, {name}", value=part[evaluation]["mean"])
        for name, part in found
        if part and part[evaluation]["mean"] is not None
    )


def held_out_curve(results: dict[str, Any]) -> list[Curve]:
    """The held-out reward over the updates of the loop; none where it was measured only before and after."""
    found = {int(update): part["sampled"]["mean"] for update, part in results.get("evaluations", {}).items()}
    if not found:
        return []
    if results.get("before"):
        found[0] = results["before"]["sampled"]["mean"]
    found = dict(sorted(found.items()))
    return [Curve(name="held out", x=tuple(map(float, found)), y=tuple(map(_number, found.values())), points=True)]


def loss_curves(metrics: Path) -> list[tuple[str, str, list[Curve]]]:
    """(title, caption, curves) of what each update of the imitation and of the loop came to, as far as it was
    measured: the policy's own and that of each player."""
    lines = read_metrics(metrics)
    warm = [line for line in lines if str(line.get("phase", "")).startswith("sft")]
    loop = [line for line in lines if line.get("phase") == "rl"]
    keys = dict.fromkeys(key for line in loop for key in line)
    found = [("Loss of the imitation", "", _curves({"loss": "loss"}, warm))]
    for title, what, caption in _MEASURED:
        named = {key: name for key in keys if (name := _name_of(key, what)) is not None}
        found.append((title, caption, _curves(named, loop)))
    return [one for one in found if one[2]]


_MEASURED = (
    ("Loss", "loss", ""),
    ("Entropy", "entropy", "Of the policy over its own tokens, in nats."),
    (
        "Mismatch",
        "mismatch",
        "Largest difference between a token's log-prob when it was sampled and when the update met it.",
    ),
    ("KL", "kl", "From the policy that sampled (old), or to that which the name says."),
)
"""(title, key or its beginning, caption)."""


def _name_of(key: str, what: str) -> str | None:
    """What the curve of a key of metrics is called; None where it is none of `what`."""
    *above, last = key.split("/")
    if key == what:
        return what
    if len(above) == 2 and above[0] == "players" and last == what:
        return f"{what} of {above[1]}"
    return key if what == "kl" and above[:1] == ["kl"] and last not in ("min", "max", "square") else None


def _curves(named: Mapping[str, str], lines: Sequence[Mapping[str, Any]]) -> list[Curve]:
    x = tuple(float(k + 1) for k in range(len(lines)))
    made = [Curve(name=name, x=x, y=tuple(_number(line.get(key)) for line in lines)) for key, name in named.items()]
    return [curve for curve in made if any(not math.isnan(y) for y in curve.y)]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
