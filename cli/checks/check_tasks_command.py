"""`tapereel check tasks`: check that held-out tasks share no text with training tasks. Exit code 1 where they do."""

from __future__ import annotations

import argparse

from ...agents.setup.setup import load_tasks
from ...envs.contamination import N, contamination
from ...envs.taskset import Taskset, columns
from ..console import Exit, answer

EXAMPLE = """
tapereel check tasks train.jsonl held_out.jsonl --public question --private answer
tapereel check tasks examples/digits.py:tasks held_out.jsonl --n 5
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("train", help="training tasks: a .jsonl, .json, .parquet or .csv file, or file.py:name")
    parser.add_argument("held_out", help="held-out tasks, in the same forms")
    parser.add_argument(
        "--public", help="column of a file that the agent sees (default: none, the whole row is private)"
    )
    parser.add_argument("--private", help="column of a file that the agent doesn't see")
    parser.add_argument("--n", type=int, default=N, help="consecutive words that are compared (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Compare the two sets and print what they share."""
    row = columns(args.public, args.private or ()) if args.public is not None else None

    def load(name: str) -> Taskset:
        if ":" not in name:
            return Taskset.load(name, row=row)
        return load_tasks(name)

    report = contamination(load(args.train), load(args.held_out), n=args.n)
    answer(args, report, str(report))
    return Exit.HOLDS if report.clean else Exit.BROKEN
