"""`tapereel demo`: create a tiny model and train it, in minutes on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.common.config import dump_config, load_config
from ...tapes.common.stats import fixed
from ...tapes.errors import UsageError
from ...tapes.view.overview import checks, next_commands
from ..console import Exit, Section, answer, command
from ..episode_lines import say_episode
from ..progress_bars import live_progress
from ..scene_arguments import add_config_arguments, add_resume_arguments, resumable, take_over

if TYPE_CHECKING:
    from ...finetune.run.demonstrations import DemoSummary

EXAMPLE = """tapereel demo --seed 1 --out runs/demo
tapereel demo --out runs/demo --resume
tapereel demo --pictures --out runs/lamps"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--out", metavar="DIR", help="run directory (default runs/demo)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of model, tasks, demonstrations and sampling (default 0)"
    )
    parser.add_argument(
        "--algo",
        choices=["grpo", "reinforce", "rloo", "ppo", "dapo"],
        default=None,
        help="recipe of the reinforcement learning phase (default grpo)",
    )
    parser.add_argument(
        "--model-size",
        choices=["micro", "tiny", "small", "base"],
        default=None,
        help="25 thousand to 770 thousand parameters (default small: 340 thousand)",
    )
    parser.add_argument("--pictures", action="store_true", help="train a vision model to follow coloured lamps")
    parser.add_argument(
        "--blind", action="store_true", help="with --pictures: a control that shows the pictures of another episode"
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="add two runs with as many trained tokens: imitation only, and shuffled rewards",
    )
    add_resume_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its table."""
    from ...finetune.run.demonstrations import DEMO, DemoConfig, PicturesDemoConfig, begun_demo, demo

    if args.blind and not args.pictures:
        raise UsageError("--blind is a control of the demo with pictures: add --pictures, or remove --blind")
    if args.pictures and args.model_size not in (None, "small"):
        raise UsageError(f"--model-size {args.model_size}: the model of --pictures has one size; remove --model-size")
    begun = begun_demo(args.out) if args.resume and args.out else None
    if begun is not None and (args.pictures > hasattr(begun, "blind") or args.blind > getattr(begun, "blind", False)):
        raise UsageError(f"{args.out} was begun without {'--blind' if args.blind else '--pictures'}: remove it")
    made = begun or (PicturesDemoConfig(blind=args.blind) if args.pictures else DemoConfig())
    given = {name: value for name in ("seed", "algo", "model_size") if (value := getattr(args, name)) is not None}
    config = load_config(load_config(made, None, [*given.items()]), args.config, args.sets)
    out = Path(args.out or f"runs/demo{'-blind' if args.blind else '-pictures' if args.pictures else ''}")
    if args.dry_run:
        answer(args, config, dump_config(config))
        return Exit.HOLDS
    if args.resume and begun_demo(out) is None:
        raise UsageError(
            f"--resume: {out} doesn't hold a run; name its folder with --out, or start a run without --resume"
        )
    for run in (out, out / "demonstrations", *out.glob("controls/*")):
        take_over(args, run)
    more = ["--controls"] if args.controls else []
    with live_progress() as progress, resumable(args, out, DEMO, *more):
        summary = demo(
            config, out, controls=args.controls, resume=args.resume, progress=progress, on_episode=say_episode
        )
    answer(args, summary, _section(summary), _closing(summary, str(out)))
    return Exit.HOLDS


def _section(summary: DemoSummary) -> Section:
    title = f"Held-out reward, {summary.held_out['n']} tasks, seed {summary.seed}"
    rows = [(row.name, fixed(row.sampled), fixed(row.greedy), row.note) for row in summary.scores]
    return Section(("policy", "#sampled", "#greedy", "note"), rows, title)


def _closing(summary: DemoSummary, run: str) -> str:
    seconds, tokens = summary.seconds, summary.tokens
    lab = command("explain", run, "--recipe", "own", "--recipe", "dr_grpo")
    lines = [
        f"{seconds['total']:.0f} s: imitation {seconds.get('sft', 0):.0f} s, reinforcement {seconds.get('rl', 0):.0f} "
        f"s (engine {seconds.get('rollout', 0):.0f} s, trainer {seconds.get('train', 0):.0f} s, concurrently).",
        f"{summary.episodes:,} episodes on tape; {tokens['sampled']:,} sampled tokens, "
        f"{tokens['trained']:,} of them trained on.",
        f"Written to {run}: report.html, metrics.jsonl, config.yaml, checkpoints/, tapes/.",
        "",
        "Next, with this run:",
        *(f"  {line}" for line in (*next_commands(run), *checks(run), lab)),
    ]
    return "\n".join(lines)
