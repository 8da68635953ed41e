"""Faults of environments, agents and tools in 10 of 100 episodes: the run ends by itself, with 90 results."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Completion, Limits, Request, RunConfig, ScriptedEngine, rollout
from tapereel.agents.runs import Judge, judge_reward, run
from tapereel.agents.runs.runner import RunSummary
from tapereel.envs import Outcome
from tapereel.envs.remote import Pool, RemoteEnvironment, ResetCall, Service, ServiceLimits
from tapereel.envs.rewards import Rewards, rewarded
from tapereel.tapes import Task
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, verify

from ..envs.remote.worlds import until
from .faulty import RAISED, STUCK, TASKS, Faulty, Named, Player, Tools

HERE = Path(__file__).parent
LIMITS = Limits(agent_seconds=3.0, environment_seconds=3.0)
"""Of faults that hang. Few episodes run at once, so that the others stay far within them on a busy machine too."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("envs.supervised", "tapes.common.run_async", "agents.episode.llm"):
        monkeypatch.setattr(f"tapereel.{module}.GRACE", 0.3)


def rolled(path: Path, agent: Any, env: Any, **settings: Any) -> RunSummary:
    """100 tasks, one attempt each and no retry, in a run that must verify."""
    engine = {"kind": "scripted", "policy": f"{HERE}/faulty.py:seven"}
    settings = {"engine": engine, "limits": LIMITS, "retries": 0, "concurrency": 10, **settings}
    config = RunConfig.model_validate(settings)
    found = run(config, path / "run", agent=agent, env=env, tasks=TASKS)
    assert verify(path / "run").exit_code == 0
    return found


def ends(found: RunSummary) -> dict[tuple[str, str | None], int]:
    return {(end.status, end.cause): end.episodes for end in found.ends}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["reset", "step", "finish", "close"])
@pytest.mark.parametrize("name", [*RAISED, *STUCK])
def test_a_fault_of_the_environment(tmp_path: Path, name: str, place: str) -> None:
    env = type("Faulty", (Faulty,), {"place": place, "fault": staticmethod((RAISED | STUCK)[name])})
    found = rolled(tmp_path, Player(), env)
    if place == "close":  # the episode had its result
        assert ends(found) == {("finished", None): 100}
        assert found.scored == 100
    else:
        assert ends(found) == {("finished", None): 90, ("error", "environment"): 10}
        assert found.scored == 90
        assert found.scores.without == 10
    assert found.faults[0].cause == "environment"
    assert found.faults[0].episodes == 10
    if name in RAISED:  # and no call after it is disturbed
        assert len(found.faults) == 1
        assert "Hung" not in found.faults[0].error
    if name == "swallows":
        with Store.open(tmp_path / "run") as store:
            left = [fault.message for tape in store.tapes() for fault in tape.end.beside if fault.error is None]
        assert [f"Faulty.{place} " in text and "cancellation" in text for text in left] == [True] * 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["act", "aclose"])
@pytest.mark.parametrize("name", [*RAISED, *STUCK])
def test_a_fault_of_the_agent(tmp_path: Path, name: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    found = rolled(tmp_path, Player(place, (RAISED | STUCK)[name]), Faulty)
    if name in STUCK:  # at the limit of the agent's time an episode is scored
        assert ends(found) == {("finished", None): 90, ("limit", "agent_seconds"): 10}
        assert (found.scored, found.reward) == (100, 0.9)
        assert ("Player.act " in caplog.text) == (name == "swallows")
    else:
        assert ends(found) == {("finished", None): 90, ("error", "agent"): 10}
        assert found.scored == 90


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*RAISED, *STUCK])
def test_a_fault_of_a_tool(tmp_path: Path, name: str) -> None:
    env = type("Tools", (Tools,), {"fault": staticmethod((RAISED | STUCK)[name])})
    found = rolled(tmp_path, Player(tool=True), env, limits=LIMITS.model_copy(update={"environment_seconds": 20.0}))
    lost = {key: n for key, n in ends(found).items() if key != ("finished", None)}
    # The agent reads a tool's Exception as the tool's result. Its time is the agent's.
    assert sum(lost.values()) in ((10,) if name in STUCK else (0, 10))
    assert set(lost) <= {("limit", "agent_seconds") if name in STUCK else ("error", "environment")}


@pytest.mark.parametrize("name", ["SystemExit", "CancelledError", "Own", "Silent"])
def test_a_constructor_that_raises_for_some_episodes(tmp_path: Path, name: str) -> None:
    made = 0

    def factory() -> Faulty:
        nonlocal made
        made += 1
        if made > 1 and made % 10 == 0:
            coroutine: Any = RAISED[name]()
            coroutine.send(None)
        return Faulty()

    found = rolled(tmp_path, Player(), factory)
    assert ends(found) == {("finished", None): 90, ("error", "environment"): 10}


@pytest.mark.parametrize("place", ["constructor", "close"])
@pytest.mark.parametrize("how", ["hangs", "sleeps", "SystemExit", "Own"])
def test_loading_an_environment_is_bounded(monkeypatch: pytest.MonkeyPatch, place: str, how: str) -> None:
    if how not in RAISED:
        monkeypatch.setattr("tapereel.agents.setup.setup.LOAD_SECONDS", 0.3)
    release = threading.Event()

    def fault() -> None:
        if how in RAISED:
            raising: Any = RAISED[how]()
            raising.send(None)
        release.wait(60)

    class Stuck(Faulty):
        def __init__(self) -> None:
            if place == "constructor":
                fault()

        async def close(self) -> None:
            if place == "close":
                await asyncio.Event().wait() if how == "hangs" else fault()

    limit = {"environment_seconds": 0.4} if how not in RAISED else {}
    config = RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["7"]}, "limits": limit})
    seconds = {"constructor": r"\b0\.3 s", "close": r"\b0\.4 s \(limits.environment_seconds\)"}[place]
    with pytest.raises(UsageError, match=seconds if how not in RAISED else how):
        config.resolve(agent=Player(), env=Stuck, tasks=TASKS)
    release.set()


@pytest.mark.parametrize("name", ["SystemExit", "Own", "Silent"])
def test_an_agent_whose_constructor_raises_is_refused(name: str) -> None:
    def make() -> Player:
        raising: Any = RAISED[name]()
        raising.send(None)
        return Player()

    config = RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["7"]}})
    with pytest.raises(UsageError, match=f": {name}"):
        config.resolve(agent=make, env=Faulty, tasks=TASKS)


@pytest.mark.timeout(120)
def test_system_time_ends_an_episode_that_is_repeated(tmp_path: Path) -> None:
    seen: set[int] = set()

    class SlowOnce(Faulty):
        async def step(self, action: Any) -> Outcome:
            if self.k % 10 == 3 and self.k not in seen:
                seen.add(self.k)
                await asyncio.sleep(60)
            return await super().step(action)

    limits = Limits(agent_seconds=3.0, system_seconds=3.0)
    found = rolled(tmp_path, Player(), SlowOnce, limits=limits, retries=1)
    assert ends(found) == {("finished", None): 100, ("limit", "seconds"): 10}
    assert found.scored == 100


def test_a_blocked_event_loop_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tapereel.envs.loop_watch.STALL_SECONDS", 0.2)

    class Blocks(Faulty):
        async def step(self, action: Any) -> Outcome:
            if self.k == 3:
                time.sleep(1.0)  # noqa: ASYNC251
            return await super().step(action)

    rolled(tmp_path, Player(), Blocks)
    assert "blocked" in caplog.text
    assert f"{__file__}:" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["agent", "judge", "environment"])
def test_a_task_that_an_engine_leaves_is_not_that_of_an_agent_or_environment(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hosted engine's library may start a worker in the first call, which an agent or a judge makes."""
    workers: list[asyncio.Task[None]] = []

    class Forgets(Faulty):
        async def reset(self, task: Task) -> str:
            workers.append(asyncio.create_task(asyncio.sleep(600)))
            return await super().reset(task)

    class Leaves(ScriptedEngine):
        async def complete(self, request: Request) -> Completion:
            workers.append(asyncio.create_task(asyncio.sleep(600)))
            return Completion(text="Score: 1")

    quiet, leaves = ScriptedEngine(["7"]), Leaves([])
    judge = judge_reward(Judge(leaves), "Is it right?")
    env = {"agent": Faulty, "judge": rewarded(Faulty, Rewards([judge])), "environment": Forgets}[by]
    tape = run_async(rollout(Player(), env, TASKS[0], engine=leaves if by == "agent" else quiet))
    assert (tape.reward is not None, len(workers)) == (True, 1)
    assert ("<coroutine" in caplog.text) == (by == "environment")


RUDE = """
import asyncio, os, signal, subprocess, sys, threading, time
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Task

class Rude(Environment):
    async def reset(self, task):
        self.k = int(str(task.private))
        if self.k == 0:
            os.write(1, b"on descriptor 1")
            subprocess.run(["echo", "from a child"])
            sys.__stdout__.write("unflushed")
            os.chdir("/")
            threading.Thread(target=time.sleep, args=(600,), name="forgotten").start()
            asyncio.create_task(asyncio.sleep(600))
            signal.alarm(1)
        return "q"

    async def step(self, action):
        await asyncio.sleep(1.5 if self.k == 0 else 0)
        return Outcome(reward=1.0, terminated=True)

tasks = [Task(public=k, private=k) for k in range(20)]
"""


def command(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "tapereel.cli", "run", "--agent", f"{HERE}/faulty.py:player", *words, "--json"]
    for setting in ("engine.kind=scripted", f"engine.policy={HERE}/faulty.py:seven", "retries=0"):
        whole += ["--set", setting]
    return subprocess.run(whole, cwd=path, capture_output=True, text=True, timeout=120)


@pytest.mark.timeout(150)
def test_a_rude_environment_spoils_neither_the_answer_nor_the_end(tmp_path: Path) -> None:
    (tmp_path / "rude.py").write_text(RUDE)
    done = command(tmp_path, "--env", "rude.py:Rude", "--tasks", "rude.py:tasks", "--out", "here")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scored"] == 20
    assert (tmp_path / "here" / "config.yaml").exists()
    for said in ("on descriptor 1", "from a child", "unflushed", "SIGALRM", "<coroutine", "forgotten"):
        assert said in done.stderr


@pytest.mark.timeout(150)
def test_an_environment_in_a_process_of_its_own_may_exit(tmp_path: Path) -> None:
    done = command(
        tmp_path,
        "--env",
        f"{HERE}/faulty.py:Leaving",
        "--tasks",
        f"{HERE}/faulty.py:TASKS",
        "--set",
        "env_processes=4",
        "--set",
        "count=30",
        "--out",
        "run",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["scored"] == 24
    said = " ".join(fault["error"] for fault in found["faults"])
    assert "code 7" in said or "code -9" in said


def error_of(name: str) -> str:
    """The class that a tape names for this fault in another process or event loop."""
    if "group" in name:
        return "BaseExceptionGroup"
    stray = ("CancelledError", "a cancelled task", "cancels itself")
    other = {"StopIteration": "RuntimeError", "cancels itself late": "ValueError", "hangs": "Hung", "swallows": "Hung"}
    return "StrayCancellation" if name in stray else other.get(name, name)


async def meets(make: Any, place: str, names: Iterable[str]) -> None:
    for name in names:
        task = Task(public=0, private=f"{place}:{name}")
        tape = await rollout(Player(), make, task, engine=ScriptedEngine(["7"]))
        assert tape.end is not None
        told = tape.cause if place == "step" else tape.end.beside[0]
        assert told is not None, task
        assert (told.type, told.error) == ("environment", error_of(name)), told
        assert (tape.reward == 1.0) == (place == "close")


@pytest.mark.timeout(120)
def test_a_fault_in_a_process_is_the_answer_to_its_call() -> None:
    with Pool(f"{HERE}/faulty.py:Named", processes=1) as pool:
        for place in ("step", "close"):
            asyncio.run(meets(pool, place, RAISED))
        assert (pool.started, pool.killed) == (1, 0), "each fault leaves the process to the next episode"


@pytest.mark.timeout(120)
def test_a_fault_at_a_server_is_the_answer_to_its_call(caplog: pytest.LogCaptureFixture) -> None:
    async def served() -> None:
        async with Service(Named, limits=ServiceLimits(call_seconds=1.0)).serving() as service:
            for place, names in (("step", (*RAISED, *STUCK)), ("close", RAISED)):
                await meets(lambda: RemoteEnvironment(service.url, Named), place, names)
            for name in (*RAISED, *STUCK):  # the client leaves, and the server closes the environment
                session = service._begin()
                await session.carry_out(ResetCall(id=1, task=Task(private=f"close:{name}")))
                service._finish(session)
            await until(lambda: not service.occupied)

    asyncio.run(served())
    assert sum(" Named " in text for text in caplog.messages) == len(RAISED) + len(STUCK)


def test_the_share_without_a_result_stands_before_the_mean(tmp_path: Path) -> None:
    from tapereel.cli.score_lines import score_lines

    env: Callable[[], Any] = type("Half", (Faulty,), {"place": "step", "fault": staticmethod(RAISED["Own"])})
    lines = score_lines(rolled(tmp_path, Player(), env).scores)
    assert lines[0].startswith("10.0%")
    assert "(10 of 100)" in lines[0]
    assert lines[1].startswith("reward 1.000")
