"""`tapereel check-env`: does an environment keep its promises? Exit code 0 when it does, 1 when a check failed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..tapes.console import Exit, UsageError, answer, safe
from .check import check_env
from .named import load_named

EXAMPLE = """
tapereel check-env my_env.py:GuessNumber --tasks "[1, 5, 9]" --actions my_env.py:guess
tapereel check-env my_package.envs:make --tasks my_package.tasks:held_out --actions my_package.envs:act --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", help="an Environment class or a function that makes one: module:name, file.py:name")
    parser.add_argument("--tasks", required=True, help="a JSON list of tasks, or the name of an iterable of them")
    parser.add_argument("--actions", required=True, help="the name of a function (observation, rng) -> action")
    parser.add_argument("--episodes", type=int, default=3, metavar="N", help="play the first N tasks (default 3)")
    parser.add_argument("--max-turns", type=int, default=20, metavar="N", help="actions per episode (default 20)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds for any call (default 10)")
    parser.add_argument("--stall", type=float, default=0.25, metavar="S",
                        help="seconds that a call may hold the event loop (default 0.25)")  # fmt: skip
    parser.add_argument("--reward-range", type=float, nargs=2, metavar=("LOW", "HIGH"),
                        help="smallest and largest reward that the environment promises")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    for name in ("episodes", "max_turns", "timeout", "stall"):
        if getattr(args, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be more than 0")
    report = check_env(
        load_named(args.factory), _tasks(args.tasks), load_named(args.actions), episodes=args.episodes,
        max_turns=args.max_turns, timeout=args.timeout, stall=args.stall, seed=args.seed,
        reward_range=tuple(args.reward_range) if args.reward_range else None,
    )  # fmt: skip
    answer(args, report, safe(str(report)))
    return Exit.HOLDS if report.ok else Exit.BROKEN


def _tasks(text: str) -> Any:
    try:
        tasks = json.loads(text)
    except ValueError:
        tasks = load_named(text)
        return tasks() if callable(tasks) else tasks
    if not isinstance(tasks, list):
        raise UsageError(f"--tasks is {text!r:.60}; give a JSON list, as [1, 2]")
    return tasks
