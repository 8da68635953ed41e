"""The guard names the line of whatever an agent takes from outside the tape; what the door gives is given again."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import date, datetime
from pathlib import Path
from random import choice
from time import time as now_by_name
from typing import Any

import pytest
import yaml

from tapereel.agents import LLM, Agent, ScriptedEngine, rollout
from tapereel.agents.episode.guard import Guard, Nondeterministic, _own
from tapereel.agents.episode.watched import homes_of
from tapereel.agents.replay.replayer import replay
from tapereel.tapes import Answer, CauseType, Reasoning, Status, Tape
from tapereel.tapes.audit.verdict import Likely

from .worlds import Counting, Given, record

log = logging.getLogger("tests.guard")


class Uses(Agent):
    """Does something, and goes on as if nothing had happened."""

    name = "uses"

    def __init__(self, use: Callable[[], object], *, swallow: bool = False) -> None:
        self.use, self.swallow = use, swallow

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape)
        if tape.turns == 1:
            try:
                self.use()
            except Exception:
                if not self.swallow:
                    raise
        yield Answer(text=reply.text)


UNSEEDED = random.Random()
SEEDED = random.Random(5)


USES: dict[str, Callable[[], object]] = {
    "time.time": lambda: time.time(),
    "time.monotonic": lambda: time.monotonic(),
    "time.perf_counter": lambda: time.perf_counter(),
    "time.time ": lambda: now_by_name(),
    "datetime.now": lambda: datetime.now(),
    "time.localtime": lambda: time.localtime(),
    "time.gmtime": lambda: time.gmtime(),
    "time.ctime": lambda: time.ctime(),
    "time.asctime": lambda: time.asctime(),
    "time.strftime": lambda: time.strftime("%Y"),
    "loop.time": lambda: asyncio.get_running_loop().time(),
    "date.today": lambda: date.today(),
    "random.random": lambda: random.random(),
    "random.randint": lambda: random.randint(1, 6),
    "random.choice": lambda: choice("abc"),
    "random.Random()": lambda: random.Random(),
    "random.shuffle": lambda: random.SystemRandom().shuffle([1, 2]),
    "random.random ": lambda: UNSEEDED.random(),
    "random.uniform": lambda: UNSEEDED.uniform(0, 1),
    "open('/dev/urandom')": lambda: open("/dev/urandom", "rb").close(),
    "tempfile.mkdtemp": lambda: os.rmdir(tempfile.mkdtemp()),
    "tempfile.TemporaryDirectory": lambda: tempfile.TemporaryDirectory().cleanup(),
    "tempfile.NamedTemporaryFile": lambda: tempfile.NamedTemporaryFile().close(),
    "os.getrandom": lambda: os.getrandom(4),
    "secrets.randbelow": lambda: secrets.randbelow(4),
    "os.urandom": lambda: os.urandom(4),
    "secrets.token_hex": lambda: secrets.token_hex(4),
    "uuid.uuid4": lambda: uuid.uuid4(),
    "socket.getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
}


def play(agent: Agent, *, guard: bool = False) -> Tape:
    engine = ScriptedEngine(lambda request: f"word {len(request.messages)}")
    return asyncio.run(rollout(agent, Counting, 3, engine=engine, guard=guard))


@pytest.mark.unguarded
@pytest.mark.parametrize("what", USES)
def test_what_is_outside_the_tape_is_refused_and_its_line_is_named(what: str):
    use = USES[what]
    tape = play(Uses(use))
    assert tape.status is Status.FINISHED, "without a guard nobody asks"
    for swallow in (False, True):
        divergence = asyncio.run(replay(tape, Uses(use, swallow=swallow))).divergence
        assert divergence is not None
        assert (divergence.cause, divergence.field) == (Likely.NONDETERMINISM, what.strip())
        assert divergence.where is not None
        line = use.__code__.co_firstlineno  # type: ignore[attr-defined]
        assert divergence.where == f"{__file__}:{line} in <lambda>"
    assert asyncio.run(replay(tape, Uses(use), guard=False)).outcome == "verified"


def test_a_guarded_rollout_ends_with_the_agents_error():
    tape = play(Uses(USES["uuid.uuid4"]), guard=True)
    assert (tape.status, tape.turns) == (Status.ERROR, 1)
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.AGENT, "Nondeterministic")
    assert "llm.uuid(tape)" in (tape.cause.message or "")


@pytest.mark.parametrize(
    "harmless",
    [
        lambda: random.Random(7).random(),
        lambda: log.warning("a log line looks at the clock, and that is nobody's business"),
        lambda: datetime(2020, 1, 1),
        lambda: uuid.uuid5(uuid.NAMESPACE_DNS, "name"),
        lambda: time.strftime("%Y", time.gmtime(0)),
        lambda: (time.ctime(0), time.localtime(0), time.asctime(time.gmtime(0))),
        lambda: (SEEDED.random(), SEEDED.uniform(0, 1)),
        lambda: open(__file__).close(),
    ],
    ids=["seeded", "logging", "datetime", "uuid5", "gmtime", "given", "seeded before", "file"],
)
def test_what_is_the_same_every_time_is_allowed(harmless: Callable[[], object]):
    tape = play(Uses(harmless))
    assert asyncio.run(replay(tape, Uses(harmless))).outcome == "verified"


INSTALLED = """
import time

from installed_library import helps
from tapereel.agents import Agent
from tapereel.tapes import Answer


class Looks(Agent):
    name = "uses"

    async def act(self, tape, llm):
        reply = await llm(tape)
        if tape.turns == 1:
            {use}
        yield Answer(text=reply.text)
"""


@pytest.mark.unguarded
@pytest.mark.parametrize("package", [True, False])
def test_an_agent_is_watched_where_it_is_installed_and_a_library_beside_it_is_not(
    package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "installed_library.py").write_text("import time\n\n\ndef helps():\n    return time.time()\n")
    outcomes = []
    for name, use in (("installed_agent_1", "time.time()"), ("installed_agent_2", "helps()")):
        path = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(INSTALLED.format(use=use))
        sys.modules.pop(name, None)
        agent = importlib.import_module(name).Looks()
        outcomes.append(play(agent, guard=True))
        sys.modules.pop(name)
    sys.modules.pop("installed_library")
    looked, helped = outcomes
    assert looked.cause is not None
    assert (looked.cause.error, looked.turns) == ("Nondeterministic", 1)
    assert f"{path.parent.parent if package else path.parent}" in (looked.cause.message or "")
    assert helped.status is Status.FINISHED, helped.cause


def test_what_is_installed_inside_a_project_s_folder_is_not_the_project_s_own_code():
    file, folder = yaml.__file__, Path(yaml.__file__).parents[3]
    assert not _own(file, frozenset({f"{folder}/"}))
    assert _own(str(folder / "agent.py"), frozenset({f"{folder}/"}))
    assert _own(file, frozenset({f"{Path(file).parent}/"}))


def test_functions_and_sub_agents_that_an_agent_was_given_are_its_own_code():
    import attr  # stands for any installed package that gives a function
    import yaml

    agent = Uses(attr.evolve)
    assert any("/attr/" in home for home in homes_of(agent))
    outer = Uses(print)
    outer.inner = Uses(yaml.safe_load)  # type: ignore[attr-defined]
    assert any("/yaml/" in home for home in homes_of(outer))
    assert not any("/json/" in home or "/tapereel/" in home for home in homes_of(Uses(json.dumps)))


def test_environments_and_engines_may_do_as_they_like():
    class World(Counting):
        async def step(self, action: Any) -> Any:
            time.time()
            uuid.uuid4()
            return await super().step(action)

    def model(request: Any) -> str:
        return f"{random.random()} at {time.time()}"

    class Speaker(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            yield Answer(text=(await llm(tape)).text)

    tape = asyncio.run(rollout(Speaker(), World, 3, engine=ScriptedEngine(model), guard=True))
    assert tape.status is Status.FINISHED, tape.cause


def test_a_task_of_the_agents_own_is_the_agent_too():
    class Busy(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            async def think() -> float:
                return random.random()

            await asyncio.gather(think())
            yield Answer(text="x")

    tape = asyncio.run(rollout(Busy(), Counting, 2, guard=True))
    assert tape.cause is not None
    assert tape.cause.error == "Nondeterministic"


@pytest.mark.unguarded
def test_the_guard_costs_nothing_before_an_agent_acts_and_leaves_nothing_behind():
    before = sys.getprofile()
    with Guard() as outer:
        assert sys.getprofile() is before
        with Guard():
            play(Uses(lambda: None))
        assert sys.getprofile() is not before, "a task of the agent's may go on"
        assert time.time() > 0, "only agents are watched"
    assert sys.getprofile() is before
    assert outer.hits == []
    assert issubclass(Nondeterministic, RuntimeError)


LATE = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
from tapereel.agents.episode import guard
with guard.Guard():
    pass
sys.addaudithook(lambda *event, kept=(early, guard): None)
class Late:
    def __del__(self, open=open):
        open("/dev/null").close()
early.late = Late()
del Late, early, guard
"""
"""Opens a file when the guard's module has been taken apart."""


def test_a_process_that_had_a_guard_ends_without_a_word():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.unguarded
def test_two_agents_at_once_are_watched_apart():
    async def both() -> list[Tape]:
        engine = ScriptedEngine(lambda request: "x")
        return await asyncio.gather(
            rollout(Uses(USES["time.time"]), Counting, 3, engine=engine, guard=True),
            rollout(Uses(USES["time.time"]), Counting, 3, engine=engine),
            rollout(Uses(lambda: None), Counting, 3, engine=engine, guard=True),
        )

    assert [tape.status for tape in asyncio.run(both())] == [Status.ERROR, Status.FINISHED, Status.FINISHED]


def test_the_door_gives_time_chance_and_ids_again():
    tape = record("time and chance")
    again = asyncio.run(replay(tape, Given()))
    assert again.outcome == "verified", again
    thoughts = [str(step) for step in tape if isinstance(step, Reasoning)]
    times, ids = zip(*(text.split() for text in thoughts), strict=True)
    begun = tape.begin.at
    assert all(begun <= datetime.fromisoformat(text).timestamp() for text in times)
    assert sorted(times) == list(times)
    assert len(set(ids)) == len(ids)
    assert all(uuid.UUID(text).version == 4 for text in ids)
    other = record("time and chance", seed=8)
    assert str(other[1]).split()[1] != ids[0], "attempts of a group draw differently"


def test_the_doors_clock_moves_with_each_answer():
    seen: list[datetime] = []

    class Clock(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            seen.append(llm.now(tape))
            await llm(tape)
            seen.append(llm.now(tape))
            yield Answer(text="x")

    tape = asyncio.run(rollout(Clock(), Counting, 1, engine=ScriptedEngine(["a"])))
    assert [at.timestamp() for at in seen] == [
        pytest.approx(tape.entries[0].at, abs=1e-5),
        pytest.approx(tape.calls[0].at, abs=1e-5),
    ]
    assert seen[0].tzinfo is not None
