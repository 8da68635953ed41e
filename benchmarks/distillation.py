"""What a teacher gives a small student through `train` with `recipe: distill`: two tasks, three seeds.

    python benchmarks/distillation.py --out DIR [--seeds 0 1 2] [--tasks demo digits] [--demo RUNS]

    demo     the demo's task. Teacher: the demo's model after its loop; student: the `tiny` model after the same
             imitation, with a third of the teacher's weights. 256 tasks an update, on policy, ten updates of warm-up
    digits   `examples/digits.py`. Teacher: a micro model after 80 updates of `grpo`; student: another one, untrained

The student gets `--updates` updates on its own samples, without any reward. `DIR/students.jsonl` gets one line for each
task and seed that is done, and a later call goes on behind the last line. Printed as Markdown: the KL estimate (k3,
nats per token of the student's samples) of the first and the last three updates; the exact KL(student || teacher), over
the whole vocabulary, at the tokens that the untrained student sampled on held-out tasks, before and after; and the
reward on tasks that neither model was trained on, with the 95 % interval of its change. `--arms DIR` takes the arms
`true` of `shuffled_control.py` as the teachers of the demo's task, in place of demos of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import tapereel as tr
from tapereel.agents.engines.embedded import load_pretrained
from tapereel.envs.adapters import word_problems
from tapereel.finetune import rows
from tapereel.finetune.run import DemoConfig
from tapereel.finetune.run.demo_scene import calculator, calculator_agent
from tapereel.finetune.run.demonstrations import SPARE, demo
from tapereel.tapes.store import METRICS, Store, read_metrics
from tapereel.tapes.value import Value

DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits.py"
ENDS = 3
"""Updates at each end whose mean KL is printed."""


class Line(Value):
    """One student."""

    task: str
    seed: int
    teacher: float
    """Held-out reward of the teacher; that of the student before and after, and its change with its interval."""
    before: float
    after: float
    change: tuple[float, float, float]
    kl: tuple[float, ...]
    """Of each update."""
    exact: tuple[float, float]
    """Exact KL on fixed held-out states, before and after."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=("demo", "digits"), default=["demo", "digits"])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--arms", type=Path, help="the folder of shuffled_control.py")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "students.jsonl"
    for task in args.tasks:
        for seed in args.seeds:
            if all((line.task, line.seed) != (task, seed) for line in lines_of(path)):
                line = {"demo": of_demo, "digits": of_digits}[task](seed, args)
                with path.open("a") as file:
                    file.write(line.model_dump_json() + "\n")
                print(line.model_dump_json(), file=sys.stderr, flush=True)
    print(table(lines_of(path)))


def lines_of(path: Path) -> list[Line]:
    return [Line.model_validate_json(text) for text in path.read_text().splitlines()] if path.exists() else []


def of_demo(seed: int, args: argparse.Namespace) -> Line:
    """The demo's task. Its held-out tasks are the demo's: a task's hash decides the side of the split."""
    if args.arms is None:
        strong = args.out / f"demo-teacher-{seed}"
        reward = demo(DemoConfig(seed=seed), strong, resume=strong.exists()).held_out["after"]
    else:
        strong, lines = args.arms / str(seed) / "true", (args.arms / "arms.jsonl").read_text().splitlines()
        found = {(line["seed"], line["arm"]): line["sampled"] for line in map(json.loads, lines)}
        reward = found[seed, "true"]
    weak, config = args.out / f"demo-student-{seed}", DemoConfig(seed=seed, model_size="tiny")
    still = config.model_copy(update={"loop": config.loop.model_copy(update={"updates": 0})})
    demo(still, weak, resume=weak.exists())
    scene = (calculator_agent(), calculator, word_problems(config.tasks, seed))
    settings = {
        "loop.sampling.max_tokens": 16,
        "loop.limits.turns": 4,
        # No baseline compares attempts, so each episode has a task of its own. Adam's first steps change every weight
        # by lr, however small its gradient: without the warm-up they undo what the student imitated.
        "loop.groups": 256,
        "loop.group_size": 1,
        "loop.max_lag": 0,
        "loop.optimiser.lr": 1e-3,
        "loop.optimiser.schedule": {"kind": "constant", "warmup": 10},
        "evaluation.fraction": config.held_out / config.tasks * SPARE,
        "evaluation.limit": config.held_out,
    }
    return taught("demo", seed, args, scene, last_model(strong), last_model(weak), reward, settings)


def of_digits(seed: int, args: argparse.Namespace) -> Line:
    """The digits of the examples."""
    scene = tuple(f"{DIGITS}:{name}" for name in ("player", "Digits", "tasks"))
    settings = {
        "loop.sampling.max_tokens": 1,
        "loop.groups": 8,
        "loop.group_size": 8,
        "loop.optimiser.lr": 3e-3,
        "evaluation.fraction": 0.3,
        "evaluation.attempts": 4,
    }
    one, other = (
        tr.save_tiny_model(args.out / f"digits-model-{k}", alphabet="0123456789", size="micro", seed=k)
        for k in (2 * seed, 2 * seed + 1)
    )
    run = args.out / f"digits-teacher-{seed}"
    found = tr.train(*scene, one, updates=80, seed=seed, out=run, resume=run.exists(), settings=settings)
    reward = held_out(found)["after"]
    settings["loop.optimiser.lr"] = 1e-2
    return taught("digits", seed, args, scene, str(found.summary.model), str(other), reward, settings)


def taught(
    task: str,
    seed: int,
    args: argparse.Namespace,
    scene: tuple[Any, Any, Any],
    teacher: str,
    student: str,
    reward: float,
    settings: dict[str, Any],
) -> Line:
    """The student after `--updates` updates. reward: the teacher's on held-out tasks."""
    run = args.out / f"{task}-run-{seed}"
    found = tr.train(
        *scene,
        student,
        updates=args.updates,
        recipe="distill",
        seed=seed,
        out=run,
        resume=run.exists(),
        settings={**settings, "loop.teacher": teacher, "evaluation.every": None, "trainer.threads": 1},
    )
    scores = held_out(found)
    change = scores["after_change"]
    kl = [line["kl/teacher/k3"] for line in read_metrics(run / METRICS) if "kl/teacher/k3" in line]
    return Line(
        task=task,
        seed=seed,
        teacher=reward,
        before=scores["before"],
        after=scores["after"],
        change=(change["value"], change["low"], change["high"]),
        kl=tuple(kl),
        exact=exact_kl(run, teacher, (student, str(found.summary.model))),
    )


@torch.no_grad()
def exact_kl(run: Path, teacher: str, students: tuple[str, str]) -> tuple[float, float]:
    """Mean KL(student || teacher) in nats, at the own tokens of the first evaluation's episodes."""
    with Store.open(run, cache=False) as store:
        tapes = [store.tape(found.id) for found in store.summaries(split="eval-before-sampled", closed=True)]
    every = [row for tape in tapes for row in rows(tape)]

    def logprobs(folder: str) -> torch.Tensor:
        model = load_pretrained(folder).model
        logits = [model(torch.as_tensor(row.input_ids)[None]).logits[0, row.own - 1] for row in every]
        return torch.cat(logits).double().log_softmax(-1)

    taught = logprobs(teacher)
    before, after = (float((lp.exp() * (lp - taught)).sum(-1).mean()) for lp in map(logprobs, students))
    return before, after


def held_out(run: tr.Run) -> dict[str, Any]:
    """Rewards on held-out tasks: `before`, `after`, `after_change`."""
    return run.summary.model_dump(mode="json")["held_out"]


def last_model(run: Path) -> str:
    """The folder with the model of the newest checkpoint."""
    return str(max((run / "checkpoints").glob("update-*")) / "hf")


def table(lines: list[Line]) -> str:
    """The students, as Markdown."""
    head = "task | seed | KL, first | KL, last | exact KL, before | after | teacher | student before | after | change"
    text = [f"| {head} |", "|---" * 10 + "|"]
    for line in sorted(lines, key=lambda line: (line.task, line.seed)):
        first, last = statistics.fmean(line.kl[:ENDS]), statistics.fmean(line.kl[-ENDS:])
        value, low, high = line.change
        text.append(
            f"| {line.task} | {line.seed} | {first:.3f} | {last:.3f} | {line.exact[0]:.3f} | {line.exact[1]:.3f} | "
            f"{line.teacher:.3f} | {line.before:.3f} | {line.after:.3f} | {value:+.3f} [{low:+.3f}, {high:+.3f}] |"
        )
    return "\n".join(text)


if __name__ == "__main__":
    main()
