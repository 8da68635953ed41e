"""`tapereel train`: train a model on episodes of your agent in your environment, asynchronously."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...agents.runs.pass_at_k import Interval
from ...tapes.common.config import dump_config, load_config
from ...tapes.common.config_yaml import write_yaml
from ...tapes.common.hub import local_folder
from ...tapes.common.stats import fixed
from ...tapes.common.text import counted
from ...tapes.store.books import spent
from ...tapes.view.overview import untaught
from ..console import Exit, Section, answer, command
from ..episode_lines import say_episode
from ..progress_bars import live_progress
from ..scene_arguments import (
    add_config_arguments,
    add_on_argument,
    add_scene_arguments,
    as_given,
    resumable,
    run_directory,
    scene_settings,
)

if TYPE_CHECKING:
    from ...finetune.run.run_report import TrainSummary

EXAMPLE = """
tapereel train --agent examples/digits.py:player --env examples/digits.py:Digits --tasks examples/digits.py:tasks \
--model runs/digits-model --out runs/digits --updates 40
tapereel train --config runs/digits/config.yaml --out runs/digits --resume
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_scene_arguments(parser)
    parser.add_argument("--updates", metavar="N", help="number of updates in the loop (loop.updates)")
    parser.add_argument("--recipe", metavar="NAME", help="a recipe's name, or module:name (loop.recipe)")
    add_on_argument(parser)
    add_config_arguments(parser, " and the memory, tokens and time that training needs")


def run(args: argparse.Namespace) -> int:
    """Train, and print the summary."""
    from ...finetune.api.estimate import estimate, fit_memory, say_needs, seconds
    from ...finetune.run.train_config import TrainConfig
    from ...finetune.trainer.options import fitted

    named = scene_settings(args, "on", updates="loop.updates", recipe="loop.recipe")
    config = load_config(TrainConfig, args.config, named)
    other = os.environ.get("RANK", "0") != "0"  # `torchrun` starts several processes, and only the first one prints
    if args.dry_run and other:
        return Exit.HOLDS
    if args.dry_run:
        config, ranks = fitted(config), int(os.environ.get("WORLD_SIZE", "1"))
        needs, lines = estimate(config, ranks), [f"at most: unknown, because {_unknown(str(config.engine.model))}"]
        if needs is not None:
            who = f"on rank 0 of {ranks}, " if ranks > 1 else ""
            lines = write_yaml({f"at most, {who}at the moment with the largest sum": needs}).splitlines()
        took = None if args.out is None else seconds(config, Path(args.out))
        unmeasured = ["time: unknown until --out names a run with two updates"]
        lines += unmeasured if took is None else write_yaml({f"seconds, as measured in {args.out}": took}).splitlines()
        data = config.model_dump(mode="json")
        answer(args, data | {"estimate": needs, "seconds": took}, dump_config(config), *(f"# {line}" for line in lines))
        return Exit.HOLDS
    out = run_directory(args)
    given = config
    config, setup = given.checked(args.resume).resolve()
    from ...finetune.run.train_run import train  # imports torch

    config = fit_memory(config, given, Path(out) if args.resume else None)
    if other:
        return _exit_code(train(config, out, setup=setup, resume=args.resume))
    if not args.resume:
        say_needs(config, Path(out).absolute())
    with live_progress() as progress, resumable(args, out):
        summary = train(config, out, setup=setup, resume=args.resume, progress=progress, on_episode=say_episode)
    answer(args, summary, _section(summary), *_summary_lines(summary, out))
    return _exit_code(summary)


def _unknown(model: str) -> str:
    if local_folder(model) is None:
        return f"{model} isn't on this machine: download it first"
    return f"the files of {model} don't show the shape of the model"


_BUSY = {"engine": "rollout", "trainer": "train"}
"""The parts of a run that work at the same time, by key in the summary's `seconds`."""


def _exit_code(summary: TrainSummary) -> int:
    return Exit.HOLDS if summary.books_close and not _learned_nothing(summary) else Exit.BROKEN


def _learned_nothing(summary: TrainSummary) -> bool:
    return bool(summary.updates) and not summary.tokens["trained"] and not summary.tokens["authored_trained"]


def _section(summary: TrainSummary) -> Section:
    held_out = summary.held_out
    rows = [
        (name, fixed(ends["first"]), fixed(ends["last"]), "")
        for name, ends in (
            ("first and last five updates", summary.reward),
            *((f"first and last five updates of {path}", ends) for path, ends in summary.agents.items()),
        )
    ]
    for greedy, prefix in (("", ""), (", greedy", "greedy_")):
        if f"{prefix}after" not in held_out or not held_out["n"]:
            continue
        change, name = held_out.get(f"{prefix}after_change") or {}, _tasks(held_out) + greedy
        if change and change["tasks"] < held_out["tasks"]:
            name = f"the {change['tasks']} of {name} that were scored twice"
        before, after = (
            change.get(key, held_out.get(f"{prefix}{at}")) for key, at in (("second", "before"), ("first", "after"))
        )
        rows.append((name, fixed(before), fixed(after), _signed(change)))
        for k, one in held_out.get(f"{prefix}after_pass_at", {}).items():
            if one is not None:
                rows.append((f"pass@{k}{greedy}", fixed(one["second"]), fixed(one["first"]), _signed(one)))
    return Section(("mean reward", "#before", "#after", "#change, with its 95 % interval"), rows)


def _signed(change: Mapping[str, Any]) -> str:
    return Interval(**{key: change[key] for key in Interval.model_fields}).signed if change else ""


def _tasks(held_out: Mapping[str, Any]) -> str:
    tasks, n = held_out["tasks"] or held_out["n"], held_out["n"]
    many = "" if tasks == n else f" x {n // tasks}" if n % tasks == 0 else f" ({n} episodes)"
    return f"{tasks} held-out tasks{many}"


def _summary_lines(summary: TrainSummary, out: str) -> list[str]:
    seconds, tokens = summary.seconds, summary.tokens
    parts = [f"{name} {s:.0f} s" for name, key in _BUSY.items() if (s := seconds.get(key, 0.0)) >= 1]
    models = {"The model": summary.model}
    models |= {f"The model of {name}": p.model for name, p in summary.players.items() if p.lineage and p.model}
    return [
        *summary.advice,
        *summary.code_changes,
        *(["The reward on held-out tasks reached loop.stop_at, so the loop ended."] * (summary.ended_by == "stop_at")),
        f"{counted(summary.updates, 'update')} by {summary.recipe} in {seconds['total']:.0f} s"
        + (f" ({', '.join(parts)}, concurrently)." if len(parts) == 2 else "."),
        f"{summary.episodes:,} episodes on tape; {spent(tokens)}; {tokens['trained']:,} trained on; "
        + ("all are accounted for." if summary.books_close else "some are NOT accounted for: see tapereel audit."),
        *([untaught()] if _learned_nothing(summary) else []),
        *(f"{name}: {as_given(model, summary.run, out)}" for name, model in models.items()),
        f"Next: open {as_given(summary.report, summary.run, out)} in a browser; {command('explain', out)}",
    ]
