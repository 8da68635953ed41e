"""Draws curves as a PNG file: `reward.png` of a training run, and pass@k of `tapereel eval --plot`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import Any

from ...tapes.common.text import safe
from ...tapes.errors import MissingExtra
from ...tapes.view.curves import Curve, Level

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
"""Of the series, in order."""
SIZE = (8.0, 4.5)
"""Width and height in inches; 1600 x 900 pixels at 200 dots per inch."""
LONGEST = 56
"""Characters of a label; a longer one would leave no room for the curves."""
INK, FAINT, PAPER = "#1f2430", "#b9c0cc", "#ffffff"


def plot_curve(
    path: str | PathLike[str],
    curves: Sequence[Curve],
    *,
    levels: Sequence[Level] = (),
    title: str = "",
    xlabel: str = "update",
    ylabel: str = "reward",
) -> None:
    """Write the curves as a PNG of 1600 x 900 pixels."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "drawing a curve") from error
    # Without `parse_math` off, a name with a `$` in it would be typeset as mathematics, or fail.
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.parse_math": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_curves(axes, curves, levels)
        axes.set(title=_label(title), xlabel=_label(xlabel), ylabel=_label(ylabel))
        if all(float(x).is_integer() for curve in curves for x in curve.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if _within_0_and_1(curves, levels):
            # An axis that is cut to the data would make a small change of a share look large.
            axes.set_ylim(-0.03, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, alpha=0.5, linewidth=0.6)
        axes.tick_params(length=0)
        if curves or levels:
            axes.legend(frameon=False, loc="best", labelcolor=INK)
        with warnings.catch_warnings():
            # The font lacks some scripts: their letters are drawn as boxes, and the name stays as it is.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(path, format="png", dpi=200, facecolor=PAPER)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it, without NaNs; NaN where all of them are NaN."""
    means = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _label(text: str) -> str:
    return safe(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def _within_0_and_1(curves: Sequence[Curve], levels: Sequence[Level]) -> bool:
    values = [y for curve in curves for y in curve.y if not math.isnan(y)] + [level.value for level in levels]
    return bool(values) and min(values) >= 0 and max(values) <= 1


def _draw_curves(axes: Any, curves: Sequence[Curve], levels: Sequence[Level]) -> None:
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, linewidth=0)
        if curve.mean_of > 1:
            axes.plot(curve.x, curve.y, color=colour, linewidth=0.8, alpha=0.4)
            label = f"{_label(curve.name)} (mean of {curve.mean_of})"
            axes.plot(curve.x, running_mean(curve.y, curve.mean_of), color=colour, linewidth=2, label=label)
        else:
            mark = "o" if curve.points or len(curve.x) < 3 else None
            axes.plot(curve.x, curve.y, color=colour, linewidth=1.8, label=_label(curve.name), marker=mark)
    for i, level in enumerate(levels):
        style = ((0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))[i % 4]
        label = f"{_label(level.name)}: {level.value:.3f}"
        axes.axhline(level.value, color=INK, linewidth=1, linestyle=style, label=label)
