"""Every synchronous function of the API works where an event loop runs: in a notebook, a web server, a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import tapereel as tr
from tapereel.agents import RunConfig, ScriptedEngine, check_engine
from tapereel.agents.runs.runner import score_run
from tapereel.agents.setup import load_tasks
from tapereel.agents.setup.setup import load_agent, load_env
from tapereel.cli import main
from tapereel.envs.checks.reexec import reexec_run
from tapereel.envs.checks.rescore import add_reward_layer, compare_rewards, rescore_run
from tapereel.envs.load_named import load_named
from tapereel.finetune.inspect import requery_run
from tapereel.finetune.inspect.lab import lab
from tapereel.finetune.interchange import write

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "digits.py")
AGENT, ENV, TASKS, SCORE = (f"{EXAMPLE}:{name}" for name in ("player", "Digits", "tasks", "close"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


def inside(work: Callable[[], Any]) -> Any:
    """The result of `work`, called while an event loop runs in this thread."""

    async def call() -> Any:
        return work()

    return asyncio.run(call())


def test_runs_and_checks(folder: Path) -> None:
    run = inside(lambda: tr.run(AGENT, ENV, TASKS, ["7"], out=folder / "run", settings={"count": 10}))
    path = run.path
    tape = run.tapes()[0].id
    calls: list[Callable[[], Any]] = [
        lambda: RunConfig(agent=AGENT, env=ENV, tasks=TASKS, engine={"kind": "scripted", "answers": ["7"]}).resolve(),
        lambda: (load_agent(AGENT), load_env(ENV), load_tasks(TASKS)),
        lambda: tr.open(path).verify(),
        lambda: tr.open(path).audit(),
        lambda: tr.open(path).replay(AGENT),
        lambda: tr.open(path).replay(load_agent(AGENT)),
        lambda: tr.open(path).branch(tape, 0, model=["3"]),
        lambda: (run.reward, run.scores(), score_run(path)),
        lambda: reexec_run(path, ENV, jobs=1),
        lambda: reexec_run(path),
        lambda: rescore_run(path, SCORE, jobs=1),
        lambda: add_reward_layer(path, SCORE, "later"),
        lambda: compare_rewards(path, SCORE, SCORE),
        lambda: tr.check_env(load_env(ENV), load_tasks(TASKS)[:2], cast("Any", load_named(f"{EXAMPLE}:blindly"))),
        lambda: check_engine(ScriptedEngine(["7"])),
        lambda: write(run.tapes(), folder / "out.jsonl", "sft"),
        lambda: main(["replay", "env", str(path), "--env", ENV]),
        lambda: main(["replay", "rewards", str(path), "--reward", SCORE]),
        lambda: main(["check", "env", ENV, "--tasks", TASKS, "--actions", f"{EXAMPLE}:blindly"]),
    ]
    for call in calls:
        inside(call)


def test_training_and_its_checks(folder: Path) -> None:
    model = tr.save_tiny_model(folder / "model", size="micro")
    more = {
        "loop.updates": 1,
        "loop.groups": 2,
        "loop.group_size": 2,
        "loop.sampling.max_tokens": 1,
        "evaluation.fraction": 0.1,
        "loop.changes": {"regulariser": [{"kind": "entropy", "coefficient": 0.05}]},
    }
    run = inside(lambda: tr.train(AGENT, ENV, TASKS, model, out=folder / "trained", settings=more))
    assert inside(run.reproduce).exit_code == 0
    inside(lambda: requery_run(run.path))
    inside(lambda: lab(run.path, ["own", "rloo"]))
    inside(lambda: tr.evaluate(AGENT, ENV, TASKS, model, out=folder / "measured", settings={"count": 2}))
