"""`tapereel run`: roll an agent out over tasks, and keep every episode."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...tapes.common.config import add_config_arguments, dump_config, load_config
from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import pin_line
from ..console import Exit, answer, table
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from ...agents.runs.pass_at_k import Scores
    from ...agents.runs.runner import RunSummary

EXAMPLE = """
tapereel run --agent examples/digits.py:player --env examples/digits.py:Digits --tasks examples/digits.py:tasks \
--set engine.answers='["7"]' --out runs/digits-script
tapereel run --agent examples/digits.py:player --env examples/digits.py:Digits --tasks examples/digits.py:tasks \
--model runs/digits-model --k 1,4,16 --out runs/digits-passk
tapereel run --config run.yaml --set attempts=4 --out runs/digits --resume
"""

SHOWN = 3
"""Errors that are told one by one."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_scene_arguments(parser)
    parser.add_argument("--attempts", metavar="N", help="episodes of each task (1)")
    parser.add_argument(
        "--k",
        metavar="K,K",
        help="report pass@k for these; unless --attempts or a file says "
        "otherwise, there are as many attempts as it takes",
    )
    add_config_arguments(parser)


def add_scene_arguments(parser: argparse.ArgumentParser) -> None:
    """Short ways to say who acts, where, on what and with which model; what they say goes on top of the file."""
    parser.add_argument("--agent", metavar="NAME", help="module:name or file.py:name of an agent")
    parser.add_argument("--env", metavar="NAME", help="module:name of an environment class or factory")
    parser.add_argument("--tasks", metavar="NAME", help="module:name of tasks, or a JSONL, JSON, Parquet or CSV file")
    parser.add_argument("--model", metavar="DIR", help="a model and tokenizer in Hugging Face format")
    parser.add_argument("--seed", metavar="N", help="seed of sampling and environments (0)")
    parser.add_argument("--out", metavar="DIR", help="run directory")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, wherever it stopped")


def scene_settings(args: argparse.Namespace, *more: str) -> list[str]:
    """What the short arguments say, as settings, and then the settings that were typed."""
    sets = [f"{name}={value}" for name in ("agent", "env", "tasks", "seed", *more) if (value := getattr(args, name))]
    return [*sets, *engine_settings(args), *args.sets]


def engine_settings(args: argparse.Namespace) -> list[str]:
    """Which kind of engine `--model` or the settings that were typed mean."""
    if args.model is not None:
        return ["engine.kind=embedded", f"engine.model={args.model}"]
    scripted = any(text.startswith(("engine.answers", "engine.policy")) for text in args.sets)
    return ["engine.kind=scripted"] if scripted else []


def run_directory(args: argparse.Namespace) -> str:
    """`--out`. UsageError where it wasn't given."""
    if args.out is None:
        raise UsageError("where to? name a run directory: --out DIR")
    return args.out


def run(args: argparse.Namespace) -> int:
    """Roll out, and print how the episodes ended."""
    from ...agents.runs.runner import RunConfig
    from ...agents.runs.runner import run as roll_out

    config = load_config(RunConfig, args.config, [*_settings_of_k(args), *scene_settings(args, "attempts")])
    if args.dry_run:
        answer(args, config, dump_config(config))
        return Exit.HOLDS
    out = run_directory(args)
    with live_progress() as progress:
        summary = roll_out(config, out, resume=args.resume, progress=progress)
    answer(args, summary, _table(summary), *_lines(summary))
    return Exit.HOLDS if summary.usable or not summary.episodes else Exit.BROKEN


def _settings_of_k(args: argparse.Namespace) -> list[str]:
    if args.k is None:
        return []
    k = read_k(args.k)
    return [f"k={list(k)}", *([] if args.config else [f"attempts={max(k)}"])]


def read_k(text: str) -> tuple[int, ...]:
    """The numbers of `1,4,16`. UsageError where they are none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--k {text!r} is no list of attempts; write it as in --k 1,4,16")
    return tuple(map(int, parts))


def score_lines(scores: Scores, indent: str = "") -> list[str]:
    """Mean reward, pass@k and labels with their intervals, a line each."""
    lines = [f"{indent}reward {scores.reward} over {scores.reward.tasks:,} tasks"] if scores.reward is not None else []
    for k, found in scores.pass_at.items():
        short = f"; {scores.short[k]:,} with fewer than {k} scored attempts left out" if scores.short[k] else ""
        said = "no task has so many scored attempts" if found is None else f"{found} over {found.tasks:,} tasks{short}"
        lines.append(f"{indent}pass@{k} {said}")
    if scores.unscored:
        lines.append(f"{indent}{scores.unscored:,} of {scores.attempts:,} attempts unscored: neither success nor 0")
    for label, part in scores.by_label.items():
        lines += [safe(f"{indent}{label}:"), *score_lines(part, indent + "  ")]
    return lines


def _table(summary: RunSummary) -> Any:
    made = table("ended", "cause", "#episodes", "#share")
    for end in summary.ends:
        made.add_row(end.status, end.cause or "", f"{end.episodes:,}", f"{end.episodes / summary.episodes:.1%}")
    return made


def _lines(summary: RunSummary) -> list[str]:
    reward = "nothing was scored"
    if summary.reward is not None:
        spread = "" if summary.error is None else f" ± {summary.error:.3f} (standard error over tasks)"
        reward = f"mean reward {summary.reward:.3f}{spread} of {summary.scored:,} scored attempts"
    lines = [
        f"{summary.tasks:,} tasks x {summary.attempts} attempts: {summary.episodes:,} episodes on tape, "
        f"{summary.recorded:,} of them recorded now, in {summary.seconds:.1f} s.",
        f"{reward}; {summary.tokens['sampled']:,} tokens sampled.",
        *(score_lines(summary.scores) if summary.scores.pass_at or summary.scores.by_label else []),
        pin_line(summary.run),
        safe(f"Next: tapereel show {summary.run}"),
    ]
    if not summary.usable and summary.episodes:
        lines.insert(0, "No episode ended by the agent's own doing: `tapereel show RUN TAPE` has the cause of each.")
    return [*_faults(summary), *lines]


def _faults(summary: RunSummary) -> list[str]:
    told = [safe(str(fault)) for fault in summary.faults[:SHOWN]]
    more = len(summary.faults) - SHOWN
    return told if more <= 0 else [*told, f"and {more} more; --json has them"]
