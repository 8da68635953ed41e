"""`tapereel reproduce`: recompute a checkpoint from the base weights and the recorded tapes, and compare."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...tapes.common.text import safe
from ..console import answer, table
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from rich.table import Table

    from ...finetune.inspect.reproducer import Reproduction

EXAMPLE = """
tapereel reproduce runs/demo
tapereel reproduce runs/demo update-000400 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory of `tapereel demo` or `tapereel train`, or a checkpoint in one")
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CKPT",
        help="a checkpoint's directory, its name, or its update (default: every checkpoint of the run, those of its "
        "players included)",
    )


def run(args: argparse.Namespace) -> int:
    """Recompute, and print the verdict."""
    from ...finetune.inspect.reproducer import reproduce

    with live_progress() as progress:
        found = reproduce(args.run, args.checkpoint, progress=progress)
    others = (
        line
        for name, one in found.players.items()
        for line in (safe(f"the player {name} ({one.lineage}): {one}"), _table(one))
    )
    answer(args, found, safe(str(found)), _table(found), *others)
    return found.exit_code


def _table(found: Reproduction) -> Table:
    made = table("compared", "#number", fold=("compared",))
    for name, number in (
        (f"updates applied again, from {safe(found.base)}, bit for bit as recorded", f"{found.updates} of {found.of}"),
        ("versions with the published weights", str(found.published)),
        ("checkpoint files with the recomputed weights", str(found.checkpoints)),
        ("of these, with the recomputed state of the optimiser and the trainer", str(found.trainers)),
        ("tapes trained on, each with the pinned digest", str(found.tapes)),
    ):
        made.add_row(name, number)
    made.add_row("seconds", f"{found.seconds:.1f}")
    return made
