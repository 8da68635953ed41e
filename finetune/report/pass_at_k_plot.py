"""pass@k over k with its interval, drawn as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...agents.runs.pass_at_k import Rewards, evaluate_rewards
from ...tapes.errors import UsageError
from ...tapes.view.curves import Curve
from .plots import plot_curve


def plot_pass_at_k(path: str | Path, evaluations: Mapping[str, Rewards], *, success: float = 1.0) -> None:
    """Draw one curve for each evaluation, by name, over every k that all its tasks have scored attempts for.

    UsageError where a task of an evaluation has no scored attempt.
    """
    curves: list[Curve] = []
    for name, rewards in evaluations.items():
        least = min((n for own in rewards.values() if (n := sum(r is not None for r in own))), default=0)
        if not least:
            raise UsageError(f"no attempt of {name} is scored, so there is no pass@k to draw")
        found = evaluate_rewards(rewards, k=range(1, least + 1), success=success).pass_at
        points = {k: interval for k, interval in found.items() if interval is not None}
        low, high = (
            tuple(end for interval in points.values() if (end := getattr(interval, side)) is not None)
            for side in ("low", "high")
        )
        curves.append(
            Curve(
                name="pass@k" if len(evaluations) == 1 else name,
                x=tuple(map(float, points)),
                y=tuple(interval.value for interval in points.values()),
                band=(low, high),
            )
        )
    plot_curve(path, curves, title="Chance that one of k attempts succeeds", xlabel="k", ylabel="pass@k")
