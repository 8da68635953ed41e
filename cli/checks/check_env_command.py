"""`tapereel check env`: check that an environment keeps its contract. The exit code is 1 if a check failed."""

from __future__ import annotations

import argparse
from typing import cast

from ...agents.setup.setup import load_env
from ...envs.checks.check_env import check_env
from ...envs.checks.env_probe import Policy
from ...envs.load_named import listed_tasks, load_named
from ...envs.taskset import BadTasks
from ...tapes.errors import UsageError
from ..console import Exit, answer, at_least, positive

EXAMPLE = """
tapereel check env my_env.py:GuessNumber --tasks "[1, 5, 9]" --actions my_env.py:guess
tapereel check env my_package.envs:make --tasks my_package.tasks:held_out --actions my_package.envs:act --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("factory", help="an Environment class or a function that makes one: module:name, file.py:name")
    parser.add_argument("--tasks", required=True, help="a JSON list of tasks, or an iterable of tasks as module:name")
    parser.add_argument("--actions", required=True, help="a function (observation, rng) -> action, as module:name")
    parser.add_argument("--episodes", type=at_least(1), default=3, metavar="N", help="number of tasks (default 3)")
    parser.add_argument("--max-turns", type=at_least(1), default=20, metavar="N", help="turns per episode (default 20)")
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="longest call in seconds (default 10)"
    )
    parser.add_argument(
        "--stall",
        type=positive,
        default=0.25,
        metavar="S",
        help="longest time in seconds that a call may block the event loop (default 0.25)",
    )
    parser.add_argument(
        "--reward-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="smallest and largest reward that the environment may give",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the environment and the actions (default 0)")


def run(args: argparse.Namespace) -> int:
    """Play the environment and print a line for each broken rule."""
    tasks = listed_tasks(args.tasks)
    named = load_named(args.actions)
    if not callable(named):
        raise UsageError(f"--actions {args.actions} is {named!r:.80}; name a function (observation, rng) -> action")
    act = cast(Policy, named)
    try:
        report = check_env(
            load_env(args.factory),
            tasks,
            act,
            episodes=args.episodes,
            max_turns=args.max_turns,
            timeout=args.timeout,
            stall=args.stall,
            seed=args.seed,
            reward_range=tuple(args.reward_range) if args.reward_range else None,
        )
    except BadTasks as error:
        raise UsageError(f"--tasks {args.tasks!r:.60}: {error}") from error
    answer(args, report, *str(report).splitlines())
    return Exit.HOLDS if report.ok else Exit.BROKEN
