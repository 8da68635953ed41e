"""`tapereel replay model`: compute the log-prob of every sampled token again and compare it with the recorded one."""

from __future__ import annotations

import argparse

from ...tapes.audit.verdict import Verdict
from ..progress_bars import live_progress
from .verdict_output import add_tape_arguments, print_verdicts, tape_arguments

EXAMPLE = """
tapereel replay model runs/digits
tapereel replay model runs/digits --split eval-after-sampled --model runs/digits/checkpoints/update-000080
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint or model folder for every token (default: the weights that sampled each token)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="largest difference in nats that counts as equal (default %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Compute the log-probs, and print the verdicts and the differences."""
    from ...finetune.inspect.requery import requery_run  # imports torch

    with live_progress() as progress:
        verdicts, reason = requery_run(
            args.run, args.model, tolerance=args.tolerance, progress=progress, **tape_arguments(args)
        )
    lines = [reason] if reason else _difference_lines(verdicts.verdicts, args.tolerance)
    return print_verdicts(args, verdicts, *lines, data={"reason": reason})


def _difference_lines(found: tuple[Verdict, ...], tolerance: float) -> list[str]:
    compared = [v for v in found if v.measured]
    n = sum(v.checked["tokens"] for v in compared)
    if not n:
        return []
    mean = sum(v.measured["mean"] * v.checked["tokens"] for v in compared) / n
    largest = max(v.measured["largest"] for v in compared)
    return [
        f"log-probs of {n:,} tokens differ by {mean:.2g} nats on average and {largest:.2g} at most "
        f"(tolerance {tolerance:g})"
    ]
