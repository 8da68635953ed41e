"""`tapereel check-tasks`: what held-out tasks have in common with those to train on."""

from __future__ import annotations

import argparse

from ...envs.contamination import SHARE, N, contamination
from ...envs.hub_datasets import columns
from ...envs.load_named import load_named
from ...envs.taskset import Taskset
from ..console import Exit, answer

EXAMPLE = """
tapereel check-tasks train.jsonl held_out.jsonl --public question --private answer
tapereel check-tasks examples/digits.py:tasks held_out.jsonl --n 5
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("train", help="tasks to train on: a .jsonl, .json, .parquet or .csv file, or file.py:name")
    parser.add_argument("held_out", help="tasks that nobody should train on, likewise")
    parser.add_argument("--public", help="column of the files that the agent sees; without it a whole row is private")
    parser.add_argument("--private", help="column of the files that it doesn't")
    parser.add_argument("--n", type=int, default=N, help="words of a run (%(default)s)")
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of a text's runs that make it known to training (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    row = columns(args.public, args.private or ()) if args.public is not None else None

    def load(name: str) -> Taskset:
        if ":" not in name:
            return Taskset.load(name, row=row)
        found = load_named(name)
        found = found() if callable(found) and not isinstance(found, Taskset) else found
        return found if isinstance(found, Taskset) else Taskset(found)

    report = contamination(load(args.train), load(args.held_out), n=args.n, share=args.share)
    answer(args, report, str(report))
    return Exit.HOLDS if report.clean else Exit.BROKEN
