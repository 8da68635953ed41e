"""`run` and `train` take objects, beside names, in a script and inside a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, FunctionAgent, RunConfig
from tapereel.agents.runs import run
from tapereel.agents.setup import EmbeddedConfig, ScriptedConfig
from tapereel.agents.setup.setup import Setup
from tapereel.cli import main
from tapereel.envs import Taskset
from tapereel.finetune import LoopConfig, TrainConfig
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.tapes import Sampling, Tape
from tapereel.tapes.common import ConfigError, load_config
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.errors import UsageError

from .lab import refusal_of
from .world import Digits, Said


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Said(text=(await llm(tape, max_tokens=1)).text)


async def speak(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Said(text="1")


def numbers() -> Taskset:
    from tapereel.tapes import Task

    return Taskset([Task(public=str(k), private=str(k + 1)) for k in range(8)])


SCRIPTED = RunConfig(engine=ScriptedConfig(answers=("1",)))


def micro(model: str) -> TrainConfig:
    return TrainConfig(
        engine=EmbeddedConfig(model=model),
        loop=LoopConfig(updates=2, groups=2, group_size=4, sampling=Sampling(max_tokens=1)),
        evaluation=EvaluationConfig(fraction=0.25, limit=2),
    )


def test_objects_are_recorded_by_the_names_that_import_them(tmp_path: Path):
    summary = run(SCRIPTED, tmp_path / "r", agent=Player, env=Digits, tasks=numbers)
    assert (summary.tasks, summary.episodes, summary.reward) == (8, 8, 1 / 8)
    recorded = load_config(RunConfig, tmp_path / "r" / "config.yaml")
    assert recorded.agent == f"{__name__}:Player"
    assert recorded.tasks == f"{__name__}:numbers"
    assert run(recorded, tmp_path / "r", resume=True).recorded == 0
    assert run(SCRIPTED, tmp_path / "r", agent=Player, env=Digits, tasks=numbers, resume=True).recorded == 0


def test_objects_without_a_name_are_recorded_by_their_class_and_passed_again(tmp_path: Path, capsys):
    def make() -> Any:
        return Digits()

    given: dict[str, Any] = {"agent": Player(), "env": make, "tasks": list(numbers())}
    assert run(SCRIPTED, tmp_path / "r", **given).episodes == 8
    recorded = load_config(RunConfig, tmp_path / "r" / "config.yaml")
    assert recorded.agent == f"<object of {__name__}.Player>"
    assert str(recorded.env).endswith(".<locals>.make>")
    assert str(recorded.tasks).startswith("<object of builtins.list, 8 tasks, ")
    assert run(SCRIPTED, tmp_path / "r", **given, resume=True).recorded == 0
    with pytest.raises(ConfigError, match=r": tasks\b"):
        run(SCRIPTED, tmp_path / "r", **{**given, "tasks": list(numbers())[1:]}, resume=True)
    said = refusal_of(
        capsys, "run", "--config", str(tmp_path / "r" / "config.yaml"), "--out", str(tmp_path / "r"), "--resume"
    )
    assert str(recorded.agent) in said
    assert "`--agent`" in said


def test_plain_values_are_recorded_as_a_list(tmp_path: Path):
    setup, loaded = Setup().resolve(agent=Player(), env=Digits, tasks=[3, "4"])
    assert setup.tasks == (3, "4")
    assert [task.private for task in loaded.tasks] == [3, "4"]


def test_a_missing_or_contradicting_part_is_refused():
    with pytest.raises(UsageError, match="`agent="):
        Setup().resolve(env=Digits, tasks=[1])
    with pytest.raises(UsageError, match=f"{__name__}:Player.*agent="):
        Setup(agent=f"{__name__}:Player").resolve(agent=FunctionAgent(speak), env=Digits, tasks=[1])
    with pytest.raises(UsageError, match=r"env=<.*Digits>"):
        Setup().resolve(agent=Player, env=Digits(), tasks=[1])


def test_a_command_without_an_agent_is_refused(tmp_path: Path, capsys):
    words = ("run", "--env", "x:y", "--tasks", "x:z", "--set", 'engine.answers=["1"]', "--out", str(tmp_path / "r"))
    assert "`--agent`" in refusal_of(capsys, *words)
    assert not (tmp_path / "r").exists()


def test_train_takes_objects_inside_a_running_event_loop_and_goes_on(model: str, tmp_path: Path):
    config, out = micro(model), tmp_path / "r"
    given: dict[str, Any] = {"agent": Player(), "env": Digits, "tasks": numbers()}

    async def notebook() -> Any:
        return train(config, out, **given)

    summary = asyncio.run(notebook())
    assert (summary.updates, summary.books_close) == (2, True)
    again = train(config, out, **given, resume=True)
    assert (again.lineage, again.updates) == (summary.lineage, 2)
    assert main(["verify", str(out)]) == 0


def test_run_async_raises_keeps_context_and_uses_its_own_thread_only_where_it_must():
    name: ContextVar[str] = ContextVar("name")

    async def inner(fails: bool = False) -> tuple[int, str]:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("inner")
        return threading.get_ident(), name.get()

    name.set("caller")
    assert run_async(inner()) == (threading.get_ident(), "caller")

    async def outer() -> None:
        thread, said = run_async(inner())
        assert thread != threading.get_ident()
        assert said == "caller"
        with pytest.raises(ValueError, match="inner"):
            run_async(inner(fails=True))

    asyncio.run(outer())
