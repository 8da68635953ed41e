"""What the lab draws: each token's pull under each recipe as a PNG, and the whole report on one self-contained page.

Whatever a model wrote is text there: the template escapes every value, the page allows no script and fetches nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..report.plots import Curve, curve_svg, plot_curve
from ..report.report import render_page
from .lab import Experiment, LabReport

XLABEL, YLABEL = "tokens, by the first recipe's pull", "pull (share of all; above 0: likelier)"


def pull_curves(experiment: Experiment) -> list[Curve]:
    """A curve for each recipe over the batch's tokens, in the order of the first recipe's pull."""
    order = np.argsort(np.array(experiment.lines[0].pulls), kind="stable")
    return [
        Curve(name=line.recipe, x=tuple(range(len(order))), y=tuple(np.array(line.pulls)[order].tolist()))
        for line in experiment.lines
    ]


def draw_lab(report: LabReport, path: Path) -> None:
    """The last of the report's updates as a PNG."""
    last = report.experiments[-1]
    plot_curve(
        path, pull_curves(last), title=f"Update {last.update}: where each recipe pulls", xlabel=XLABEL, ylabel=YLABEL
    )


def write_lab_page(report: LabReport, path: str | Path) -> None:
    """Write the report as one HTML file."""
    drawn = [curve_svg(pull_curves(e), xlabel=XLABEL, ylabel=YLABEL) for e in report.experiments]
    page = render_page("lab.html.jinja", {}, r=report, drawn=drawn)
    Path(path).write_text(page, encoding="utf-8")
