"""The embedded engine over HTTP: the same tests as against vLLM, and what is its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Completion
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.embedded import EngineServer
from tapereel.agents.engines.servers import Generate, RemoteEngine
from tapereel.agents.engines.servers.connect import connect, probe
from tapereel.agents.engines.transport import Server, ServerFailed
from tapereel.agents.engines.weights import VLLMReload
from tapereel.agents.engines.weights.weight_files import write_weights
from tapereel.tapes.store import Store

from ....finetune.loop.lab import RENDERER, WORDS, assert_books_close, history_in, loop_in, settings_of, tasks
from ...embedded_lab import worst
from ...served import CLOSE, CONTEXT, Heard, Runs, Served, Test, ask, long_one, servers, swap

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    Served.policy(0).save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


def with_server(test: Callable[[EngineServer], Awaitable[Any]], **options: Any) -> Any:
    """What `test` gives with a server of `policy(0)`."""

    async def whole() -> Any:
        async with EngineServer(Served.policy(0), "micro", **options).serving() as server:
            return await test(server)

    return asyncio.run(whole())


class TestEmbedded(Served):
    """Everything that holds of vLLM."""

    @pytest.fixture
    def runs(self, folder: Path, tmp_path: Path) -> Runs:
        def run(test: Test) -> Any:
            async def with_engine(server: EngineServer) -> Any:
                config = servers(server.url, model=folder, weights_folder=tmp_path)
                engine = await connect(config, RENDERER, weights=True)
                try:
                    return await test(engine)
                finally:
                    await engine.close()

            return with_server(with_engine)

        return run

    @pytest.mark.ledger("F15", "T29")
    def test_no_prompt_is_read_with_the_cache_of_older_weights(self, runs: Runs) -> None:
        super().test_no_prompt_is_read_with_the_cache_of_older_weights(runs)

    @pytest.mark.ledger("T29")
    def test_a_publish_that_fails_is_told_and_nothing_is_sampled_after_it(self, runs: Runs) -> None:
        super().test_a_publish_that_fails_is_told_and_nothing_is_sampled_after_it(runs)

    def test_stale_kv_gives_log_probs_of_no_model(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            versions, answers = await swap(
                engine, self.policy, "stale_kv", 1, lambda completion, _: len(completion.spans) >= 2
            )
            errors = [
                self.off(1, request, completion, start, end)
                for request, completion in answers
                for version, start, end in completion.spans
                if version in versions and start
            ]
            assert max(errors) > 1e-2

        runs(test)

    def test_the_loop_trains_with_it(self, runs: Runs, tmp_path: Path) -> None:
        config = settings_of(updates=2, groups=2, group_size=4, max_lag=1)
        path = tmp_path / "run"

        async def test(engine: RemoteEngine) -> None:
            with Store.create(path, durability="os") as store:
                history = history_in(store, path, config, policy=self.policy(0))
                await engine.sync_weights(history.model.state_dict(), history.version)
                await loop_in(history, config, engine=engine, tasks=tasks(1)).run()

        runs(test)
        assert_books_close(path)


def test_the_probe_tells_what_it_can_do() -> None:
    async def test(server: EngineServer) -> None:
        here = Server(server.url)
        dialect, found = await probe(here, RENDERER)
        await here.close()
        assert isinstance(dialect, Generate)
        assert (found.context, found.logprobs) == (CONTEXT, "processed")
        assert (found.versions, found.takes_weights) == (True, True)
        assert found.server.startswith("vLLM tapereel")

    with_server(test)


@pytest.mark.ledger("T29")
def test_weights_take_their_place_with_their_version_and_never_half(folder: Path, tmp_path: Path) -> None:
    """Between the two steps nothing is sampled, and a folder that isn't complete isn't there."""
    write_weights(Served.policy(1).state_dict(), tmp_path / "w", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]

    async def test(server: EngineServer) -> None:
        here = Server(server.url)
        sync = VLLMReload(here, seconds=30.0)
        with pytest.raises(ServerFailed, match="/pause"):
            await sync.update(tmp_path / "w")
        await sync.pause("reprefill")
        await sync.update(tmp_path / "w")
        with pytest.raises(ServerFailed, match="/update_weight_version"):
            await sync.resume()
        await sync.finish("new", "reprefill")
        await sync.resume()
        for wrong in (tmp_path / "nowhere", tmp_path):
            await sync.pause("reprefill")
            with pytest.raises(ServerFailed, match=r"\*\.safetensors"):
                await sync.update(wrong)
        await sync.abandon("unknown")
        assert await here.get("/weight_info") == {"weight_version": "unknown"}
        assert await here.get("/is_paused") == {"is_paused": False}
        await here.close()

    with_server(test)


def test_while_paused_requests_wait_or_are_sent_away() -> None:
    async def test(server: EngineServer) -> None:
        here = Server(server.url)

        async def generate(k: int) -> Any:
            body = Generate().body(ask(max_tokens=4), model="", request_id=str(k), stops=())
            return await here.post(Generate.route, body)

        for mode in ("wait", "abort"):
            await here.post("/pause", params={"mode": mode})
            with pytest.raises(ServerFailed, match="paused") as caught:
                await generate(0)
            assert caught.value.busy
            await here.post("/resume")
        await here.post("/pause", params={"mode": "keep"})
        asked = asyncio.create_task(generate(1))
        while not server._under_way:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.engine.stats.sampled == 0
        await here.post("/resume")
        assert (await asked)["choices"][0]["finish_reason"] in ("stop", "length")
        await here.close()

    with_server(test)


def test_an_abort_ends_what_is_under_way_and_what_has_not_begun() -> None:
    async def test(server: EngineServer) -> None:
        here = Server(server.url)
        body = Generate().body(long_one(3, length=500), model="", request_id="a", stops=())
        asked = asyncio.create_task(here.post(Generate.route, body))
        while server.engine.stats.sampled < 5:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        await here.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a", "generate-tokens-b"]})
        found = Generate().parse(await asked)
        assert found.finish == "abort"
        assert 5 <= len(found.ids) < 500
        assert worst(Served.policy(0), long_one(3), _completion(found)) < CLOSE
        await here.close()

    with_server(test)


def test_a_model_that_fails_in_the_midst_of_a_stream_ends_it_with_the_error() -> None:
    async def test(server: EngineServer) -> None:
        engine = await connect(servers(server.url), RENDERER)
        heard = Heard()
        asked = asyncio.create_task(engine.complete(replace(long_one(3, length=1500), listener=heard)))
        await heard.begun.wait()
        weights = Served.policy(0).state_dict()
        await server.engine.sync_weights(
            weights | {"model.norm.weight": weights["model.norm.weight"] * math.nan}, "broken"
        )
        with pytest.raises(ServerFailed, match=r"500.*'broken'") as caught:
            await asked
        assert caught.value.retry
        assert heard.ids
        await engine.close()

    with_server(test)


def _completion(found: Any) -> Any:
    return Completion(text="", ids=found.ids, logprobs=found.logprobs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"repetition_penalty": "high"}, "repetition_penalty is .high."),
        ({"return_tokn_ids": True}, "return_tokn_ids"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 2}, "n = 2"),
    ],
)
def test_what_it_cannot_do_is_refused_never_ignored(change: dict[str, Any], match: str) -> None:
    async def test(server: EngineServer) -> None:
        here = Server(server.url)
        body = Generate().body(ask(), model="", request_id="a", stops=())
        body["sampling_params"] |= change
        with pytest.raises(ServerFailed, match=match) as caught:
            await here.post(Generate.route, body)
        assert caught.value.status == 400
        for wrong, why in (
            ({"token_ids": []}, "token_ids"),
            ({"model": "x"}, "'x'"),
            ({"sampling_params": None}, "sampling_params"),
        ):
            with pytest.raises(ServerFailed, match=why):
                await here.post(Generate.route, Generate().body(ask(), model="", request_id="a", stops=()) | wrong)
        await here.close()

    with_server(test)


def test_the_token_opens_every_route_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "mellon-4242-mellon")

    async def test(server: EngineServer) -> None:
        monkeypatch.setenv("OTHER_KEY", "mellon-4242-melloN")
        right, wrong, none = (Server(server.url, key_variable=key) for key in ("SOME_KEY", "OTHER_KEY", None))
        assert await right.get("/weight_info") == {"weight_version": "default"}
        for route in ("/health", "/weight_info", "/v1/models"):
            for server_ in (wrong, none):
                with pytest.raises(ServerFailed, match="401"):
                    await server_.get(route)
        for route in ("/pause", "/resume", "/collective_rpc", "/update_weight_version", Generate.route):
            with pytest.raises(ServerFailed, match="401"):
                await none.post(route, {})
        for one in (right, wrong, none):
            await one.close()

    with_server(test, token="mellon-4242-mellon")


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[Any]:
    """`tapereel serve model` in a process of its own, and what it printed."""
    command = [sys.executable, "-m", "tapereel.cli", "serve", "model", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        with process.stdout as printed:
            yield json.loads(printed.readline())
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_the_serve_verb_serves_it_and_takes_it_down(folder: Path) -> None:
    async def complete(url: str) -> Any:
        engine = await connect(servers(url, model=folder, patience=2.0), RENDERER)
        try:
            return await engine.complete(ask(max_tokens=4))
        finally:
            await engine.close()

    with serving(str(folder), "--engine", "embedded", "--port", "0") as told:
        found = asyncio.run(complete(told["url"]))
        assert worst(Served.policy(0), ask(max_tokens=4), found) < CLOSE
    with pytest.raises(EngineStopped, match="Cannot connect"):
        asyncio.run(complete(told["url"]))
