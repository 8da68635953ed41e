"""`tapereel run`: run an agent on tasks and record every episode."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...tapes.common.config import Setting, dump_config, load_config
from ...tapes.common.stats import fixed
from ...tapes.common.text import counted
from ...tapes.store.books import spent
from ..console import Exit, Section, answer, command
from ..progress_bars import live_progress
from ..scene_arguments import (
    add_config_arguments,
    add_on_argument,
    add_scene_arguments,
    resumable,
    run_directory,
    scene_settings,
)
from ..score_lines import cut_lines, lost_line, read_k, score_lines

if TYPE_CHECKING:
    from ...agents.runs.runner import RunSummary

EXAMPLE = """
tapereel run --agent examples/digits.py:player --env examples/digits.py:Digits --tasks examples/digits.py:tasks \
--set engine.answers='["7"]' --out runs/digits-script
tapereel run --agent examples/digits.py:player --env examples/digits.py:Digits --tasks examples/digits.py:tasks \
--model runs/digits-model --k 1,4,16 --out runs/digits-passk
tapereel run --config run.yaml --set attempts=4 --out runs/digits --resume
"""

SHOWN = 3
"""Maximum number of errors that are printed. `--json` has all of them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_scene_arguments(parser)
    add_on_argument(parser)
    parser.add_argument("--attempts", metavar="N", help="episodes of each task (default 1)")
    parser.add_argument(
        "--k",
        metavar="K,K",
        help="report pass@k for these numbers; sets --attempts to the largest unless --attempts or --config is given",
    )
    add_config_arguments(parser, " and the cost of a hosted model")


def run(args: argparse.Namespace) -> int:
    """Run the episodes, and print how they ended."""
    from ...agents.runs.runner import RunConfig
    from ...agents.runs.runner import run as roll_out
    from ...agents.setup.engine_config import LiteLLMConfig
    from ...agents.setup.profiles import fitted

    config = load_config(RunConfig, args.config, [*_k_settings(args), *scene_settings(args, "attempts", "on")])
    if args.dry_run:
        config = fitted(config)
        hosted, size = config.engine, (config.limits.turns, config.sampling.max_tokens)
        costs = [f"# {hosted.cost(*size)}"] if isinstance(hosted, LiteLLMConfig) else []
        answer(args, config, dump_config(config), *costs)
        return Exit.HOLDS
    out = run_directory(args)
    with live_progress() as progress, resumable(args, out):
        summary = roll_out(config, out, resume=args.resume, progress=progress)
    answer(args, summary, _section(summary), *_summary_lines(summary, out))
    return Exit.HOLDS if summary.scored or not summary.episodes else Exit.BROKEN


def _k_settings(args: argparse.Namespace) -> list[Setting]:
    from ...agents.runs.runner import k_settings

    if args.k is None:
        return []
    return [(key, value, "--k") for key, value in k_settings(read_k(args.k), args.config is not None)]


def _section(summary: RunSummary) -> Section:
    rows = [
        (end.status, end.cause or "", f"{end.episodes:,}", f"{end.episodes / summary.episodes:.1%}")
        for end in summary.ends
    ]
    return Section(("ended", "cause", "#episodes", "#share"), rows)


def _summary_lines(summary: RunSummary, out: str) -> list[str]:
    scores, reward = summary.scores, "no attempt was scored"
    if summary.reward is not None:
        spread = "" if summary.error is None else f" ± {fixed(summary.error)} (standard error over tasks)"
        reward = f"mean reward {fixed(summary.reward)}{spread} of {summary.scored:,} scored attempts"
    lines = [
        *summary.advice,
        *summary.code_changes,
        f"{counted(summary.tasks, 'task')} x {counted(summary.attempts, 'attempt')}: {summary.episodes:,} episodes on "
        f"tape, {summary.recorded:,} of them recorded now, in {summary.seconds:.1f} s.",
        f"{lost_line(summary.scores)}; {reward}; {spent(summary.tokens)}.",
        *(score_lines(scores) if scores.pass_at or scores.by_label else cut_lines(scores.cut, scores.answers)),
        f"Next: {command('show', out)}",
    ]
    if not summary.scored and summary.episodes:
        lines.insert(0, f"No task has a result: `{command('show', out)} TAPE` prints how an episode ended.")
    more = len(summary.faults) - SHOWN
    return [
        *map(str, summary.faults[:SHOWN]),
        *([f"and {more} more; --json has them"] if more > 0 else []),
        *lines,
    ]
