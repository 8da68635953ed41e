"""`tapereel replay model`: compute the log-prob of every sampled token again and compare it with the recorded one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

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
        metavar="X",
        help="largest difference in nats that counts as equal (default: 0.0001 in float32, measured in bfloat16)",
    )


def run(args: argparse.Namespace) -> int:
    """Compute the log-probs, and print the verdicts and the differences."""
    from ...finetune.inspect.requery import requery_run  # imports torch

    with live_progress() as progress:
        verdicts, reason = requery_run(
            args.run, args.model, tolerance=args.tolerance, progress=progress, **tape_arguments(args)
        )
    lines = [reason] if reason else _difference_lines(verdicts.verdicts)
    return print_verdicts(args, verdicts, *lines, data={"reason": reason})


def _difference_lines(found: tuple[Verdict, ...]) -> Iterator[str]:
    for precision in sorted({v.precision for v in found if v.precision is not None}):
        compared = [v for v in found if v.precision == precision]
        n = sum(v.checked["tokens"] for v in compared)
        mean = sum(v.measured["mean"] * v.checked["tokens"] for v in compared) / n
        of = max(
            (v.measured for v in compared),
            key=lambda one: one.get("version_error", 0) / one.get("version_tolerance", 1),
        )
        yield (
            f"{precision}: log-probs of {n:,} tokens differ by {mean:.2g} nats on average and "
            f"{max(v.measured['largest'] for v in compared):.2g} at most"
            + (
                f". Against float32, those of a version are off by up to {of['version_error']:.2g} (root mean square), "
                f"and those computed again by {of['rounding']:.2g} (tolerance {of['version_tolerance']:.2g})"
                if "version_error" in of
                else f" (tolerance {of['tolerance']:g})"
            )
        )
