"""`tapereel lab`: a past update of a run under other recipes, token by token."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ..console import Exit, answer, table
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...finetune.inspect.lab import Experiment

EXAMPLE = """
tapereel lab runs/demo --recipe own --recipe dr_grpo --recipe rloo
tapereel lab runs/demo --recipe mine.yaml --update 410 --update 420 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", help="a run directory of `tapereel demo` or `tapereel train`")
    parser.add_argument(
        "--recipe",
        action="append",
        required=True,
        metavar="R",
        dest="recipes",
        help="a recipe's name, `own`, or a YAML file with `recipe` and `changes`; repeat it, the first "
        "is what the others are compared with (one alone: with `own`)",
    )
    parser.add_argument(
        "--update",
        action="append",
        type=int,
        metavar="K",
        dest="updates",
        help="number of an update, from 0; repeat it for more (default: the loop's last)",
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="one of the run's players that learned (default: the loop's own policy)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=5,
        metavar="N",
        help="name the N tokens that gain most weight, and lose most (default 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Compute and print."""
    from ...finetune.inspect.lab import OWN, lab

    if args.tokens < 0:
        raise UsageError(f"--tokens is {args.tokens}; it must be 0 or more")
    recipes = args.recipes if len(args.recipes) > 1 else [OWN, *args.recipes]
    with live_progress() as progress:
        report = lab(args.run, recipes, args.updates, policy=args.policy, tokens=args.tokens, progress=progress)
    shown = [item for experiment in report.experiments for item in _shown(experiment)]
    answer(args, report, *shown, f"{report.seconds:.1f} s")
    return Exit.HOLDS


def _shown(experiment: Experiment) -> Iterator[RenderableType]:
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


def _shifts(experiment: Experiment) -> Any:
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
