"""`tapereel reproduce`: recompute a checkpoint from the base weights and the recorded tapes, and compare."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ..console import Section, answer
from ..progress_bars import live_progress

if TYPE_CHECKING:
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
        help="a checkpoint's directory, its name, or its update (default: every checkpoint of the run and its players)",
    )


def run(args: argparse.Namespace) -> int:
    """Recompute, and print the verdict. Of several processes, only rank 0 prints it."""
    from ...finetune.inspect.reproducer import reproduce

    if int(os.environ.get("RANK", "0")):
        return reproduce(args.run, args.checkpoint).exit_code
    with live_progress() as progress:
        found = reproduce(args.run, args.checkpoint, progress=progress)
    others = (
        part
        for name, one in found.players.items()
        for part in (f"the player {name} ({one.lineage}): {one}", _section(one))
    )
    answer(args, found, str(found), _section(found), *others)
    return found.exit_code


def _section(found: Reproduction) -> Section:
    rows = (
        (f"updates applied again, from {found.base}, bit for bit as recorded", f"{found.updates} of {found.of}"),
        ("versions with the published weights", str(found.published)),
        ("checkpoint files with the recomputed weights", str(found.checkpoints)),
        ("of these, with the recomputed state of the optimiser and the trainer", str(found.trainers)),
        ("tapes trained on, each with the pinned digest", str(found.tapes)),
        ("seconds", f"{found.seconds:.1f}"),
    )
    return Section(("compared", "#number"), rows)
