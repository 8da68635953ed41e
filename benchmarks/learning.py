"""Does it learn? Five recipes on three tasks, three seeds each, from a warm start that the recipes of a seed share.

    python benchmarks/learning.py [--task NAME ...] [--algo NAME ...] [--seed N ...] --out DIR [--docs DIR]

For each task and seed: tasks are drawn, a demonstrator is recorded on those to train on, and a tiny model imitates it.
From those weights every recipe gets the same number of updates on as many episodes of the same tasks in the same order.
Held-out tasks measure it before and after, sampled and greedy. Each run leaves `DIR/TASK-ALGO-SEED.json`, and what is
there is not run again; whatever is there is tabled as Markdown on stdout. `--docs` puts table and plot there too.

Everything goes through the public configuration (`run`, `train`), as in anyone's own project.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from learning_report import figure, put_table, table
from learning_tasks import TASKS, Learnt

from tapereel.agents import Limits, RunConfig
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.runs import run
from tapereel.agents.setup import EmbeddedConfig, ScriptedConfig
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.loop import CriticConfig
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.finetune.run.train_config import ImitationConfig
from tapereel.finetune.trainer import Schedule
from tapereel.finetune.trainer.options import CriticOptimiserConfig
from tapereel.tapes import Sampling, Task
from tapereel.tapes.store import METRICS, read_metrics

ALGOS = ("grpo", "reinforce", "rloo", "ppo", "dapo")
AS_TASK = "tapereel.tapes:Task.model_validate"
GROUP = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"critic": CriticConfig(optimiser=CriticOptimiserConfig(lr=3e-3), clip=None)},
}
"""What a recipe gets beside the settings of the task."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--algo", nargs="+", choices=ALGOS, default=list(ALGOS))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="one JSON per run, and the run directories")
    parser.add_argument("--docs", type=Path, default=None, help="bring learning.md and learning.png there up to date")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="sets",
        help="a setting of the task for this call, as warm=200 or lr=1e-3: for tuning",
    )
    args = parser.parse_args()
    for seed in args.seed:
        for name in args.task:
            learnt = changed(TASKS[name], args.sets)
            for algo in args.algo:
                result = args.out / f"{name}-{algo}-{seed}.json"
                if not result.exists():
                    found = measure(name, learnt, algo, seed, args.out)
                    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                    print(one_line(found), file=sys.stderr, flush=True)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.out.glob("*-*-*.json"))]
    made = table(found, [*TASKS], ALGOS)
    print(made)
    if args.docs is not None:
        put_table(args.docs / "learning.md", made)
        figure(args.docs / "learning.png", found, [*TASKS], ALGOS)


def changed(learnt: Learnt, sets: list[str]) -> Learnt:
    """With some of its settings set."""
    given = {key: json.loads(value) for key, value in (text.split("=", 1) for text in sets)}
    return Learnt(**{**vars(learnt), **given})


def measure(name: str, learnt: Learnt, algo: str, seed: int, out: Path) -> dict[str, Any]:
    """One run of the table."""
    start = warm_start(name, learnt, seed, out)
    directory = out / "runs" / f"{name}-{algo}-{seed}"
    config = TrainConfig(
        **scene(learnt, out / "warm" / f"{name}-{seed}"),
        seed=seed,
        engine=EmbeddedConfig(model=start["model"], slots=256, capacity=learnt.context),
        loop=LoopConfig(
            updates=learnt.updates,
            groups=learnt.groups,
            group_size=GROUP,
            recipe=algo,
            optimiser=OptimiserConfig(lr=learnt.lr),
            sampling=Sampling(max_tokens=learnt.max_tokens),
            limits=limits(learnt),
            checkpoint_every=1000,
            **SETTINGS.get(algo, {}),
        ),
        evaluation=EvaluationConfig(fraction=0),
    )
    began = time.process_time()
    summary = train(config, directory / "training", resume=(directory / "training").exists())
    cpu = time.process_time() - began
    after = held_out(learnt, summary.model, out / "warm" / f"{name}-{seed}", directory)
    lines = [line for line in read_metrics(directory / "training" / METRICS) if line["phase"] == "rl"]
    return {
        "task": name,
        "algo": algo,
        "seed": seed,
        "before": start["held_out"],
        "after": after,
        "updates": summary.updates,
        "episodes": sum(line["episodes"] for line in lines),
        "tokens": summary.tokens,
        "cpu_seconds": round(cpu, 1),
        "warm_cpu_seconds": start["cpu_seconds"],
        "books_close": summary.books_close,
        "curve": lines,
        "optimum": learnt.optimum,
    }


def warm_start(name: str, learnt: Learnt, seed: int, out: Path) -> dict[str, Any]:
    """The model that all recipes of this task and seed start from: `model` is its folder."""
    home = out / "warm" / f"{name}-{seed}"
    done = home / "warm.json"
    if not done.exists():
        began = time.process_time()
        model = imitate(learnt, seed, home)
        cpu = round(time.process_time() - began, 1)
        found = {"model": model, "cpu_seconds": cpu, "held_out": held_out(learnt, model, home, home)}
        done.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return json.loads(done.read_text(encoding="utf-8"))


def held_out(learnt: Learnt, model: str, home: Path, out: Path) -> dict[str, Any]:
    """What the model earns on the held-out tasks in `home`, sampled and greedy: mean, its standard error, tasks."""
    found = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        config = RunConfig(
            **{**scene(learnt, home), "tasks": str(home / "held_out.jsonl")},
            limits=limits(learnt),
            concurrency=256,
            engine=EmbeddedConfig(model=model, slots=256, capacity=learnt.context),
            sampling=Sampling(max_tokens=learnt.max_tokens, temperature=temperature),
        )
        summary = run(config, out / name, resume=(out / name).exists())
        found[name] = {"mean": summary.reward, "error": summary.error, "n": summary.scored}
    return found


def imitate(learnt: Learnt, seed: int, home: Path) -> str:
    """Tasks, base model, demonstrations, imitation."""
    home.mkdir(parents=True, exist_ok=True)
    tasks = learnt.tasks(learnt.size, seed)
    share = learnt.held_out / learnt.size
    train_tasks, others = tasks.split(1 - 1.3 * share, 1.3 * share)
    write_tasks(home / "train.jsonl", list(train_tasks))
    write_tasks(home / "held_out.jsonl", list(others)[: learnt.held_out])
    base = str(home / "base")
    tokenizer = char_tokenizer()
    tiny_model(tokenizer, learnt.model, seed=seed, context=learnt.context).save_pretrained(base)  # type: ignore[arg-type]
    tokenizer.save_pretrained(base)
    run(
        RunConfig(
            **scene(learnt, home),
            engine=ScriptedConfig(policy=learnt.policy, tokenizer=base),
            split="demo",
            seed=seed,
            limits=limits(learnt),
            sampling=Sampling(max_tokens=learnt.max_tokens),
            concurrency=256,
        ),
        home / "demonstrations",
        resume=(home / "demonstrations").exists(),
    )
    optimiser = OptimiserConfig(
        lr=learnt.warm_lr, schedule=Schedule(kind="cosine", warmup=20, total=max(learnt.warm, 21))
    )
    config = TrainConfig(
        **scene(learnt, home),
        seed=seed,
        engine=EmbeddedConfig(model=base, capacity=learnt.context),
        warm=ImitationConfig(tapes=str(home / "demonstrations"), updates=learnt.warm, optimiser=optimiser),
        loop=LoopConfig(updates=0),
        evaluation=EvaluationConfig(fraction=0),
    )
    return train(config, home / "imitation", resume=(home / "imitation").exists()).model


def scene(learnt: Learnt, home: Path) -> dict[str, Any]:
    """Who acts where on what."""
    return {"agent": learnt.agent, "env": learnt.env, "tasks": str(home / "train.jsonl"), "task_row": AS_TASK}


def limits(learnt: Learnt) -> Limits:
    return Limits(turns=learnt.turns)


def write_tasks(path: Path, tasks: list[Task]) -> None:
    path.write_text("".join(task.model_dump_json() + "\n" for task in tasks), encoding="utf-8")


def one_line(found: dict[str, Any]) -> str:
    before, after = ({k: round(v["mean"], 3) for k, v in found[when].items()} for when in ("before", "after"))
    return f"{found['task']} {found['algo']} {found['seed']}: {before} -> {after}, {found['cpu_seconds']} s of CPU"


if __name__ == "__main__":
    main()
