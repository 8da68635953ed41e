"""`tapereel replay agent`: run the agent's code again, on recorded answers and observations."""

from __future__ import annotations

import argparse

from ...agents.replay.replayer import SECONDS, replay_run
from ..console import positive
from ..progress_bars import live_progress
from .verdict_output import add_jobs_argument, add_tape_arguments, print_verdicts, tape_arguments

EXAMPLE = """
tapereel replay agent runs/digits --agent examples/digits.py:player --jobs 4 --json
tapereel replay agent runs/demo 019a3c --turn 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--agent", metavar="NAME", help="module:name or file.py:name (default: the agent of the run's configuration)"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="NAME",
        help="module:name of an environment, or of anything else that defines steps; repeatable",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    parser.add_argument("--turn", type=int, metavar="K", help="check only this turn, counted from 0")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=SECONDS,
        metavar="S",
        help="longest replay of one tape (default %(default)g)",
    )
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the agent again, and print the verdicts."""
    with live_progress() as progress:
        verdicts = replay_run(
            args.run,
            args.agent,
            imports=args.imports,
            tokenizer=args.tokenizer,
            turn=args.turn,
            seconds=args.seconds,
            jobs=args.jobs,
            progress=progress,
            **tape_arguments(args),
        )
    return print_verdicts(args, verdicts)
