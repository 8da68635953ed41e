"""Curves over updates, as a PNG file or as an SVG that takes the colours of the page around it.

One drawing serves both. This module knows nothing of runs: it gets numbers and names.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import Any

from pydantic import model_validator

from ...tapes.common.text import safe
from ...tapes.errors import MissingExtra
from ...tapes.value import Value

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
"""Of the series, in order; `--series-1` ... in the SVG."""
WIDE = (8.0, 4.5)
"""Inches."""
LETTERS = 7
"""Of a name, for each inch of width."""
INK, FAINT, PAPER = "#1f2430", "#b9c0cc", "#ffffff"


class Curve(Value):
    """One series of numbers."""

    name: str
    x: tuple[float, ...]
    """Updates, as a rule."""
    y: tuple[float, ...]
    """Same length as `x`; NaN where there is no number: the line has a gap there."""
    mean_of: int = 1
    """Above 1: a thin line of the numbers, and a thick one of the mean over this many of them (itself and earlier)."""
    points: bool = False
    """Each number is marked: there are few, with many updates between."""
    band: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(lower, upper) ends of an interval at each place; None: none is drawn."""

    @model_validator(mode="after")
    def _paired(self) -> Curve:
        if len(self.x) != len(self.y):
            raise ValueError(f"the curve {self.name!r} has {len(self.x)} places and {len(self.y)} values")
        if self.band is not None and {len(self.band[0]), len(self.band[1])} != {len(self.x)}:
            raise ValueError(f"the curve {self.name!r} has {len(self.x)} places and a band of other length")
        if self.mean_of < 1:
            raise ValueError(f"the curve {self.name!r} can't be averaged over {self.mean_of} values")
        return self


class Level(Value):
    """A horizontal line: one number to compare curves with."""

    name: str
    value: float


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
    _draw(path, "png", curves, levels, title, xlabel, ylabel)


def curve_svg(
    curves: Sequence[Curve],
    *,
    levels: Sequence[Level] = (),
    xlabel: str = "update",
    ylabel: str = "reward",
    size: tuple[float, float] = WIDE,
) -> str:
    """The curves as an `<svg>` element, coloured by the CSS variables `--ink`, `--faint`, `--series-1` ... of the page.

    Names are escaped; nothing in it runs or is fetched. `size`: width and height, to which letters of 10 points stand.
    """
    out = io.StringIO()
    _draw(out, "svg", curves, levels, "", xlabel, ylabel, size)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    for i, colour in enumerate(COLOURS, start=1):
        svg = svg.replace(colour, f"var(--series-{i})")
    return svg


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it, NaNs left out; NaN where none is known."""
    means = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _draw(
    target: Any,
    form: str,
    curves: Sequence[Curve],
    levels: Sequence[Level],
    title: str,
    xlabel: str,
    ylabel: str,
    size: tuple[float, float] = WIDE,
) -> None:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "drawing a curve") from error
    # Text is never mathematics: a name with a `$` in it stays as it is.
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "tapereel",
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        longest = int(LETTERS * size[0])
        _lines(axes, curves, levels, longest)
        axes.set(
            **{name: _label(text, longest) for name, text in (("title", title), ("xlabel", xlabel), ("ylabel", ylabel))}
        )
        if all(float(x).is_integer() for curve in curves for x in curve.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if _is_share(curves, levels):
            axes.set_ylim(-0.03, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, alpha=0.5, linewidth=0.6)
        axes.tick_params(length=0)
        if curves or levels:
            axes.legend(frameon=False, loc="best", labelcolor=INK)
        with warnings.catch_warnings():
            # A browser has a font for every script; in a PNG such a letter is a box, and the name stays what it is.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            if form == "png":
                figure.savefig(target, format="png", dpi=200, facecolor=PAPER)
            else:
                figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})


def _label(text: str, longest: int) -> str:
    """No longer than leaves room for the curves."""
    return safe(text if len(text) <= longest else f"{text[: longest - 1]}…")


def _is_share(curves: Sequence[Curve], levels: Sequence[Level]) -> bool:
    """All numbers are from 0 to 1, so that the whole of that range is the honest frame."""
    values = [y for curve in curves for y in curve.y if not math.isnan(y)] + [level.value for level in levels]
    return bool(values) and min(values) >= 0 and max(values) <= 1


def _lines(axes: Any, curves: Sequence[Curve], levels: Sequence[Level], longest: int) -> None:
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, linewidth=0)
        if curve.mean_of > 1:
            axes.plot(curve.x, curve.y, color=colour, linewidth=0.8, alpha=0.4)
            label = f"{_label(curve.name, longest)} (mean of {curve.mean_of})"
            axes.plot(curve.x, running_mean(curve.y, curve.mean_of), color=colour, linewidth=2, label=label)
        else:
            mark = "o" if curve.points or len(curve.x) < 3 else None
            axes.plot(curve.x, curve.y, color=colour, linewidth=1.8, label=_label(curve.name, longest), marker=mark)
    for i, level in enumerate(levels):
        style = ((0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))[i % 4]
        label = f"{_label(level.name, longest)}: {level.value:.3f}"
        axes.axhline(level.value, color=INK, linewidth=1, linestyle=style, label=label)
