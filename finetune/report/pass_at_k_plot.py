"""pass@k over k with its interval, drawn as a PNG file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...agents.runs.pass_at_k import Rewards, evaluate_rewards
from ...tapes.common.text import safe
from ...tapes.errors import MissingExtra, UsageError

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
"""Of the curves, in order."""
SIZE = (8.0, 4.5)
"""Width and height in inches; 1600 x 900 pixels at 200 dots per inch."""
LONGEST = 56
"""Characters of a label; a longer one would leave no room for the curves."""
INK, FAINT, PAPER = "#1f2430", "#b9c0cc", "#ffffff"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    # Otherwise a name with a `$` in it would be typeset as mathematics, or fail.
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def plot_pass_at_k(path: str | Path, evaluations: Mapping[str, Rewards], *, success: float = 1.0) -> None:
    """Draw one curve for each evaluation, by name, over every k that all its tasks have scored attempts for.

    UsageError where a task of an evaluation has no scored attempt.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "drawing a curve") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for i, (name, rewards) in enumerate(evaluations.items()):
            least = min((n for own in rewards.values() if (n := sum(r is not None for r in own))), default=0)
            if not least:
                raise UsageError(f"no attempt of {name} is scored, so there is no pass@k to draw")
            found = evaluate_rewards(rewards, k=range(1, least + 1), success=success).pass_at
            points = {k: interval for k, interval in found.items() if interval is not None}
            colour = COLOURS[i % len(COLOURS)]
            bounded = [
                (k, one.low, one.high) for k, one in points.items() if one.low is not None and one.high is not None
            ]
            low, high = [low for _, low, _ in bounded], [high for _, _, high in bounded]
            axes.fill_between([k for k, _, _ in bounded], low, high, color=colour, alpha=0.15, linewidth=0)
            label = "pass@k" if len(evaluations) == 1 else name
            axes.plot(
                list(points),
                [interval.value for interval in points.values()],
                color=colour,
                linewidth=1.8,
                marker="o" if len(points) < 3 else None,
                label=safe(label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"),
            )
        axes.set(title="Chance that one of k attempts succeeds", xlabel="k", ylabel="pass@k", ylim=(-0.03, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, alpha=0.5, linewidth=0.6)
        axes.tick_params(length=0)
        axes.legend(frameon=False, loc="best", labelcolor=INK)
        with warnings.catch_warnings():
            # The font lacks some scripts: their letters are drawn as boxes, and the name stays as it is.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(path, format="png", dpi=200, facecolor=PAPER)
