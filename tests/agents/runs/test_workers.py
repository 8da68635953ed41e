"""Episodes in workers have the same tapes as in this process, and a lost worker costs nothing but time."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, EpisodeSpec, Limits, Request
from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
from tapereel.agents.engines.embedded.pretrained import load_pretrained
from tapereel.agents.engines.engine import EngineError, EngineStopped
from tapereel.agents.engines.scripted import ScriptedEngine
from tapereel.agents.gateway import Program
from tapereel.agents.runs import remote_attempts
from tapereel.agents.runs.attempts import LocalAttempts
from tapereel.agents.setup.engine_config import EmbeddedConfig
from tapereel.agents.setup.setup import load_agent, load_env
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Observation, Sampling, Status, Tape, Task
from tapereel.tapes.store.store import Store

from ...recorded.worlds import WORLDS
from .crew import crew

TIMES = ("at", "tape", "worker", "seconds", "agent_seconds", "queued", "cached_tokens")
COMMAND = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
messages = [{"role": "user", "content": sys.stdin.read()}]
messages.append({"role": "assistant", "content": ask(messages)})
messages.append({"role": "user", "content": "4"})
print(ask(messages))
"""


def program() -> Program:
    return Program([sys.executable, "-c", COMMAND])


def engine_of(folder: Path) -> EmbeddedEngine:
    found = load_pretrained(str(folder), device="cpu")
    renderer = EmbeddedConfig(model=str(folder)).renderer.make(found.tokenizer, found.vision, found.ends)
    return EmbeddedEngine(found.model, renderer, version="v:0", slots=1, copy=False)


def told(tape: Tape) -> list[Any]:
    """The tape's records without ids, times and the worker."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items() if key not in TIMES}
        if isinstance(value, list):
            return [plain(part) for part in value]
        return value.replace(tape.id, "T") if isinstance(value, str) else value

    return [plain(json.loads(body)) for body in [*tape.bodies, *(layer.body() for layer in tape.layers)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            WORLDS[name].save_model(str(made[name]))
        return made[name]

    return model


SPEC = EpisodeSpec(task=Task.of("12"), seed=3, env_seed=4, sampling=Sampling(max_tokens=6), limits=Limits(turns=3))
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "text": ("text", WORLDS["text"].agent, {}),
    "tools": ("tools", WORLDS["tools"].agent, {}),
    "pictures": ("pictures", WORLDS["pictures"].agent, {"task": Task.of("2"), "sampling": Sampling(max_tokens=3)}),
    "program": ("text", program, {}),
    "limit": ("text", WORLDS["text"].agent, {"limits": Limits(turns=1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_episode_in_a_worker_has_the_same_tape_as_here(
    case: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    world, agent, changes = CASES[case]
    env = WORLDS[world].env
    spec = SPEC.model_copy(update=changes)

    async def both() -> tuple[Tape, Tape]:
        with Store.create(tmp_path / "run") as store:
            engine = engine_of(models(world))
            here = await LocalAttempts(load_agent(agent), load_env(env)).run(spec, engine, store.writer)
            attempts, _ = crew(agent, env, model=models(world))
            there = await attempts.run(spec, engine, store.writer)
            await attempts.close()
            kept = store.tape(there.id)
            assert (kept.digest, told(kept)) == (there.digest, told(there))
            if case == "text":
                fork = spec.model_copy(update={"fork": here.at_turn(1), "seed": 9})
                parts = [await one.run(fork, engine, store.writer) for one in (attempts, _here(agent, env))]
                assert told(parts[0]) == told(parts[1])
                await attempts.close()
            return here, there

    here, there = asyncio.run(both())
    assert told(there) == told(here)
    assert here.calls
    assert (here.begin.worker, there.begin.worker) == (None, "worker-0")


def _here(agent: Any, env: Any) -> LocalAttempts:
    return LocalAttempts(load_agent(agent), load_env(env))


class Asking(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Answer(text=(await llm(tape, max_tokens=4)).text)


class Shown(Observation, kind="wk_shown"):
    text: str


class Paying(Environment[Answer]):
    """Three payments. Each is on the disk before it is made."""

    effect = "irreversible"
    paid: list[str] = []  # noqa: RUF012
    hold: asyncio.Event | None = None

    async def reset(self, task: object) -> Shown:
        self.left = 3
        return Shown(text="1")

    async def step(self, action: Answer) -> Outcome:
        Paying.paid.append(action.text)
        if Paying.hold is not None:
            await Paying.hold.wait()
        self.left -= 1
        return Outcome(Shown(text="1"), reward=1.0) if self.left else Outcome(reward=1.0, terminated=True)


def test_an_irreversible_action_is_durable_before_it_is_carried_out(tmp_path: Path) -> None:
    """The run directory is read while the worker carries the action out."""

    async def run() -> None:
        Paying.paid, Paying.hold = [], asyncio.Event()
        with Store.create(tmp_path / "run") as store:
            attempts, handles = crew(Asking, Paying, own=True)
            going = asyncio.ensure_future(attempts.run(SPEC, ScriptedEngine(["a"]), store.writer))
            await _until(lambda: bool(Paying.paid))
            with Store.open(tmp_path / "run") as reader:
                (seen,) = reader.summaries()
                assert (seen.actions, seen.status) == (1, None)
            handles["worker-0"].kill()
            tape = await going
            await attempts.close()
            assert (tape.status, tape.trains, Paying.paid, attempts.lost) == (Status.CRASHED, False, ["a"], 0)
            assert tape.cause is not None
            assert "a person must check" in str(tape.cause.message)
            Paying.hold = None
            whole = await attempts.run(SPEC, ScriptedEngine(["a"]), store.writer)
            await attempts.close()
            assert (whole.status, len(whole), len(Paying.paid)) == (Status.FINISHED, 6, 4)

    asyncio.run(run())


class Held(ScriptedEngine):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(["a"])
        self.go, self.asked = asyncio.Event(), 0

    async def complete(self, request: Request) -> Any:
        self.asked += 1
        await self.go.wait()
        return await super().complete(request)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_attempts, "BEAT", 0.05)
    monkeypatch.setattr(remote_attempts, "SILENT", 0.3)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Silent(Environment[Answer]):
    async def reset(self, task: object) -> Shown:
        return Shown(text="1")

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


def test_the_episodes_of_a_dead_worker_are_made_again_with_the_same_seeds(quick: None, tmp_path: Path) -> None:
    async def run() -> None:
        with Store.create(tmp_path / "run") as store:
            attempts, handles = crew(Asking, Silent, own=True)
            attempts._lends, engine = True, Held()
            going = [asyncio.ensure_future(attempts.run(SPEC, engine, store.writer)) for _ in range(4)]
            await _until(lambda: engine.asked == 4)
            handles["worker-0"].kill()
            await _until(lambda: engine.asked == 6)
            engine.go.set()
            tapes = await asyncio.gather(*going)
            await attempts.close()
            assert [tape.status for tape in tapes] == [Status.FINISHED] * 4
            assert {(tape.begin.seed, tape.begin.env_seed) for tape in tapes} == {(3, 4)}
            assert attempts.notes == ("2 attempts were lost with a worker and made again with the same seeds",)
            assert len(store.summaries()) == 4  # nothing of the lost ones

    asyncio.run(run())


def test_a_tape_that_comes_after_its_episode_was_made_again_is_stored_and_not_returned(
    quick: None, tmp_path: Path
) -> None:
    async def run() -> None:
        with Store.create(tmp_path / "run") as store:
            attempts, handles = crew(Asking, Silent, own=True)
            handles["worker-0"].asleep.clear()
            tape = await attempts.run(SPEC, ScriptedEngine(["a"]), store.writer)
            assert tape.begin.worker == "worker-1"
            handles["worker-0"].asleep.set()
            await _until(lambda: attempts.late == 1)
            await asyncio.sleep(0.1)
            await attempts.close()
            assert {one.id for one in store.summaries(closed=True)} > {tape.id}
            assert (attempts.lost, len(store.summaries(closed=True))) == (1, 2)

    asyncio.run(run())


def test_an_episode_that_always_ends_its_worker_ends_with_an_error(quick: None, tmp_path: Path) -> None:
    async def run() -> None:
        with Store.create(tmp_path / "run") as store:
            attempts, handles = crew(Asking, Silent, own=True, workers=1)
            attempts._lends, engine = True, Held()
            going = asyncio.ensure_future(attempts.run(SPEC, engine, store.writer))
            for asked in range(1, 4):
                await _until(lambda asked=asked: engine.asked == asked)
                handles["worker-0"].kill()
            tape = await going
            await attempts.close()
            assert tape.status is Status.ERROR
            assert tape.cause is not None
            assert "3 workers were lost" in str(tape.cause.message)

    asyncio.run(run())


def test_a_cancelled_episode_is_closed_as_cancelled_with_the_tokens_so_far(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        with Store.create(tmp_path / "run") as store:
            engine = engine_of(models("text"))
            attempts, _ = crew(WORLDS["text"].agent, WORLDS["text"].env, model=models("text"))
            spec = SPEC.model_copy(update={"sampling": Sampling(max_tokens=1000, ignore_eos=True)})
            going = asyncio.ensure_future(attempts.run(spec, engine, store.writer))
            await _until(lambda: engine.stats.busy_seconds > 0)
            await asyncio.sleep(0.05)
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
            await attempts.close()
            store.writer.sync()
            (tape,) = store.tapes(closed=True)
            assert tape.status is Status.CANCELLED
            assert [call.finish for call in tape.calls] == ["cancelled"]
            assert tape.calls[0].completion

    asyncio.run(run())


def test_an_engine_that_stops_the_run_stops_it_from_a_worker_too(tmp_path: Path) -> None:
    class Stops(ScriptedEngine):
        async def complete(self, request: Request) -> Any:
            raise EngineStopped("the key was refused", "key")

    async def run() -> None:
        with Store.create(tmp_path / "run") as store:
            attempts, _ = crew(Asking, Silent, own=True)
            attempts._lends = True
            with pytest.raises(EngineStopped, match="refused") as caught:
                await attempts.run(SPEC, Stops([]), store.writer)
            await attempts.close()
            assert caught.value.reason == "key"
            (tape,) = store.tapes(closed=True)
            assert tape.status is Status.ERROR

    asyncio.run(run())


@pytest.mark.parametrize("error", [EngineError("busy", retry=True), EngineStopped("no money", "budget")])
def test_an_error_of_an_engine_survives_pickle(error: EngineError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
