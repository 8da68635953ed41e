"""Weights over NCCL to several servers: one group, which is made again if servers fail, join or come back.

There is no GPU here and no vLLM. The servers, the requests to them and the store at which the group meets are real. A
broadcast goes over this store instead of NCCL: nobody has it before all have taken it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch._C._distributed_c10d import TCPStore

from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import Broadcast, RemoteEngine, fleet
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.transport.http_channel import free_port
from tapereel.agents.engines.weights import PublishFailed
from tapereel.agents.engines.weights import weight_transfer as transfer
from tapereel.envs.blocking import in_thread

from ....finetune.loop.lab import RENDERER
from ...faulty import Mortal, dropped
from ...served import servers as settings
from .test_fleet import until, up
from .test_remote import ask

pytestmark = pytest.mark.timeout(60)

WEIGHTS = {"a": torch.zeros(2), "b": torch.ones(3)}
INIT = "/init_weight_transfer_engine"


class Sender:
    """Rank 0 of a group."""

    def __init__(self, store: Any, size: int, sent: list[list[str]]) -> None:
        self.store, self.size, self.left, self.sent = store, size, threading.Event(), sent

    def broadcast(self, names: list[str]) -> None:
        self.sent.append(names)
        count = len(self.sent)
        self.store.set(f"names {count}", ",".join(names))
        while self.store.add(f"taken {count}", 0) < self.size - 1:
            if self.left.wait(0.005):
                raise RuntimeError("the group is left")
        self.store.set(f"all {count}", "")

    def destroy(self) -> None:
        self.left.set()


class Workers(Mortal):
    """A server whose workers take weights as vLLM's do: by the same routes, in the same order only."""

    def __init__(self, last: str = "", *, workers: int = 1, refuses: str = "", hangs: str = "") -> None:
        super().__init__(last)
        self.workers, self.refuses, self.hangs = workers, refuses, hangs
        self.groups: list[tuple[int, int, int]] = []
        """Rank offset, world size and port of each group."""
        self.received: list[str] = []
        self.store: Any = None
        self.active, self.taken = False, 0

    def restart(self) -> None:
        """Be a new process."""
        self.revive()
        self.store, self.active, self.taken = None, False, 0

    async def step(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.dead = self.dead or path == self.last
        if self.dead:
            self.store = None
            return await dropped(request, {})
        if path == self.hangs:
            await asyncio.Event().wait()
        wanted = {"/start_weight_update": False, "/update_weights": True, "/finish_weight_update": True}
        if path == self.refuses or self.active is not wanted.get(path, self.active):
            return web.Response(status=500, text="refused")
        if path == "/shutdown_weight_transfer_engine" and self.active:
            return web.Response(status=500, text="in an update")
        body = await request.json() if request.can_read_body else {}
        try:
            if path == INIT:
                await in_thread(self.join, body["init_info"])
            if path == "/update_weights":
                self.active = False
                self.received.append(await in_thread(self.take))
                assert self.received[-1] == ",".join(body["update_info"]["names"])
                self.active = True
        except Exception as error:
            return web.Response(status=500, text=str(error)[:200])
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.active = path == "/start_weight_update"
        return await super().step(request)

    def join(self, info: dict[str, Any]) -> None:
        self.groups.append((info["rank_offset"], info["world_size"], info["master_port"]))
        place = "127.0.0.1", info["master_port"], info["world_size"], False, timedelta(seconds=50)
        self.store, self.taken = [TCPStore(*place, use_libuv=False) for _ in range(self.workers)][-1], 0
        self.store.get("complete")

    def take(self) -> str:
        store: Any = self.store
        self.taken += 1
        names = store.get(f"names {self.taken}").decode()
        store.add(f"taken {self.taken}", self.workers)
        store.get(f"all {self.taken}")
        return names


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[list[str]]]:
    """For each group that is complete, the names of each broadcast."""
    found: list[list[list[str]]] = []

    def join(
        communicators: list[Sender], info: dict[str, Any], device: int, seconds: float, over: threading.Event
    ) -> None:
        size = info["world_size"]
        store = TCPStore("127.0.0.1", info["master_port"], size, True, timedelta(seconds=50), use_libuv=False)
        if over.is_set():
            raise RuntimeError("a server failed")
        store.set("complete", "")
        found.append([])
        communicators.append(Sender(store, size, found[-1]))

    def broadcast(pairs: list[tuple[str, Any]], communicators: list[Sender], device: int) -> None:
        communicators[0].broadcast([name for name, _ in pairs])

    monkeypatch.setattr(transfer, "sending_device", lambda: 0)
    monkeypatch.setattr(transfer, "_join", join)
    monkeypatch.setattr(transfer, "_broadcast", broadcast)
    monkeypatch.setattr(fleet, "LOOK_AGAIN", 0.02)
    return found


def using(found: list[Workers], test: Callable[[Any, list[str]], Awaitable[Any]], **options: Any) -> None:
    async def whole() -> None:
        async with up(*found) as urls:
            given = {"way": Broadcast(port=free_port("127.0.0.1"))} | options
            config = settings(*urls, **given)
            engine = await connect(config, RENDERER, weights=True)
            try:
                await test(engine, urls)
            finally:
                await engine.close()

    asyncio.run(whole())


async def versions(engine: RemoteEngine) -> list[tuple[str, str]]:
    """The servers that sample, with the version of their tokens."""
    found = [(url, (await sampler(ask())).spans) for url, sampler in engine.samplers.items()]
    return [(url, version) for url, spans in found for version, _, _ in spans]


def test_all_servers_are_one_group_and_each_weight_is_sent_once(sent: list[list[list[str]]], tmp_path: Path) -> None:
    first, second = Workers(workers=2), Workers()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        for k in (1, 2):
            await engine.sync_weights(WEIGHTS, f"run:{k}")
            assert await versions(engine) == [(url, f"run:{k}") for url in urls]

    using([first, second], test, weights_folder=tmp_path)
    ((_, _, port),) = first.groups
    assert (first.groups, second.groups) == ([(1, 4, port)], [(3, 4, port)])
    assert sent == [[["a", "b"], ["a", "b"]]]
    assert first.received == second.received == ["a,b", "a,b"]


@pytest.mark.parametrize("step", [INIT, "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_if_a_server_dies_in_a_sync_the_others_get_its_weights(step: str, tmp_path: Path) -> None:
    """At the same port in all groups, and long before the time limit."""
    wells, mortal = [Workers(), Workers(workers=2)], Workers(step)

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        # On a busy machine, a server may take more than SETTLE to let go of the group. It is left out, and comes back.
        await until(lambda: list(engine.samplers) == urls[:2])
        assert await versions(engine) == [(url, "run:1") for url in urls[:2]]

    using([*wells, mortal], test, weights_folder=tmp_path)


def test_the_group_is_made_again_if_a_server_leaves_or_joins(tmp_path: Path) -> None:
    wells, mortal = [Workers(), Workers(workers=2)], Workers()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        mortal.dead = True
        for version in ("run:2", "run:3"):
            await engine.sync_weights(WEIGHTS, version)
            assert await versions(engine) == [(url, version) for url in urls[:2]]
        mortal.restart()
        await until(lambda: len(engine.samplers) == 3)
        assert await versions(engine) == [(url, "run:3") for url in urls]
        await engine.sync_weights(WEIGHTS, "run:4")
        assert await versions(engine) == [(url, "run:4") for url in urls]

    using([*wells, mortal], test, weights_folder=tmp_path)
    groups = [[group[:2] for group in one.groups] for one in (*wells, mortal)]
    assert groups == [[(1, 5), (1, 4), (1, 5)], [(2, 5), (2, 4), (2, 5)], [(4, 5), (1, 2), (4, 5)]]


def test_a_server_that_takes_no_weights_by_nccl_does_not_keep_the_others_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    well, other = Workers(), Workers(refuses=INIT)

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        assert await versions(engine) == [(urls[0], "run:1")]
        assert urls[1] in caplog.text
        assert "serve model --nccl" in caplog.text
        await engine.sync_weights(WEIGHTS, "run:2")
        assert await versions(engine) == [(urls[0], "run:2")]

    using([well, other], test, weights_folder=tmp_path)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SETTLE", 0.5)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_is_left_out_at_the_time_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    well, stuck = Workers(), Workers(hangs="/update_weights")

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        assert await versions(engine) == [(urls[0], "run:1")]
        (told,) = {record.getMessage() for record in caplog.records if "left out" in record.getMessage()}
        for part in (urls[1], f"127.0.0.1:{well.groups[0][2]} ", " 0.5 s", "engine.weights.address"):
            assert part in told

    using([well, stuck], test, weights_folder=tmp_path, control_seconds=0.5)


@pytest.mark.usefixtures("impatient")
def test_if_all_servers_hang_the_sync_ends_at_the_time_limit(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        with pytest.raises(PublishFailed, match=rf"{urls[0]}.*127\.0\.0\.1:\d+ .*0\.5 s"):
            await engine.sync_weights(WEIGHTS, "run:1")

    using([Workers(hangs=INIT), Workers(hangs=INIT)], test, weights_folder=tmp_path, control_seconds=0.5)


def test_if_the_last_server_dies_the_run_stops_as_for_one_that_is_away(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        with pytest.raises(EngineStopped, match="'run:1'") as stopped:
            await engine.sync_weights(WEIGHTS, "run:1")
        assert stopped.value.reason == "away"

    using([Workers("/update_weights"), Workers("/start_weight_update")], test, weights_folder=tmp_path)


def test_a_server_that_was_restarted_since_the_last_sync_joins_again(tmp_path: Path) -> None:
    one, other = Workers(), Workers()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        one.restart()
        await engine.sync_weights(WEIGHTS, "run:2")
        assert await versions(engine) == [(url, "run:2") for url in urls]

    using([one, other], test, weights_folder=tmp_path)


def test_a_thread_that_ends_late_does_not_keep_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, late = Workers(), Workers(), list[Any]()

    async def in_late_thread(function: Any, *args: object) -> Any:
        late.append((function, args))
        return await in_thread(function, *args)

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        one.restart()
        await engine.sync_weights(WEIGHTS, "run:2")
        assert await versions(engine) == [(url, "run:2") for url in urls]

    monkeypatch.setattr(transfer, "in_thread", in_late_thread)
    using([one, other], test, weights_folder=tmp_path)


def test_a_closed_engine_has_left_its_port(tmp_path: Path) -> None:
    server, way = Workers(), Broadcast(port=free_port("127.0.0.1"))
    engines = list[RemoteEngine]()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        engines.append(engine)  # not yet collected as garbage when the next engine comes
        await engine.sync_weights(WEIGHTS, f"run:{len(engines)}")

    for k in range(2):
        using([server], test, weights_folder=tmp_path / str(k), way=way)
    assert [group[2] for group in server.groups] == [way.port, way.port]
