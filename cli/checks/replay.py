"""`tapereel replay`: run a part of recorded episodes again, and compare with the tapes.

Without an option it is the agent's code. `--env` executes the recorded actions again, `--rewards` runs reward code
again, and `--model` compares recorded log-probs with model weights.
"""

from __future__ import annotations

import argparse
from typing import Any

from ...tapes.audit.verdict import Verdict
from ...tapes.errors import UsageError
from ..console import at_least, given, positive
from ..progress_bars import live_progress
from .reward_output import run_rewards
from .verdict_output import add_keep_argument, add_tape_arguments, print_verdicts, tape_arguments

EXAMPLE = """
tapereel replay runs/digits --agent examples/digits.py:player --jobs 4 --json
tapereel replay runs/demo 019a3c --turn 2
tapereel replay runs/digits --env --times 3 --mask 'digit.text=[0-9]+' --mask reward.seconds
tapereel replay runs/digits --rewards rewards.py:exact --against rewards.py:lenient
tapereel replay runs/digits --model runs/digits/checkpoints/update-000080
"""

OPTIONS = {
    "agent": ("agent", "imports", "tokenizer", "turn", "seconds", "jobs"),
    "env": ("times", "masks", "seconds", "jobs"),
    "rewards": ("against", "layer", "tolerance", "jobs"),
    "model": ("tolerance",),
}
"""What runs again -> the options that it takes."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_tape_arguments(parser)
    add_keep_argument(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: by the number of tapes)")
    parser.add_argument("--seconds", type=positive, metavar="S", help="longest replay of one tape (default 60)")
    what = parser.add_argument_group("what runs again (default: the agent's code)").add_mutually_exclusive_group()
    what.add_argument(
        "--env",
        nargs="?",
        const="",
        metavar="NAME",
        help="the recorded actions, in a fresh environment: module:name (default: that of the run's configuration)",
    )
    what.add_argument(
        "--rewards",
        metavar="NAME",
        help="reward code: module:name of a Rewards, a RewardSource, or a function from a tape to its score",
    )
    what.add_argument(
        "--model",
        nargs="?",
        const="",
        metavar="DIR",
        help="the model, on every sampled token: a checkpoint or model folder (default: each token's own version)",
    )
    of_agent = parser.add_argument_group("options of the agent's code")
    of_agent.add_argument(
        "--agent", metavar="NAME", help="module:name or file.py:name (default: that of the run's configuration)"
    )
    of_agent.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="NAME",
        help="module:name of an environment, or of anything else that defines steps; repeatable",
    )
    of_agent.add_argument("--turn", type=int, metavar="K", help="check this turn alone, counted from 0")
    of_agent.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    of_env = parser.add_argument_group("options of --env")
    of_env.add_argument(
        "--times",
        type=at_least(1),
        default=1,
        metavar="N",
        help="execute N times and print which fields vary (default 1)",
    )
    of_env.add_argument(
        "--mask",
        action="append",
        default=[],
        dest="masks",
        metavar="FIELD[=REGEX]",
        help="a field that may differ (`kind.field`, `reward.name`), or the part of it that may; repeatable",
    )
    of_rewards = parser.add_argument_group("options of --rewards")
    of_rewards.add_argument("--against", metavar="NAME", help="another reward: show where the two disagree")
    of_rewards.add_argument(
        "--layer", metavar="LAYER", help="compare with this later scoring; add it to tapes that lack it"
    )
    of_more = parser.add_argument_group("options of --rewards and --model")
    of_more.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference that counts as equal (default: 0 of a reward, 1e-4 nats of a log-prob)",
    )


def run(args: argparse.Namespace) -> int:
    """Run again, and print the verdicts."""
    part = next((name for name in ("env", "rewards", "model") if getattr(args, name) is not None), "agent")
    _check_options(args, part)
    return {"agent": _run_agent, "env": _run_env, "rewards": run_rewards, "model": _run_model}[part](args)


def _check_options(args: argparse.Namespace, part: str) -> None:
    """UsageError for an option of another part, which would be ignored."""
    for name in {option for options in OPTIONS.values() for option in options if option not in OPTIONS[part]}:
        for flag in given(args, [name]):
            parts = [f"--{other}" for other, options in OPTIONS.items() if name in options and other != "agent"]
            what = f"needs {' or '.join(parts)}" if part == "agent" else f"doesn't go with --{part}"
            raise UsageError(f"{flag} {what}")


def _set(**options: Any) -> dict[str, Any]:
    """The options that were given; the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def _run_agent(args: argparse.Namespace) -> int:
    from ...agents.replay.replayer import replay_run

    with live_progress() as progress:
        verdicts = replay_run(
            args.run,
            args.agent,
            imports=args.imports,
            tokenizer=args.tokenizer,
            turn=args.turn,
            jobs=args.jobs,
            progress=progress,
            **_set(seconds=args.seconds),
            **tape_arguments(args),
        )
    return print_verdicts(args, verdicts)


def _run_env(args: argparse.Namespace) -> int:
    from ...envs.checks.reexec import proposed_masks, reexec_run

    with live_progress() as progress:
        verdicts = reexec_run(
            args.run,
            args.env or None,
            masks={field: rule or None for field, _, rule in (text.partition("=") for text in args.masks)},
            times=args.times,
            jobs=args.jobs,
            progress=progress,
            **_set(seconds=args.seconds),
            **tape_arguments(args),
        )
    proposed = proposed_masks(verdicts.verdicts)
    lines = [f"varies = {proposed!r}   # on the environment, if these fields may vary"] if proposed else []
    if args.times > 1 and not proposed:
        lines = [f"nothing varies in {args.times} executions"]
    return print_verdicts(args, verdicts, *lines, data={"proposed": proposed})


def _run_model(args: argparse.Namespace) -> int:
    from ...finetune.inspect.requery import TOLERANCE, requery_run

    options = _set(tolerance=args.tolerance)
    with live_progress() as progress:
        verdicts, reason = requery_run(
            args.run, args.model or None, progress=progress, **options, **tape_arguments(args)
        )
    lines = [reason] if reason else _difference_lines(verdicts.verdicts, options.get("tolerance", TOLERANCE))
    return print_verdicts(args, verdicts, *lines, data={"reason": reason})


def _difference_lines(found: tuple[Verdict, ...], tolerance: float) -> list[str]:
    compared = [v for v in found if v.measured]
    n = sum(v.checked["tokens"] for v in compared)
    if not n:
        return []
    mean = sum(v.measured["mean"] * v.checked["tokens"] for v in compared) / n
    largest = max(v.measured["largest"] for v in compared)
    return [
        f"log-probs of {n:,} tokens differ by {mean:.2g} nats in the mean and {largest:.2g} at most "
        f"(tolerance {tolerance:g})"
    ]
