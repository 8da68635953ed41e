"""`tapereel explain --recipe`: past updates under other recipes, as tables of losses and of token weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ..console import Exit, answer, table
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ...finetune.inspect.lab import Experiment

TOKENS = 5
"""Tokens that are named on each side, unless `--tokens` says otherwise."""


def explain_recipes(args: argparse.Namespace) -> int:
    """Compute past updates under the recipes, and print them side by side."""
    from ...finetune.inspect.lab import OWN, lab

    tokens = TOKENS if args.tokens is None else args.tokens
    if tokens < 0:
        raise UsageError(f"--tokens is {tokens}; it must be 0 or more")
    recipes = args.recipes if len(args.recipes) > 1 else [OWN, *args.recipes]
    with live_progress() as progress:
        report = lab(args.run, recipes, args.updates, policy=args.policy, tokens=tokens, progress=progress)
    shown = [item for experiment in report.experiments for item in _tables(experiment)]
    answer(args, report, *shown, f"{report.seconds:.1f} s")
    return Exit.HOLDS


def _tables(experiment: Experiment) -> Iterator[RenderableType]:
    yield (
        f"update {experiment.update} ({experiment.phase}) at version {experiment.version}: {experiment.episodes} "
        f"episodes, {experiment.tokens} tokens of the agent's own"
    )
    made = table(
        "recipe",
        "#loss",
        "#gradient norm",
        "#cosine",
        "#mean |A|",
        "#clipped",
        "#tokens",
        "#dropped",
        "as recorded",
        fold=("recipe",),
    )
    for line in experiment.lines:
        made.add_row(*line.cells())
    yield made
    shifts = _shifts(experiment)
    if shifts is not None:
        yield shifts


def _shifts(experiment: Experiment) -> Table | None:
    made = table("recipe", "token", "#pull, first", "#pull, this", "tape", "#call", "#offset", fold=("recipe", "token"))
    for line in experiment.lines[1:]:
        for shift in (*line.gained, *line.lost):
            made.add_row(
                safe(line.recipe),
                safe(repr(shift.text)),
                f"{shift.first:+.3%}",
                f"{shift.pull:+.3%}",
                safe(shift.tape),
                safe(shift.call.removeprefix(shift.tape).lstrip(".")),
                str(shift.offset),
            )
    return made if made.row_count else None
