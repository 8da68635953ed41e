"""The whole loop against TRL's `GRPOTrainer` and against the raw cost: same model, tasks, tool and token budget.

    python benchmarks/whole_loop.py                  # single-turn, ours and raw
    python benchmarks/whole_loop.py --trl PYTHON     # single-turn and with a tool

A Qwen3 of 1.14 million parameters, 4 groups of 8 episodes a step, one torch thread, float32 (the case is in
`peers/loop_case.py`: 64 sampled tokens an episode, or a tool call, its result and an answer). The raw cost is
transformers' `generate()`, the GRPO loss, backward, clipping and AdamW, nothing else (`peers/raw_loop.py`), measured
with each side's own libraries. Ours is `train()` in synchronous mode with everything it does: tapes, commits to disk,
ledger, books, weight digests, publication. With the tool TRL needs a chat template that it knows: everybody uses the
one for Qwen3-Instruct-2507 that it ships. Every implementation runs in a process of its own, in turn, `--rounds` times;
the first step of each isn't counted.

    trl  python -m venv trl; trl/bin/pip install torch==2.13.0 trl jmespath
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peers.loop_case import CHATML, GROUP, GROUPS, LR, MAX_TOKENS, Clock, make_folder, questions
from side_by_side import Found, in_turn, ratio

HERE = Path(__file__).parent
TEMPLATE = """import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec("trl").origin).with_name("chat_templates")
print((folder / "qwen3_instruct_2507.jinja").read_text(), end="")"""
"""Run by TRL's Python: prints a chat template that its tools know."""


def ours(folder: str, kind: str, steps: int) -> None:
    """Steps of `train`, as JSON."""
    from tapereel.agents import Limits
    from tapereel.agents.setup.engine_config import EmbeddedConfig
    from tapereel.finetune.loop.loop_config import LoopConfig
    from tapereel.finetune.run.train_config import EvaluationConfig, TrainConfig
    from tapereel.finetune.run.train_run import train
    from tapereel.finetune.trainer.options import OptimiserConfig
    from tapereel.tapes import Sampling

    scene = HERE / "loop_scene.py"
    config = TrainConfig(
        agent=f"{scene}:{kind}_agent",
        env=f"{scene}:{'Digits' if kind == 'single' else 'Dice'}",
        tasks=tuple(questions(kind)),
        engine=EmbeddedConfig(model=folder, slots=GROUPS * GROUP, capacity=512),
        evaluation=EvaluationConfig(fraction=0),
        loop=LoopConfig(
            updates=steps,
            groups=GROUPS,
            group_size=GROUP,
            max_lag=0,
            checkpoint_every=10**6,
            optimiser=OptimiserConfig(lr=LR),
            sampling=Sampling(max_tokens=MAX_TOKENS[kind]),
            limits=Limits(turns=4),
        ),
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        done = train(config, Path(out) / "run", progress=lambda *_: clock.tick())
    if done.updates != steps or not done.books_close:
        raise SystemExit(f"the run did not come to its end: {done}")
    del clock.cpu[steps:], clock.wall[steps:]
    print(clock.report(done.tokens["trained"]))


# All of them


def run(commands: dict[str, list[str]], rounds: int) -> Found:
    """Each round's medians over its steps but the first."""
    return {
        name: [
            {"sampled": one["sampled"], **{key: statistics.median(one[key][1:]) for key in ("cpu", "wall")}}
            for one in several
        ]
        for name, several in in_turn(commands, rounds).items()
    }


def table(found: Found) -> str:
    """Markdown: medians, and the medians of the rounds' ratios to the raw cost with the same libraries."""
    lines = ["| | sampled tokens | CPU s | wall s | CPU / raw | wall / raw |", "|---|---|---|---|---|---|"]
    for name, several in found.items():
        raw = found["raw (trl)" if "trl" in name else "raw"]
        cpu, wall, sampled = (statistics.median(one[key] for one in several) for key in ("cpu", "wall", "sampled"))
        ratios = [ratio(several, raw, key) for key in ("cpu", "wall")]
        lines.append(f"| {name} | {sampled:,.0f} | {cpu:.2f} | {wall:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=120, help="steps of imitation that make the model")
    parser.add_argument("--model", type=Path, help="folder of the model, made where it isn't there; default: nowhere")
    parser.add_argument("--only", choices=["single", "tool"])
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, no more")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.rounds = 2, 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        if not (folder / "config.json").exists():
            template = (
                CHATML
                if args.trl is None
                else subprocess.run([args.trl, "-c", TEMPLATE], capture_output=True, text=True, check=True).stdout
            )
            make_folder(folder, template, steps=args.warm, tools=args.trl is not None)
        for kind in ("single", "tool") if args.trl else ("single",):
            if args.only in (None, kind):
                rest = [str(folder), kind, str(args.steps)]
                raw = str(HERE / "peers" / "raw_loop.py")
                commands = {"raw": [sys.executable, raw, *rest], "ours": [sys.executable, __file__, "ours", *rest]}
                if args.trl:
                    commands["raw (trl)"] = [args.trl, raw, *rest]
                    commands["trl"] = [args.trl, str(HERE / "peers" / "trl_loop.py"), *rest]
                print(
                    f"{kind}, {GROUPS} groups of {GROUP}, {args.rounds} rounds of {args.steps} steps\n\n"
                    f"{table(run(commands, args.rounds))}\n",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
