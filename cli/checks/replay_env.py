"""`tapereel replay env`: execute the recorded actions again, in a fresh environment."""

from __future__ import annotations

import argparse

from ...envs.checks.reexec import SECONDS, proposed_masks, reexec_run
from ..console import at_least, positive
from ..progress_bars import live_progress
from .verdict_output import add_jobs_argument, add_tape_arguments, print_verdicts, tape_arguments

EXAMPLE = """
tapereel replay env runs/digits --times 3
tapereel replay env runs/digits --env examples/digits.py:Digits --mask 'digit.text=[0-9]+' --mask reward.seconds
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--env",
        metavar="NAME",
        help="an environment class or factory, as module:name (default: the environment of the run's configuration)",
    )
    parser.add_argument(
        "--times",
        type=at_least(1),
        default=1,
        metavar="N",
        help="execute N times and print which fields vary (default 1)",
    )
    parser.add_argument(
        "--mask",
        action="append",
        default=[],
        metavar="FIELD[=REGEX]",
        help="a field that may differ (`kind.field`, `reward.name`), or the part of it that may; repeatable",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=SECONDS,
        metavar="S",
        help="longest execution of one tape (default %(default)g)",
    )
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Execute the actions again, and print the verdicts and the fields that vary."""
    with live_progress() as progress:
        verdicts = reexec_run(
            args.run,
            args.env,
            masks={field: rule or None for field, _, rule in (text.partition("=") for text in args.mask)},
            times=args.times,
            seconds=args.seconds,
            jobs=args.jobs,
            progress=progress,
            **tape_arguments(args),
        )
    proposed = proposed_masks(verdicts.verdicts)
    lines = [f"varies = {proposed!r}   # on the environment, if these fields may vary"] if proposed else []
    if args.times > 1 and not proposed:
        lines = [f"nothing varies in {args.times} executions"]
    return print_verdicts(args, verdicts, *lines, data={"proposed": proposed})
