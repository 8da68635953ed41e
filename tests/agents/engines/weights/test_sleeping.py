"""Servers that give their memory away and take it back: one state machine, whatever is asked of it how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents import EngineError
from tapereel.agents.engines.servers import RemoteEngine
from tapereel.agents.engines.servers.sglang import SGLangWeights
from tapereel.agents.engines.transport import Server, ServerFailed
from tapereel.agents.engines.weights.sleeping import Part, Sleeper

from ...faulty import FaultyServer
from ..servers.test_remote import ask, using

pytestmark = pytest.mark.timeout(60)


class Counted:
    """A server that notes what it is asked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.broken = ""

    async def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.broken:
            raise ServerFailed(f"{what} failed", retry=True, status=500)

    async def release(self) -> None:
        await self._note("release")

    async def clear(self) -> None:
        await self._note("clear")

    async def restore(self, part: Part) -> None:
        await self._note(part)


async def down_and_up(machine: Sleeper) -> None:
    await machine.sleep()
    await machine.wake()


def sleeper() -> tuple[Sleeper, Counted, list[str]]:
    log: list[str] = []
    server = Counted(log)
    return Sleeper(lambda: [server], clear_own=lambda: log.append("clear own")), server, log


@pytest.mark.ledger("F14")
def test_sleep_and_wake_are_idempotent_and_waking_clears_caches_first() -> None:
    machine, _, log = sleeper()

    async def test() -> None:
        await machine.wake()
        assert log == [], "awake already"
        for _ in range(3):
            await machine.sleep()
        assert (machine.state, log) == ("asleep", ["release"])
        log.clear()
        for _ in range(3):
            await machine.weights()
        assert (machine.state, log) == ("weights", ["clear own", "clear", "weights"])
        log.clear()
        for _ in range(3):
            await machine.wake()
        assert (machine.state, log) == ("awake", ["clear own", "clear", "kv_cache"])

    asyncio.run(test())


@pytest.mark.ledger("F14")
@settings(max_examples=60)
@given(st.lists(st.sampled_from(["sleep", "weights", "wake"]), max_size=12), st.booleans())
def test_whatever_is_asked_at_once_or_in_turn_nothing_is_restored_that_was_not_released(
    calls: list[str], at_once: bool
) -> None:
    machine, _, log = sleeper()

    async def test() -> None:
        if at_once:
            await asyncio.gather(*(getattr(machine, call)() for call in calls))
        else:
            for call in calls:
                await getattr(machine, call)()
        await machine.wake()

    asyncio.run(test())
    held = {"weights", "kv_cache"}
    for step in log:
        if step == "release":
            assert held, "released twice"
            held = set()
        elif step in ("weights", "kv_cache"):
            assert step not in held, "restored twice"
            assert step == "weights" or "weights" in held, "weights come first"
            held.add(step)
    assert held == {"weights", "kv_cache"}


@pytest.mark.parametrize("broken", ["release", "clear", "weights", "kv_cache"])
def test_a_step_that_failed_leaves_the_state_unknown_and_the_next_call_goes_through_all(broken: str) -> None:
    machine, server, log = sleeper()

    async def test() -> None:
        server.broken = broken
        with pytest.raises(ServerFailed, match="failed"):
            await down_and_up(machine)
        assert machine.state == "unknown"
        server.broken = ""
        log.clear()
        await machine.wake()
        assert machine.state == "awake"
        assert [step for step in log if step in ("weights", "kv_cache")] == ["weights", "kv_cache"]

    asyncio.run(test())


@pytest.mark.ledger("F14")
def test_an_engine_that_sleeps_samples_nothing_and_takes_weights(tmp_path: Path) -> None:
    server = FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        for _ in range(2):
            await engine.sleep()
        assert server.told == [("/sleep", {"level": "1"})]
        with pytest.raises(EngineError, match="asleep"):
            await engine.complete(ask())
        assert server.asked == []
        server.told.clear()
        await engine.sync_weights({"w": torch.zeros(2)}, "run:1")
        assert server.told[:2] == [("/reset_prefix_cache", {}), ("/wake_up", {"tags": "weights"})]
        assert [route for route, _ in server.told[2:]] == [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
        ]
        with pytest.raises(EngineError, match=r"weights.*engine\.wake\(\)"):
            await engine.complete(ask())
        server.told.clear()
        for _ in range(2):
            await engine.wake()
        assert server.told == [("/reset_prefix_cache", {}), ("/wake_up", {"tags": "kv_cache"})]
        assert (await engine.complete(ask())).spans == (("run:1", 0, 5),)
        assert engine.stats.timers["sleep"] > 0
        assert engine.stats.timers["wake"] > 0

    using(server, test, weights_folder=tmp_path)


def test_sglang_lets_go_of_kv_and_graphs_and_keeps_its_weights() -> None:
    asked: list[tuple[str, Any]] = []

    class Noted(Server):
        async def post(self, route: str, body: Any = None, **more: Any) -> Any:
            asked.append((route, body))

    async def test() -> list[tuple[str, Any]]:
        machine = Sleeper(lambda: [SGLangWeights(Noted("http://127.0.0.1:1"))], clear_own=lambda: None)
        await machine.sleep()
        await machine.wake()
        return [(route, (body or {}).get("tags")) for route, body in asked]

    assert asyncio.run(test()) == [
        ("/release_memory_occupation", ["kv_cache", "cuda_graph"]),
        ("/flush_cache", None),
        ("/flush_cache", None),
        ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]
