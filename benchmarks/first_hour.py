"""The first hour again: eight tasks drawn by a seed from reasoning-gym, each trained from nothing by defaults alone.

    python benchmarks/first_hour.py --seed 19 --out FOLDER          (docs/project/first_hour.md has the results)

The draw is from all generators whose answers have at most 40 characters. It is written to `FOLDER/draw.json` before
any training and isn't repeated. Each task has a tiny untrained model, 1,000 tasks, and 2,000 examples of a demonstrator
that gives the right answer in half of the cases, and otherwise the answer to another task.

If the held-out reward doesn't rise beyond its interval, the first suggestion of `train` is tested: what it names is
changed and nothing else. The changed run measures each held-out task by four attempts instead of one, which doesn't
change its training. The suggestion is confirmed if

- the reward rises beyond its interval in the changed run, from before to after the loop, or
- the tasks are the same, and the reward after the changed run is above the base run's, paired by task, beyond the
  interval of the difference.

If the suggestion is to begin with easier tasks, `easier` changes the generator's configuration by one rule for all.

What is in FOLDER already isn't made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import tapereel as tr
from tapereel import ChatAgent, Environment, Outcome
from tapereel.agents.runs.pass_at_k import compare
from tapereel.agents.runs.runner import rewards_of
from tapereel.envs import BadTasks, Taskset, reasoning_scorer, reasoning_tasks
from tapereel.tapes import Answer
from tapereel.tapes.audit.advice import advice
from tapereel.tapes.store import METRICS, Results, Store, read_metrics

LONGEST, SAMPLE, DRAWN = 40, 200, 8
"""Characters of the longest answer that is allowed, the entries in which it is measured, and the tasks in a draw."""
COUNTS = ((1000, 2000), (500, 1000), (250, 500), (125, 250))
"""Numbers of tasks and examples. Of easier tasks, the first are taken that the generator can make."""
DIVISORS = {"puzzle24": 2, "tsumego": 1.25}
"""Divisors other than 4: four numbers of at most 2 can't make 24, and some boards of 6 x 6 have no tsumego."""
FEW = {"puzzle24": (400, 600)}
"""Tasks and examples of a generator with too few different tasks: puzzle24 has about 1,400."""
MORE = {"puzzle24": 800}
"""Tasks in place of four times as many, if the generator has fewer."""

agent = ChatAgent(parse=lambda text: Answer(text=text))


class OneAnswer(Environment[Answer]):
    """One question, one answer, scored by the generator's own scorer."""

    async def reset(self, task: Any) -> str:
        self.task = task
        return str(task.public["question"])

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=reasoning_scorer(self.task.private["dataset"])(action.text, self.task), terminated=True)


@dataclass
class Change:
    """What differs from the defaults."""

    settings: dict[str, Any] = field(default_factory=dict)
    examples: int = 2000
    right: float = 0.5
    """The share of the demonstrator's answers that are right."""
    config: dict[str, Any] = field(default_factory=dict)
    """The generator's configuration."""
    more: bool = False
    """Whether there are more different tasks."""


def draw(seed: int, out: Path) -> list[str]:
    """The drawn names. They are written down once."""
    path = out / "draw.json"
    if not path.exists():
        gym, names = import_module("reasoning_gym.factory"), list[str]()
        for name in sorted(set(gym.DATASETS) - {"composite"}):  # it has no tasks of its own
            dataset = gym.create_dataset(name, seed=0, size=SAMPLE)
            if all(len(str(dataset[k]["answer"])) <= LONGEST for k in range(SAMPLE)):
                names.append(name)
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"seed": seed, "of": names, "drawn": random.Random(seed).sample(names, DRAWN)}))
    return list(json.loads(path.read_text())["drawn"])


def without_frame(questions: list[str]) -> list[str]:
    """The questions without the beginning and the end that all of them share: a model that reads characters would spend
    most of its time on them."""
    begin = len(os.path.commonprefix(questions))  # noqa: RUF071
    end = len(os.path.commonprefix([text[begin:][::-1] for text in questions]))  # noqa: RUF071
    return [text[begin : len(text) - end] for text in questions]


def made(name: str, change: Change) -> tuple[list[Any], list[tuple[str, str]]]:
    """The tasks, and (question, right answer) of other tasks to demonstrate."""
    if not change.config:
        size, shown = FEW.get(name, (1000, change.examples))
        return drawn_from(name, MORE.get(name, 4 * size) if change.more else size, shown)
    for size, shown in COUNTS[:-1]:
        with suppress(BadTasks):
            return drawn_from(name, size, shown, draws=20 * (size + shown), **change.config)
    return drawn_from(name, *COUNTS[-1], **change.config)


def drawn_from(name: str, size: int, shown: int, **config: Any) -> tuple[list[Any], list[tuple[str, str]]]:
    tasks: list[Any] = list(reasoning_tasks(name, size, 0, **config))
    others: list[Any] = list(reasoning_tasks(name, shown + size, 1_000_000, **config))
    known = {task.hash for task in tasks}
    others = [task for task in others if task.hash not in known][:shown]
    every: list[Any] = [*tasks, *others]
    asked = without_frame([task.public["question"] for task in every])
    short = [t.model_copy(update={"public": {"question": q}}) for t, q in zip(tasks, asked, strict=False)]
    return short, [(q, str(t.private["answer"])) for t, q in zip(others, asked[len(tasks) :], strict=True)]


def easier(name: str) -> dict[str, int]:
    """The generator's whole numbers `min_*` and `max_*`, divided by four, or by less if four leaves no tasks. If the
    generator refuses a number, the next one that it accepts is taken, on the way back to the default."""
    gym, config = import_module("reasoning_gym.factory"), dict[str, int]()
    default = vars(gym.DATASETS[name][1]())
    bounds = [key for key, value in default.items() if key.startswith(("min_", "max_")) and type(value) is int]
    for key in sorted(bounds, reverse=True):  # `min_` before `max_`, so that no range is empty
        sign, size = (-1 if default[key] < 0 else 1), abs(default[key])
        for value in range(max(round(size / DIVISORS.get(name, 4)), min(size, 1)), size + 1):
            with suppress(ValueError, AssertionError):
                gym.create_dataset(name, size=1, seed=0, **{**config, key: sign * value})
                config[key] = sign * value
                break
    return config


def trained(name: str, out: Path, change: Change) -> None:
    """Train by defaults and the change, and print a line of the log."""
    began, cpu = time.monotonic(), _cpu()
    rng, (tasks, shown) = random.Random(1), made(name, change)
    whole: list[Any] = [*[(t.public["question"], t.private["answer"]) for t in tasks], *shown]
    out.mkdir(parents=True)
    alphabet = "".join(sorted(set("".join(map("".join, whole)))))
    tr.save_tiny_model(out / "model", alphabet, context=max(len(q) + len(a) for q, a in whole) + 64)
    with (out / "examples.jsonl").open("w") as file:
        for question, answer in shown:
            said = answer if rng.random() < change.right else rng.choice(shown)[1]
            prompt, completion = [{"role": "user", "content": question}], [{"role": "assistant", "content": said}]
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    words = ("import", str(out / "examples.jsonl"), str(out / "examples"), "--format", "sft", "--split", "demo")
    subprocess.run([sys.executable, "-m", "tapereel.cli", *words], check=True)
    settings = {"warm.tapes": str(out / "examples"), **change.settings}
    tr.train(agent, OneAnswer, Taskset(tasks, name=name), str(out / "model"), out=out / "run", settings=settings)
    print(f"{out.name}: {time.monotonic() - began:.0f} s, {_cpu() - cpu:.0f} s of CPU", flush=True)


def continued(name: str, base: Path, out: Path, change: Change) -> None:
    """Continue a copy of the run."""
    shutil.copytree(base / "run", out / "run")
    settings = {"warm.tapes": str(base / "examples"), "loop.updates": change.settings["loop.updates"]}
    tasks = Taskset(made(name, Change())[0], name=name)
    tr.train(agent, OneAnswer, tasks, str(base / "model"), out=out / "run", settings=settings, resume=True)


def first_suggestion(run: Path) -> str | None:
    """What the code of today says first about a run. None if its held-out reward rose."""
    lines = [line for line in read_metrics(run / METRICS) if line.get("phase") == "rl"]
    with Store.open(run) as store:
        said = advice(store, "train", lines, Results.read(run).after)
    return next((text.removeprefix("First: ") for text in said if text.startswith("First: ")), None)


def change_of(name: str, suggestion: str) -> Change:
    """What a suggestion names: settings, more and only right examples, easier tasks."""
    found = re.findall(r"([a-z_]+\.[a-z_.]+)=([-0-9.e]*[0-9])(?! measures)", suggestion)
    named: dict[str, float] = {"evaluation.attempts": 4.0, **{key: float(value) for key, value in found}}
    settings = {key: int(value) if value.is_integer() else value for key, value in named.items()}
    more = re.search(r"only right examples \(([0-9,]+)", suggestion)
    examples = int(more[1].replace(",", "")) if more else 2000
    right = 1.0 if "only right examples" in suggestion else 0.5
    config = easier(name) if "easier tasks" in suggestion else {}
    return Change(settings, examples, right, config, "different tasks" in suggestion)


def held_out(run: Path) -> tuple[str, bool]:
    """`before -> after, change`, and whether it rose beyond its interval."""
    results: Any = Results.read(run)
    before, after = results.before["sampled"], results.after["sampled"]
    value, low, high = (after.change[key] for key in ("value", "low", "high"))
    return f"{before.mean:.3f} | {after.mean:.3f} | {value:+.3f} [{low:+.3f}, {high:+.3f}]", low > 0


def against(run: Path, base: Path) -> tuple[str, bool]:
    """The reward after the run minus the reward after the base run, paired by task, and whether it is above 0."""
    rewards = []
    for folder in (run, base):
        with Store.open(folder) as store:
            splits = {s.split for s in store.summaries() if s.split.startswith("eval-after")}
            rewards.append(rewards_of(store, min(splits)))  # `eval-after-000080-...`, if the run was continued
    found = compare(*rewards).reward
    return str(found), (found.low or 0.0) > 0


def tested(name: str, out: Path) -> None:
    """Train and print the row of the table; test the first suggestion."""
    base = out / name
    if not (base / "run").exists():
        trained(name, base, Change())
    row, rose = held_out(base / "run")
    suggestion = None if rose else first_suggestion(base / "run")
    print(f"| {name} | {row} | {suggestion or 'rose'} |", flush=True)
    if suggestion is None:
        return
    if "harder tasks" in suggestion:
        print(f"{name}: not tested, there are no such tasks here", flush=True)
        return
    change, changed = change_of(name, suggestion), out / f"{name}-changed"
    print(f"{changed.name}: {change}", flush=True)
    if not (changed / "run").exists() and "--resume" in suggestion:
        continued(name, base, changed, change)
    elif not (changed / "run").exists():
        trained(name, changed, change)
    row, confirmed = held_out(changed / "run")
    if not (change.config or change.more):
        difference, above = against(changed / "run", base / "run")
        row, confirmed = f"{row} | against the base run {difference}", confirmed or above
    print(f"| {changed.name} | {row} |", flush=True)
    print(f"{name}: {'confirmed' if confirmed else 'NOT confirmed'}", flush=True)


def _cpu() -> float:
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/first-hour"))
    parser.add_argument("--only", help="one of the drawn tasks")
    args = parser.parse_args()
    drawn = draw(args.seed, args.out)
    print("seed", args.seed, "drawn:", *drawn, flush=True)
    if args.only:
        tested(args.only, args.out)
    else:
        for name in drawn:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], check=True)
