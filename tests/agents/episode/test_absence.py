"""What episodes do while no server answers, and where no engine can answer any more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tapereel.agents import EngineError, Limits, Request, ScriptedEngine, rollout
from tapereel.agents.engines.engine import EngineStopped
from tapereel.agents.engines.transport.absence import Absence
from tapereel.agents.runs.group import Closing, Group, fill
from tapereel.agents.runs.judge import Judge, judge_reward
from tapereel.agents.runs.runner import RunConfig, run
from tapereel.envs.rewards import Rewards, rewarded
from tapereel.tapes import Answer, CauseType, Status, Tape
from tapereel.tapes.store.store import Store

from ...attack.faulty import TASKS, Faulty, Player


class Slow(ScriptedEngine):
    """Answers after a time, in which its servers are `away` or have a queue."""

    def __init__(self, seconds: float, *, away: bool = True) -> None:
        super().__init__(["7"] * 9)
        self.absence = Absence(60.0)
        self.seconds, self.away = seconds, away

    async def complete(self, request: Request) -> Any:
        if self.away:
            self.absence.begin(time.monotonic())
        await asyncio.sleep(self.seconds)
        self.absence.end()
        return await super().complete(request)


def test_no_episode_begins_while_no_server_answers() -> None:
    made: list[Faulty] = []

    def factory() -> Faulty:
        made.append(Faulty())
        return made[-1]

    async def scene() -> Tape:
        engine = Slow(0.0)
        engine.absence.begin(time.monotonic())
        rolling = asyncio.create_task(rollout(Player(), factory, TASKS[1], engine=engine))
        await asyncio.sleep(0.05)
        assert not made
        engine.absence.end()
        return await rolling

    assert asyncio.run(scene()).reward == 1.0


@pytest.mark.parametrize("away", [True, False])
def test_servers_that_are_away_take_no_system_time(away: bool) -> None:
    tape = asyncio.run(
        rollout(
            Player(),
            Faulty,
            TASKS[1],
            engine=Slow(1.0, away=away),
            limits=Limits(system_seconds=0.5, agent_seconds=None),
        )
    )
    assert (tape.status, tape.cause and tape.cause.type) == (
        (Status.FINISHED, None) if away else (Status.LIMIT, CauseType.SECONDS)
    )


@pytest.mark.parametrize("away", [True, False])
def test_the_deadline_of_a_group_waits_for_servers_that_are_away(away: bool) -> None:
    engine, group = Slow(1.0, away=away), Group(0, TASKS[1], 1)

    async def sample(attempt: int, again: int) -> Tape:
        return await rollout(Player(), Faulty, TASKS[1], engine=engine)

    async def scene() -> Closing:
        return await fill(group, sample, until=asyncio.get_running_loop().time() + 0.5, engine=engine)

    assert asyncio.run(scene()) is (Closing.COMPLETE if away else Closing.DEADLINE)


def test_a_judge_that_can_answer_no_more_stops_the_run(tmp_path: Any) -> None:
    """Its episodes are failures of the model, which `--resume` repeats, and not of the environment."""

    def gone(request: Request) -> str:
        raise EngineStopped("the key is rejected", "key")

    judge = judge_reward(Judge(ScriptedEngine(gone)), "Is it right?")
    config = RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["7"] * 9}, "retries": 0})
    env, tasks = rewarded(Faulty, Rewards([judge])), TASKS[:2]
    with pytest.raises(EngineStopped, match=r"the key is rejected. 0 of 2 attempts have ended") as stopped:
        run(config, tmp_path / "run", agent=Player(), env=env, tasks=tasks)
    assert stopped.value.reason == "key"
    with Store.open(tmp_path / "run") as store:
        ends = [(tape.status, tape.cause and tape.cause.type) for tape in store.tapes()]
    assert (Status.ERROR, CauseType.MODEL) in ends
    assert {status for status, cause in ends if cause != CauseType.MODEL} <= {Status.CANCELLED}


def test_resume_repeats_what_the_model_failed_with_the_same_seed(tmp_path: Any) -> None:
    engine = {"kind": "scripted", "policy": f"{__name__}:answer"}
    config = RunConfig.model_validate({"engine": engine, "retries": 0})
    ANSWERS["fails"] = True
    assert run(config, tmp_path / "run", agent=Player(), env=Faulty, tasks=TASKS[:2]).scored == 0
    ANSWERS["fails"] = False
    found = run(config, tmp_path / "run", agent=Player(), env=Faulty, tasks=TASKS[:2], resume=True)
    assert (found.recorded, found.scored) == (2, 2)
    with Store.open(tmp_path / "run") as store:
        seeds = [(tape.begin.task.private, tape.begin.seed) for tape in store.tapes()]
    assert len(seeds) == 4
    assert len(set(seeds)) == 2


ANSWERS = {"fails": False}


def answer(request: Request) -> str:
    if ANSWERS["fails"]:
        raise EngineError("no model")
    return "7"


def test_code_that_was_left_running_adds_nothing_to_its_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("envs.supervised", "agents.episode.llm"):
        monkeypatch.setattr(f"tapereel.{module}.GRACE", 0.1)

    async def scene() -> None:
        release, ended, said = asyncio.Event(), asyncio.Event(), list[str]()

        class Lingers(Player):
            async def act(self, tape: Tape, llm: Any) -> Any:
                while not release.is_set():
                    try:
                        await release.wait()
                    except asyncio.CancelledError:
                        continue
                try:
                    await llm(tape)
                except RuntimeError as error:
                    said.append(str(error))
                try:
                    yield Answer(text="late")
                finally:
                    ended.set()

        agent = Lingers()
        agent.late = Answer(text="late")  # type: ignore[attr-defined]
        engine = ScriptedEngine(["7"])
        tape = await rollout(agent, Faulty, TASKS[1], engine=engine, limits=Limits(agent_seconds=0.1))
        assert tape.end is not None
        assert [cause.type for cause in tape.end.beside] == [CauseType.AGENT]
        bodies = list(tape.bodies)
        release.set()
        await ended.wait()
        await asyncio.sleep(0)
        assert said == ["the episode has ended: a task that outlives its turn can't ask the model"]
        assert list(tape.bodies) == bodies

    asyncio.run(scene())


def test_calls_of_helper_tasks_end_with_the_episode() -> None:
    class Hangs(ScriptedEngine):
        async def complete(self, request: Request) -> Any:
            if request.cache_key.endswith("beside"):
                await asyncio.Event().wait()
            return await super().complete(request)

    class Helped(Player):
        async def act(self, tape: Tape, llm: Any) -> Any:
            self.helper = asyncio.create_task(llm(tape, conversation="beside"))
            await asyncio.sleep(0.01)
            async for step in super().act(tape, llm):
                yield step

    tape = asyncio.run(rollout(Helped(), Faulty, TASKS[1], engine=Hangs(["7"])))
    assert [call.finish for call in tape.calls] == ["stop", "cancelled"]
