"""What episodes do while no server answers, and where no engine can answer any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from tapereel.agents import EngineError, Limits, Request, RunConfig, ScriptedEngine, rollout
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.transport.absence import Absence
from tapereel.agents.episode.recorder import Recorder
from tapereel.agents.runs import Judge, judge_reward, run
from tapereel.agents.runs.group import Closing, Group, fill
from tapereel.envs import Outcome
from tapereel.envs.rewards import Rewards, rewarded
from tapereel.tapes import Answer, CauseType, Status, Tape
from tapereel.tapes.store import Store

from ...attack.faulty import TASKS, Faulty, Player
from ..gateway.lab import until


class Slow(ScriptedEngine):
    """Answers after a time, in which its servers are `away` or have a queue."""

    def __init__(self, seconds: float, *, away: bool = True) -> None:
        super().__init__(["7"] * 9)
        self.absence = Absence(60.0)
        self.can |= {"absence"}
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


@pytest.mark.parametrize("fails", [False, True])
def test_the_work_of_the_model_is_the_agent_s_time_and_the_wait_after_a_failure_is_not(fails: bool) -> None:
    class Works(ScriptedEngine):
        asked = 0

        async def complete(self, request: Request) -> Any:
            assert request.on_start is not None
            request.on_start()
            self.asked += 1
            if fails and self.asked == 1:
                raise EngineError("busy", retry=True)  # `LLM` waits for half a second before the next attempt
            await asyncio.sleep(0.0 if fails else 1.0)
            return await super().complete(request)

    limits = Limits(agent_seconds=0.4, system_seconds=None)
    tape = asyncio.run(rollout(Player(), Faulty, TASKS[1], engine=Works(["7"]), limits=limits))
    assert (tape.status, tape.cause and tape.cause.type) == (
        (Status.FINISHED, None) if fails else (Status.LIMIT, CauseType.AGENT_SECONDS)
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
    with pytest.raises(EngineStopped, match=r"rejected\D+0\D+2\D") as stopped:
        run(config, tmp_path / "run", agent=Player(), env=env, tasks=tasks)
    assert stopped.value.reason == "key"
    with Store.open(tmp_path / "run") as store:
        ends = [(tape.status, tape.cause and tape.cause.type) for tape in store.tapes()]
    assert (Status.ERROR, CauseType.MODEL) in ends
    assert {status for status, cause in ends if cause != CauseType.MODEL} <= {Status.CANCELLED}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The recorders of all episodes of a test: a cancelled episode returns no tape."""
    made: list[Recorder] = []

    def recorder(*given: Any) -> Recorder:
        made.append(Recorder(*given))
        return made[-1]

    monkeypatch.setattr("tapereel.agents.episode.rollout.Recorder", recorder)
    return made


def test_an_agent_that_swallows_the_end_of_its_engine_earns_nothing(recorders: list[Recorder]) -> None:
    asked: list[Request] = []

    def gone(request: Request) -> str:
        asked.append(request)
        raise EngineStopped("the budget is spent", "budget")

    class Swallows(Player):
        async def act(self, tape: Tape, llm: Any) -> Any:
            for _ in range(3):
                with contextlib.suppress(Exception):
                    await llm(tape)
            yield Answer(text="7")

    async def scene() -> Tape:
        with pytest.raises(EngineStopped):
            await rollout(Swallows(), Faulty, TASKS[1], engine=ScriptedEngine(gone))
        return Tape(recorders[0].log)

    tape = asyncio.run(scene())
    assert len(asked) == 1
    assert (tape.status, tape.cause and tape.cause.type, tape.trains) == (Status.ERROR, CauseType.MODEL, False)


def test_a_request_that_alone_is_not_answered_fails_alone() -> None:
    async def scene() -> None:
        absence, error = Absence(0.3, backoff=0.01), EngineError("no answer")

        async def alone() -> None:
            with absence.request() as tries:
                while True:
                    await tries.failed(error)

        failing = asyncio.create_task(alone())
        async with asyncio.timeout(20):
            while not failing.done():
                with absence.request() as tries:
                    tries.answered()
                await asyncio.sleep(0.01)
        assert failing.exception() is error, "the run goes on"
        assert absence.since is None

    asyncio.run(scene())


def test_time_without_requests_is_no_absence() -> None:
    async def scene() -> None:
        absence = Absence(60.0, backoff=30.0)

        async def asks() -> None:
            with absence.request() as tries:
                await tries.failed(EngineError("no answer"))

        asking = asyncio.create_task(asks())
        await asyncio.sleep(0.05)
        assert absence.since is not None
        asking.cancel()
        await asyncio.wait([asking])
        assert absence.since is None
        seconds = absence.seconds
        await asyncio.sleep(0.05)
        assert absence.seconds == seconds

    asyncio.run(scene())


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


class Hangs(Faulty):
    """Hangs at the first task, until the run is repeated."""

    async def step(self, action: Answer) -> Outcome:
        if self.k == 0 and ANSWERS["fails"]:
            await asyncio.Event().wait()
        return await super().step(action)


def stopping(request: Request) -> str:
    if ANSWERS["fails"] and "task 1" in str(list(request.messages)):
        raise EngineStopped("the budget is spent", "budget")
    return "7"


def test_resume_repeats_what_the_end_of_the_run_cut_off_with_the_same_seed(tmp_path: Any) -> None:
    engine = {"kind": "scripted", "policy": f"{__name__}:stopping"}
    config = RunConfig.model_validate({"engine": engine, "retries": 0})
    ANSWERS["fails"] = True
    with pytest.raises(EngineStopped):
        run(config, tmp_path / "run", agent=Player(), env=Hangs, tasks=TASKS[:2])
    ANSWERS["fails"] = False
    found = run(config, tmp_path / "run", agent=Player(), env=Hangs, tasks=TASKS[:2], resume=True)
    assert (found.recorded, found.scored) == (2, 2)
    with Store.open(tmp_path / "run") as store:
        tapes = [(tape.begin.task.private, tape.begin.seed, tape.status) for tape in store.tapes()]
    assert {status for task, _, status in tapes if task == 0} == {Status.CANCELLED, Status.FINISHED}
    assert len({(task, seed) for task, seed, _ in tapes}) == 2


def test_what_was_cut_off_uses_up_no_retry_and_keeps_its_seed(recorders: list[Recorder]) -> None:
    async def cut() -> Tape:
        recorders.clear()
        rolling = asyncio.create_task(rollout(Player(), Faulty, TASKS[1], engine=Slow(9.0)))
        await until(lambda: recorders)
        rolling.cancel()
        await asyncio.wait([rolling])
        return Tape(recorders[-1].log)

    async def scene() -> list[tuple[int, int]]:
        group, asked = Group(0, TASKS[1], 1), list[tuple[int, int]]()
        group.tapes[0] = [await cut(), await cut(), await cut()]

        async def sample(attempt: int, again: int) -> Tape:
            asked.append((attempt, again))
            return await rollout(Player(), Faulty, TASKS[1], engine=Slow(0.0))

        assert await fill(group, sample) is Closing.COMPLETE
        return asked

    assert asyncio.run(scene()) == [(0, 0)]


def test_a_limit_in_a_task_group_of_the_agent_is_a_limit() -> None:
    class Asks(Player):
        async def act(self, tape: Tape, llm: Any) -> Any:
            async with asyncio.TaskGroup() as tasks:
                for name in "ab":
                    tasks.create_task(llm(tape, conversation=name))
            yield Answer(text="7")

    tape = asyncio.run(rollout(Asks(), Faulty, TASKS[1], engine=Slow(0.0, away=False), limits=Limits(calls=1)))
    assert (tape.status, tape.cause and tape.cause.type) == (Status.LIMIT, CauseType.TURNS)


ANSWERS = {"fails": False}


def answer(request: Request) -> str:
    if ANSWERS["fails"]:
        raise EngineError("no model")
    return "7"


def test_code_that_was_left_running_adds_nothing_to_its_tape(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
                except BaseException as error:
                    said.append(f"{error!r}")
                try:
                    yield Answer(text="late")
                finally:
                    ended.set()

        class Waits(Faulty):
            async def close(self) -> None:
                release.set()
                await ended.wait()

        limits = Limits(agent_seconds=0.1)
        with Store.create(tmp_path / "run") as store:
            one = ScriptedEngine(["7"])
            tape = await rollout(Lingers(), Waits, TASKS[1], engine=one, limits=limits, journal=store.writer)
            assert tape.end is not None
            assert [cause.type for cause in tape.end.beside] == [CauseType.AGENT]
        assert ["RuntimeError" in text and "outlives" in text for text in said] == [True]
        assert [step.kind for step in tape] == ["text"]

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

    tape = asyncio.run(rollout(Helped(), Faulty, TASKS[1], engine=Hangs(["never", "7"])))
    assert [call.finish for call in tape.calls] == ["stop", "cancelled"]
