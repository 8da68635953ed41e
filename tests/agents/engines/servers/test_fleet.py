"""Servers of one engine that fail, come back, join and leave."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from pydantic import ValidationError

from tapereel.agents import EngineError, Request
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import RemoteEngine, fleet
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.servers.server_config import addresses
from tapereel.agents.engines.weights import PublishFailed
from tapereel.cli import main
from tapereel.tapes.errors import UsageError

from ....cli.lab import SCENE, settings
from ....finetune.loop.lab import RENDERER
from ...faulty import FaultyServer, Mortal
from ...served import servers
from .test_remote import ask
from .test_servers import adapted

pytestmark = pytest.mark.timeout(60)

WEIGHTS = {"w": torch.zeros(2)}
STEPS = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


def conversations(n: int) -> list[Request]:
    return [replace(ask(seed=k), cache_key=f"conversation {k}") for k in range(n)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LOOK_AGAIN", 0.02)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  # the other side of a real connection
        await asyncio.sleep(0.01)


@asynccontextmanager
async def up(*found: FaultyServer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack, asyncio.timeout(50):
        yield [await stack.enter_async_context(server.up()) for server in found]


USED = (("path", None), ("weights", True), ("named", None))


def using(found: list[FaultyServer], test: Callable[[Any, list[str]], Awaitable[Any]], **options: Any) -> None:
    """Run `test` with an engine of those servers and their addresses. With `path`, they are lines of that file."""

    async def whole() -> None:
        async with up(*found) as urls:
            path, weights, named = (options.pop(name, other) for name, other in USED)
            config = servers(*urls, **options)
            if path is not None:
                path.write_text("".join(f"{url}\n" for url in urls[:named]))
                config = config.model_copy(update={"urls": f"file:{path}"})
            engine = await connect(config, RENDERER, weights=weights)
            try:
                await test(engine, urls)
            finally:
                await engine.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("way", "step"),
    [
        *(("reload", step) for step in STEPS),
        ("transfer", "/update_weights"),
        ("transfer", "/resume"),
        ("lora", "/v1/load_lora_adapter"),
    ],
)
def test_a_server_that_dies_in_a_weight_sync_samples_again_with_the_newest_weights(
    way: str, step: str, tmp_path: Path
) -> None:
    well, mortal = FaultyServer(), Mortal(step)
    weights = adapted().state_dict() if way == "lora" else WEIGHTS

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await asyncio.gather(*map(engine.complete, conversations(4)))
        assert len(mortal.asked) == 2
        await engine.sync_weights(weights, "run:1")
        assert list(engine.samplers) == urls[:1]
        for request in conversations(4):  # two of them were at home at the mortal
            assert {version for version, _, _ in (await engine.complete(request)).spans} == {"run:1"}
        await engine.sync_weights(weights, "run:2")
        assert len(mortal.asked) == 2
        mortal.revive()
        await until(lambda: len(engine.samplers) == 2)
        for sampler in engine.samplers.values():
            assert {version for version, _, _ in (await sampler(ask())).spans} == {"run:2"}
        assert mortal.version == ("default" if way == "lora" else "run:2")
        await engine.sync_weights(weights, "run:3")
        assert len(engine.samplers) == 2

    using([well, mortal], test, way=way, weights_folder=tmp_path)


def test_a_server_that_refuses_new_weights_is_left_out_and_freed(tmp_path: Path) -> None:
    well, full = FaultyServer(), FaultyServer()
    full.broken_step = "/collective_rpc"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        assert list(engine.samplers) == urls[:1]
        full.broken_step = ""
        await until(lambda: len(engine.samplers) == 2)
        assert full.version == "run:1"

    using([well, full], test, weights_folder=tmp_path)


def test_if_all_servers_fail_the_weights_are_unknown(tmp_path: Path) -> None:
    both = [FaultyServer(), FaultyServer()]
    both[0].broken_step, both[1].broken_step = "/collective_rpc", "/reset_prefix_cache"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        with pytest.raises(PublishFailed, match="memory"):
            await engine.sync_weights(WEIGHTS, "run:1")
        assert [server.control[-1] for server in both] == ["/resume", "/resume"], "nobody stays paused"
        with pytest.raises(EngineError, match="'run:1'"):
            await engine.complete(ask())

    using(both, test, weights_folder=tmp_path)


@pytest.mark.parametrize("way", ["reload", "lora"])
def test_if_the_last_server_dies_in_a_sync_the_run_stops_as_for_one_that_is_away(way: str, tmp_path: Path) -> None:
    step = "/v1/load_lora_adapter" if way == "lora" else "/collective_rpc"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        with pytest.raises(EngineStopped, match="'run:1'") as stopped:
            await engine.sync_weights(adapted().state_dict() if way == "lora" else WEIGHTS, "run:1")
        assert stopped.value.reason == "away"

    using([Mortal(step), Mortal(step)], test, way=way, weights_folder=tmp_path)


@pytest.mark.parametrize("way", ["reload", "lora"])
def test_a_sync_needs_one_server_and_waits_for_it(way: str, tmp_path: Path) -> None:
    both, weights = [Mortal(), Mortal()], adapted().state_dict() if way == "lora" else WEIGHTS

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        both[0].dead = both[1].dead = True
        with pytest.raises(EngineStopped, match=r"^http://127\.0\.0\.1:\d+ .*weights") as stopped:
            await engine.sync_weights(weights, "run:1")
        assert stopped.value.reason == "away"
        asyncio.get_running_loop().call_later(0.3, setattr, both[1], "dead", False)
        await engine.sync_weights(weights, "run:1")
        assert list(engine.samplers) == urls[1:]
        assert engine.version == "run:1"

    using(both, test, way=way, weights_folder=tmp_path, patience=1.0)


def test_what_was_asked_of_a_server_that_is_left_out_is_asked_elsewhere(tmp_path: Path) -> None:
    well, mortal = FaultyServer(), Mortal("/pause")

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        mortal.faults = [mortal.hang, mortal.hang]
        asked = [asyncio.create_task(engine.complete(request)) for request in conversations(4)]
        await until(lambda: len(mortal.pending) == 2)
        await engine.sync_weights(WEIGHTS, "run:1")
        found = await asyncio.gather(*asked)
        assert [len(one.ids or ()) for one in found] == [5] * 4
        assert len(well.asked) == 4

    using([well, mortal], test, weights_folder=tmp_path)


def test_a_sampler_whose_server_dies_fails_at_once_and_is_left_out(tmp_path: Path) -> None:
    """The check of new weights asks each server. It must not wait for one that has died since."""
    well, mortal = FaultyServer(), Mortal()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        sampler, mortal.dead = engine.samplers[urls[1]], True
        with pytest.raises(EngineError, match=re.escape(urls[1])):
            await sampler(ask())
        assert list(engine.samplers) == urls[:1]

    using([well, mortal], test, weights_folder=tmp_path, patience=100.0)


class Forgetful(FaultyServer):
    """Answers 404 for adapters that it doesn't have, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = set[str]()

    async def step(self, request: web.Request) -> web.StreamResponse:
        answer = await super().step(request)
        route, body = self.told[-1]
        if "lora" in route:
            (self.adapters.add if "/load" in route else self.adapters.discard)(body["lora_name"])
        return answer

    async def generate(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["model"]
        if name.startswith("run:") and name not in self.adapters:
            return web.json_response({"message": f"The model {name} does not exist."}, status=404)
        return await super().generate(request)


def test_a_server_that_was_restarted_gets_the_adapter_again_once(tmp_path: Path) -> None:
    server = Forgetful()

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        for version in ("run:1", "run:2"):
            await engine.sync_weights(adapted().state_dict(), version)
        server.adapters.clear()
        for one in await asyncio.gather(*map(engine.complete, conversations(5))):
            assert {version for version, _, _ in one.spans} == {"run:2"}
        assert [body["lora_name"] for route, body in server.told if "/load" in route] == ["run:1", "run:2", "run:2"]

    using([server], test, way="lora", weights_folder=tmp_path)


@pytest.mark.parametrize("way", ["reload", "lora"])
def test_servers_join_and_leave_by_a_file(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, path = FaultyServer(), FaultyServer(), tmp_path / "servers.txt"
    weights = adapted().state_dict() if way == "lora" else WEIGHTS

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(weights, "run:1")
        path.write_text(f"# two nodes\n{urls[0]}\n\n  {urls[1]}/  \n")
        await until(lambda: list(engine.samplers) == urls)
        for sampler in engine.samplers.values():
            assert {version for version, _, _ in (await sampler(ask())).spans} == {"run:1"}
        first.faults = [first.hang]
        asked = asyncio.create_task(engine.samplers[urls[0]](ask()))
        await until(lambda: first.pending)
        path.write_text(f"{urls[1]}\n")
        await until(lambda: list(engine.samplers) == urls[1:])
        first.pending.popitem()[1].set()
        assert len((await asked).ids or ()) == 2, "a request in flight at a server that leaves may end"
        for text, says in (("", "names no server"), ("# none\n", "names no server"), ("nowhere\n", "'nowhere'")):
            path.write_text(text)
            await until(lambda says=says: says in caplog.text)
            assert list(engine.samplers) == urls[1:], "a file that is wrong changes nothing"
        assert caplog.text.count("names no server") == 1, "the same thing is told once"

    using([first, second], test, way=way, weights_folder=tmp_path / "weights", path=path, named=1)


class Odd(FaultyServer):
    """Answers a route with this value, or lists it as the log-probs of its first token."""

    def __init__(self, route: str, value: object) -> None:
        super().__init__()
        self.route, self.value = route, value

    async def about(self, request: web.Request) -> web.StreamResponse:
        return await super().about(request) if request.path != self.route else web.json_response(self.value)

    def answer(self, body: dict[str, Any], *rest: Any) -> dict[str, Any]:
        answer = super().answer(body, *rest)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] if self.route == "listed" else ():
            entry["logprob"] = self.value
        return answer


ODD_LINES = [
    *(
        "http://",
        "https://",
        "http:///v1",
        "http://:8000",
        "http://a b",
        "http://a\tb:1",
        "http://a:0",
        "http://a:99999",
    ),
    *("http://a:abc", "http://a:-1", "http://a:", "http://a:1,http://b:2", "http://a,b:1", "http://a:1 http://b:2"),
    *("http://node-1..cluster:8000", f"http://{'a' * 64}:1", f"http://{'a.' * 100}b:1", "http://.a", "http://[::1"),
    *("http://[::g]:1", "http://::1:8000", "http://a?b=1", "http://a#b", "http://a\\b", "http://<a>", "http://%41"),
    *("http://é..de", "http://a\x00b", "HTTP://a", "ftp://a", "a:8000", "//a:8000", "file:servers.txt", "http://a;b"),
]


def odd_servers() -> list[FaultyServer]:
    models = [{"data": [{"id": ["m"]}]}, {"data": [{"id": "m", "max_model_len": "64"}]}, []]
    odd = [Odd("listed", "-1"), Odd("listed", None), Odd("listed", {}), *(Odd("/v1/models", value) for value in models)]
    return [*odd, Odd("/version", {"version": {"a": 1}}), Odd("/version", None), Odd("/weight_info", [1])]


def test_an_engine_begins_with_the_servers_of_a_file_that_can_take_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        assert list(engine.samplers) == [urls[0], urls[-1]]
        assert [url for url in urls[1:-1] if url not in caplog.text] == []

    using([FaultyServer(), *odd_servers(), FaultyServer()], test, path=tmp_path / "servers.txt")


def test_whatever_joins_is_left_out_by_name_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "servers.txt"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        path.write_text("\n".join([*ODD_LINES[-10:], *urls]))
        await until(lambda: list(engine.samplers) == [urls[0], urls[-1]])
        assert [url for url in urls[1:-1] if url not in caplog.text] == []
        assert "line 5: 'HTTP://a'" in caplog.text
        path.write_text("\n".join([ODD_LINES[0], urls[-1]]))
        await until(lambda: "line 1: 'http://'" in caplog.text)
        await engine.sync_weights(WEIGHTS, "run:2")
        assert list(engine.samplers) == [urls[0], urls[-1]], "nobody leaves while the file is wrong"
        for sampler in engine.samplers.values():
            assert len((await sampler(ask())).ids or ()) == 5

    using(
        [FaultyServer(), *odd_servers(), FaultyServer()], test, weights_folder=tmp_path / "weights", path=path, named=1
    )


def test_an_odd_address_is_named_by_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "servers.txt"
    for line in ODD_LINES:
        with pytest.raises(ValidationError) as refused:
            servers("http://a", line)
        (error,) = refused.value.errors()
        assert error["loc"] == ("urls", "list", 1), line
        if not {"\x00", "\t"} & set(line):
            path.write_text(f"# none\n{line}")
            with pytest.raises(UsageError, match=re.escape(named := f"{path}: line 2: {line!r:.100}"[:-1])):
                addresses(f"file:{path}")
            path.write_text(f"http://a\n{line}")
            assert addresses(f"file:{path}") == ("http://a",)
            assert named in caplog.messages[-1]
    fine = (
        "http://a",
        "http://a:1/",
        "https://a.b-c_d.e.:65535/v1",
        "http://[::1]:8000",
        "http://1.2.3.4",
        "http://é.de",
    )
    assert servers(*fine).urls == fine
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="isn't a file"):
        addresses(f"file:{tmp_path / 'pipe'}")


def test_a_run_that_trains_nothing_takes_servers_with_the_same_weights_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, same, other, path = FaultyServer(), FaultyServer(), FaultyServer(), tmp_path / "servers.txt"
    other.version = "another"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        path.write_text("\n".join(urls))
        await until(lambda: list(engine.samplers) == urls[:2] and "'another'" in caplog.text)
        assert urls[2] in caplog.text
        other.version = "default"
        await until(lambda: list(engine.samplers) == urls)

    using([first, same, other], test, weights=False, path=path, named=1)


def test_a_run_begins_with_the_servers_of_the_file_that_answer(tmp_path: Path) -> None:
    there, late, path = FaultyServer(), Mortal(dead=True), tmp_path / "servers.txt"

    async def test(engine: RemoteEngine, urls: list[str]) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        assert list(engine.samplers) == urls[:1]
        late.revive()
        await until(lambda: list(engine.samplers) == urls)
        assert late.version == "run:1"

    using([there, late], test, weights_folder=tmp_path / "weights", path=path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "can't be read"),
        ("", "names no server"),
        ("# http://127.0.0.1:1\n", "names no server"),
        ("http://127.0.0.1:1\nnode-2:8000\n", "line 2: 'node-2:8000'"),
        ("http://me:sesame@127.0.0.1:1\n", "line 1"),
    ],
)
def test_a_file_of_addresses_that_is_wrong_is_refused_before_a_model_is_loaded(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "servers.txt"
    if text is not None:
        path.write_text(text)
    (tmp_path / "config.json").write_text("{}")
    given = settings("engine.kind=vllm", f"engine.model={tmp_path}", f"engine.urls=file:{path}")
    assert main(["run", *SCENE, *given, "--out", str(tmp_path / "run")]) == 64
    told = capsys.readouterr().err
    assert says in told
    assert str(path) in told
    assert "sesame" not in told


@pytest.mark.parametrize("urls", ["file:", "http://127.0.0.1:1"])
def test_urls_are_a_list_or_a_file(urls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings("engine.kind=vllm", "engine.model=m", f'engine.urls="{urls}"')
    assert main(["run", *SCENE, *given, "--out", str(tmp_path / "run")]) == 64
    assert "file:PATH" in capsys.readouterr().err
