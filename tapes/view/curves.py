"""Computes the curves of a training run, as numbers and names, from its metrics.jsonl and its results.

The overview page of the viewer draws them in the browser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..store.run_directory import Results, read_metrics
from ..value import Value

MEAN_OF = 5
"""The thick line of a reward curve shows the mean over this number of updates."""


class Curve(Value):
    """One series of numbers."""

    name: str
    x: tuple[float, ...]
    """The horizontal positions, usually the numbers of updates."""
    y: tuple[float, ...]
    """One number for each position in `x`. NaN stands for a missing number and leaves a gap in the line."""
    mean_of: int = 1
    """If this is above 1, a thin line shows the numbers, and a thick line shows the mean of each number and its
    `mean_of - 1` predecessors."""
    points: bool = False
    """Whether a mark is drawn at each number. This is meant for few numbers with many updates between them."""


class Level(Value):
    """A horizontal line in a figure, for comparison with the curves."""

    name: str
    value: float


class Plot(Value):
    """One figure."""

    title: str
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()
    xlabel: str = "update"
    ylabel: str = "reward"
    caption: str = ""
    small: bool = False
    """Whether the figure is drawn next to other figures instead of filling the width of the page."""


def reward_curve(name: str, metrics: Path) -> Curve:
    """Return the mean reward of each update in the loop, with NaN if a batch was not scored."""
    return _curve(name, "reward", _loop(read_metrics(metrics)), MEAN_OF)


_AGENT = "reward/agent/"
"""The prefix of metrics that hold agents' rewards. The agent's path follows this prefix."""


def agent_curves(metrics: Path) -> list[Curve]:
    """Return a curve of the mean reward for each agent that has rewards in the metrics."""
    lines = _loop(read_metrics(metrics))
    keys = dict.fromkeys(key for line in lines for key in line if key.startswith(_AGENT))
    return [_curve(key.removeprefix(_AGENT), key, lines, MEAN_OF) for key in keys]


def reward_plot(name: str, metrics: Path, results: Results) -> Plot:
    """Return a plot of the mean reward per update: overall, for each agent, and on held-out tasks."""
    rewards = reward_curve(name, metrics)
    curves = [rewards, *agent_curves(metrics), *held_out_curve(results, len(rewards.x))]
    levels = [
        Level(name=f"held out, {when}", value=mean)
        for when, part in (("before", results.before), ("after", results.after))
        if part and (mean := part["sampled"].mean) is not None
    ]
    return Plot(
        title="Mean reward of each update's episodes",
        curves=tuple(curves),
        levels=tuple(levels),
        ylabel="mean reward",
        caption="The thin line has each update, the thick line the mean over five.",
    )


def held_out_curve(results: Results, updates: int) -> list[Curve]:
    """Return a list with the held-out curve, from the evaluation before the loop to the one after `updates` updates. It
    is empty if no update was followed by an evaluation."""
    found = {int(update): part["sampled"].mean for update, part in results.evaluations.items()}
    for update, part in ((0, results.before), (updates, results.after)):
        if part:
            found[update] = part["sampled"].mean
    if found.keys() <= {0}:
        return []
    found = dict(sorted(found.items()))
    return [Curve(name="held out", x=tuple(map(float, found)), y=tuple(map(_number, found.values())), points=True)]


def loss_plots(metrics: Path) -> list[Plot]:
    """Return plots of the imitation loss and of quantities that the loop's updates measured, for the policy and each
    player. Only quantities that were measured have a plot."""
    lines = read_metrics(metrics)
    warm = [line for line in lines if str(line.get("phase", "")).startswith("sft")]
    loop = _loop(lines)
    keys = dict.fromkeys(key for line in loop for key in line)
    found = [("Loss of the imitation", "", _curves({"loss": "loss"}, warm))]
    for title, what, caption in _MEASURED:
        named = {key: name for key in keys if (name := _name_of(key, what.split())) is not None}
        found.append((title, caption, _curves(named, loop)))
    return [
        Plot(title=title, curves=tuple(curves), ylabel="", caption=caption, small=True)
        for title, caption, curves in found
        if curves
    ]


_MEASURED = (
    ("Loss", "loss loss/*", "The whole, and each term: the surrogate (policy), regularisers, demonstrations (nll)."),
    (
        "Components",
        "component/* return",
        "Mean over episodes. The return is the reward with the recipe's changes and penalties.",
    ),
    (
        "Lengths",
        "length/answer length/episode length/total",
        "Mean tokens of an answer, of an episode's answers, and of its sequences.",
    ),
    ("Turns", "turns", "Mean of the episodes."),
    ("Cut off", "length/answer/cut ended/*", "Share of answers at their token limit; share of episodes by their end."),
    ("Flat groups", "group/flat", "Share of the groups whose rewards are all equal."),
    ("Entropy", "entropy entropy/sampled", "In nats, of the live tokens. `sampled` is estimated from all own tokens."),
    ("Clipped", "clip clip/*", "Share of the live tokens, which have an advantage. `own`: share of all own tokens."),
    (
        "Mismatch",
        "mismatch mismatch/mean",
        "Difference of sampler and trainer in a token's log-prob, by the same weights: largest and mean.",
    ),
    ("Moved", "moved/mean moved/max", "The same of all tokens: also what updates changed since they were sampled."),
    ("Effective sample size", "ess", "Share of the live tokens, those with an advantage; 1 on policy."),
    ("KL", "kl/*", "From the policy that sampled (old), or to the policy that the name says."),
    ("Age", "lag lag/max", "Updates since the sampled tokens, mean and largest."),
    ("Stale", "stale_share", "Share of the batch's own tokens that were too old to be trained on."),
    ("Gradient norm", "grad_norm value/grad_norm", "Before clipping. `value` is the critic's."),
    ("Learning rate", "lr value/lr", "`value` is the critic's."),
    ("Critic", "value/loss value/explained", "Loss, and the share of the targets' variance that the values explain."),
    ("Tokens per second", "perf/*_per_second", "Of the engine's and of the trainer's work since the last update."),
)
"""(title, keys or patterns of keys, caption) for each plot. docs/reference/metrics.md defines the keys."""


def _name_of(key: str, what: Sequence[str]) -> str | None:
    """Return the curve's name for a key in the metrics, or None if no pattern in `what` matches the key."""
    player, own = key.split("/", 2)[1:] if key.startswith("players/") else ("", key)
    if not any(fnmatchcase(own, pattern) for pattern in what):
        return None
    return f"{own} of {player}" if player else own


def _curves(named: Mapping[str, str], lines: Sequence[Mapping[str, Any]]) -> list[Curve]:
    made = [_curve(name, key, lines) for key, name in named.items()]
    return [curve for curve in made if any(not math.isnan(y) for y in curve.y)]


def _curve(name: str, key: str, lines: Sequence[Mapping[str, Any]], mean_of: int = 1) -> Curve:
    """Return the curve of one key in the metrics. Its x-axis is the number of the line, counted from 1."""
    x = tuple(float(k + 1) for k in range(len(lines)))
    return Curve(name=name, x=x, y=tuple(_number(line.get(key)) for line in lines), mean_of=mean_of)


def _loop(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get("phase") == "rl"]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
