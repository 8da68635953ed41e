"""SGLang: what we send and read is what its published wheel takes and gives; the client against a server of that shape.

tests/contract/test_sglang.py runs the real server. `sglang_protocol.json` was read from the wheel by
tests/contract/sglang_protocol.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from aiohttp import web

from tapereel.agents import Completion, EngineError, Request
from tapereel.agents.engines.servers import RemoteEngine, SGLangGenerate, fleet
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.servers.sglang import ALL
from tapereel.agents.engines.weights import PublishFailed
from tapereel.agents.engines.weights.weight_sync import PublishMode
from tapereel.agents.setup import ServerConfig
from tapereel.finetune import LoopConfig
from tapereel.finetune.run import TrainerConfig
from tapereel.finetune.run.player_config import check_engine
from tapereel.tapes import Sampling

from ....finetune.loop.lab import RENDERER
from ...faulty import FaultyServer, listening
from ...served import servers
from .test_remote import using

pytestmark = pytest.mark.timeout(60)

PROTOCOL = json.loads(Path(__file__).with_name("sglang_protocol.json").read_text())
TAKES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/flush_cache": None,
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Route -> the class of its body."""
SEEDS = "enable_deterministic_inference"
WEIGHTS = {"w": torch.zeros(2)}


def ask(seed: int = 1, on_partial: Any = None, **sampling: Any) -> Request:
    messages = [{"role": "user", "content": "abcd"}]
    return Request(
        messages=messages,
        prompt=RENDERER.prompt(messages).ids,
        seed=seed,
        on_partial=on_partial,
        sampling=Sampling(**{"max_tokens": 5, **sampling}),
    )


class SGLangServer:
    """Answers in SGLang's shapes, and refuses every field and route that its wheel doesn't have."""

    def __init__(self, name_versions: bool = True) -> None:
        self.version = "default"
        self.model = "m"
        self.seeds: bool | None = None
        self.gone = self.paused = False
        self.name_versions = name_versions
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.broken = ""
        self.status = 400
        self.pending: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{route:.*}", self.about)
        app.router.add_post("/{route:.*}", self.asked)
        async with listening(app) as url:
            yield url

    def restart(self) -> None:
        self.gone, self.version, self.model = False, "default", "m"

    async def about(self, request: web.Request) -> web.Response:
        if self.gone:
            return web.Response(status=502)
        found = {
            "/server_info": {"version": "0.5.23"} | ({} if self.seeds is None else {SEEDS: self.seeds}),
            "/health": {},
            "/v1/models": {"data": [{"id": self.model, "root": self.model, "max_model_len": 64}]},
            "/model_info": {"weight_version": self.version},
        }
        if request.path not in found or request.path not in PROTOCOL["routes"]:
            return web.Response(status=404)
        return web.json_response(found[request.path])

    async def asked(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.gone:
            return web.Response(status=502)
        taken = taken_by(TAKES.get(request.path, "")) if request.path in PROTOCOL["routes"] else None
        if taken is None or not set(body) <= taken:
            return web.Response(status=400, text=f"{request.path} takes {taken}, not {set(body)}")
        if request.path == "/generate":
            while self.paused:  # noqa: ASYNC110  # it takes requests then, and begins none
                await asyncio.sleep(0.001)
            if not set(body["sampling_params"]) <= set(PROTOCOL["fields"]["SamplingParams"]):
                return web.Response(status=400, text=f"no such parameters: {body['sampling_params']}")
            return web.json_response(await self.generate(body))
        self.told.append((request.path, body))
        if request.path == self.broken:
            return web.json_response({"success": False, "message": "no such folder"}, status=self.status)
        self.paused = {"/pause_generation": True, "/continue_generation": False}.get(request.path, self.paused)
        self.model = body.get("model_path") or self.model
        self.version = body.get("weight_version") or body.get("new_version") or self.version
        if request.path == "/abort_request":
            self.pending.pop(body["rid"]).set()
        return web.json_response({"success": True, "message": ""})

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        count, finish = body["sampling_params"]["max_new_tokens"], "length"
        if body["sampling_params"]["sampling_seed"] == 99:
            event = self.pending[body["rid"]] = asyncio.Event()
            await event.wait()
            count, finish = 2, "abort"
        scale = 1.0 / body["sampling_params"]["temperature"]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, 8 + k % 4, None] for k in range(count)],
            "output_top_logprobs": [
                [[-0.5 - scale * 0.25 * k, k, None] for k in range(body.get("top_logprobs_num", 0))]
            ],
        }
        if self.name_versions:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": count}]
        answer = {"text": "", "output_ids": [8 + k % 4 for k in range(count)], "meta_info": meta}
        assert set(meta) <= set(PROTOCOL["meta_info"])
        assert set(answer) <= set(PROTOCOL["output"])
        return answer


def taken_by(name: str | None) -> set[str]:
    """The fields of a class and its base."""
    if name is None:
        return set()
    return set(PROTOCOL["fields"][name]) | (set() if name == "GenerateReqInput" else set(PROTOCOL["fields"]["BaseReq"]))


def test_what_we_send_and_read_is_in_the_wheel() -> None:
    assert PROTOCOL["wheel"].startswith("sglang-0.5.23-")
    dialect = SGLangGenerate()
    body = dialect.body(ask(), model="m", request_id="x", stops=(2,))
    assert set(body) <= taken_by("GenerateReqInput")
    assert set(body["sampling_params"]) <= set(PROTOCOL["fields"]["SamplingParams"])
    assert set(dialect.listing(body, 5)) <= taken_by("GenerateReqInput")
    assert ALL == 1 << 30
    assert {*TAKES, "/server_info", "/model_info", "/v1/models", "/health"} <= set(PROTOCOL["routes"])
    assert set(PROTOCOL["finish_reasons"]) == {"stop", "length", "abort"}
    assert "weight_version" in PROTOCOL["model_info"]
    modes = PROTOCOL["fields"]["PauseGenerationReqInput"]["mode"]
    assert all(f"'{mode}'" in modes for mode in ("abort", "retract", "in_place"))


def test_connecting_finds_out_what_it_is() -> None:
    async def test(engine: RemoteEngine) -> tuple[Any, Completion]:
        return engine.capabilities, await engine.complete(ask(temperature=0.5))

    capabilities, found = using(SGLangServer(), test)
    assert (capabilities.server, capabilities.route) == ("SGLang 0.5.23", "/generate")
    assert capabilities.logprobs == "processed"
    assert (capabilities.context, capabilities.versions, capabilities.takes_weights) == (64, True, True)
    assert found.ids is not None
    assert (list(found.ids), found.spans, found.finish) == ([8, 9, 10, 11, 8], (("default", 0, 5),), "length")


@pytest.mark.parametrize("mode", get_args(PublishMode))
def test_publishing_pauses_reloads_with_the_version_and_goes_on(mode: Any, tmp_path: Path) -> None:
    server = SGLangServer()

    async def test(engine: RemoteEngine) -> Completion:
        await engine.sync_weights({"w": torch.zeros(2)}, "run:1", mode)
        return await engine.complete(ask())

    if mode == "drain":
        with pytest.raises(PublishFailed, match=r"`pause`.*reprefill.*stale_kv"):
            using(server, test, weights_folder=tmp_path)
        return
    assert using(server, test, weights_folder=tmp_path).spans == (("run:1", 0, 5),)
    freed, pause, update, resume = server.told
    assert freed == ("/continue_generation", {})
    assert pause == ("/pause_generation", {"mode": {"reprefill": "retract", "stale_kv": "in_place"}.get(mode, mode)})
    assert update[0] == "/update_weights_from_disk"
    assert (update[1]["flush_cache"], update[1]["keep_pause"]) == (mode != "stale_kv", True)
    assert Path(update[1]["model_path"]).name == "run_1"
    assert resume[0] == "/continue_generation"


@pytest.mark.parametrize("status", [400, 200])
def test_weights_that_it_refuses_end_the_engine_and_its_pause(status: int, tmp_path: Path) -> None:
    server = SGLangServer()
    server.broken, server.status = "/update_weights_from_disk", status

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(PublishFailed, match=r"`finish`.*folder"):
            await engine.sync_weights({"w": torch.zeros(2)}, "run:1")
        with pytest.raises(EngineError, match="'run:1'"):
            await engine.complete(ask())

    using(server, test, weights_folder=tmp_path)
    assert server.told[-1][0] == "/continue_generation"


def test_a_server_that_a_dead_trainer_left_paused_is_freed() -> None:
    server = SGLangServer()
    server.paused, server.version = True, "run:7"

    async def test(engine: RemoteEngine) -> Completion:
        return await engine.complete(ask())

    assert using(server, test, seconds=30.0).spans == (("run:7", 0, 5),)
    assert not server.paused
    assert server.told == [("/continue_generation", {})]


def test_a_restarted_server_samples_again_although_the_others_have_renamed_their_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet, "LOOK_AGAIN", 0.02)
    well, mortal = SGLangServer(), SGLangServer()

    async def test() -> None:
        async with asyncio.timeout(50), well.up() as one, mortal.up() as other:
            config = servers(one, other, model=tmp_path, weights_folder=tmp_path / "weights")
            engine = await connect(config, RENDERER, weights=True)
            await engine.sync_weights(WEIGHTS, "run:1")
            assert engine.name == f"sglang:{tmp_path}"
            mortal.gone = True
            await engine.sync_weights(WEIGHTS, "run:2")
            assert list(engine.samplers) == [one]
            mortal.restart()
            while len(engine.samplers) < 2:  # noqa: ASYNC110  # the other side of a real connection
                await asyncio.sleep(0.01)
            for sampler in engine.samplers.values():
                assert (await sampler(ask())).spans == (("run:2", 0, 5),)
            await engine.close()
            mortal.restart()
            engine = await connect(config, RENDERER, weights=True)  # as a resumed run does
            await engine.sync_weights(WEIGHTS, "run:3")
            assert (engine.name, list(engine.samplers)) == (f"sglang:{tmp_path}", [one, other])
            await engine.close()

    asyncio.run(test())


@pytest.mark.parametrize("flag", [False, True, None])
def test_a_server_that_ignores_seeds_is_named(flag: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    server = SGLangServer()
    server.seeds = flag

    async def test(engine: RemoteEngine) -> bool:
        return engine.capabilities.seeds

    assert using(server, test) is (flag is not False)
    assert ("--enable-deterministic-inference" in caplog.text) is (flag is False)


@pytest.mark.parametrize(
    ("version", "folder", "named"),
    [
        ("run:7", "served", True),
        ("default", "other", True),
        ("default", "link", False),
        ("default", "elsewhere", False),  # a path on the server's machine
    ],
)
@pytest.mark.parametrize("weights", [False, True])
def test_a_server_with_other_weights_is_named_unless_it_gets_new_ones(
    version: str, folder: str, named: bool, weights: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, server = tmp_path / "served", SGLangServer()
    model.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(model)
    server.version, server.model = version, str(tmp_path / folder)
    using(server, lambda engine: engine.complete(ask()), model=model, weights=weights)
    assert (f"engine.model is {model}" in caplog.text) is (named and not weights)


def test_a_vllm_server_with_the_weights_of_an_earlier_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = FaultyServer()
    using(server, lambda engine: engine.complete(ask()), weights=False)
    assert not caplog.text
    server.version = "run:7"
    using(server, lambda engine: engine.complete(ask()), weights=False)
    assert "'run:7'" in caplog.text


def test_drain_is_refused_where_the_configuration_is_read() -> None:
    engine = ServerConfig(kind="sglang", model="m", urls=("http://127.0.0.1:1",))
    with pytest.raises(ValueError, match=r"loop\.in_flight=drain.*loop\.in_flight=reprefill"):
        check_engine(engine, TrainerConfig(), LoopConfig(in_flight="drain"))
    check_engine(engine, TrainerConfig(), LoopConfig())


def test_a_cancelled_request_leaves_what_was_sampled() -> None:
    server, partial = SGLangServer(), []

    async def test(engine: RemoteEngine) -> None:
        asked = asyncio.create_task(engine.complete(ask(99, partial.append)))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    using(server, test)
    (left,) = partial
    assert (len(left.ids), left.finish) == (2, "cancelled")


def test_sleeping_uses_its_routes() -> None:
    server = SGLangServer()

    async def test(engine: RemoteEngine) -> None:
        await engine.sleep()
        await engine.wake()

    using(server, test)
    routes = [route for route, _ in server.told[1:]]
    assert routes[0] == "/release_memory_occupation"
    assert routes[-1] == "/resume_memory_occupation"


def test_scores_of_given_tokens_are_not_claimed() -> None:
    async def test(engine: RemoteEngine) -> None:
        assert "score" not in engine.can

    using(SGLangServer(), test)


def test_other_ways_to_publish_are_refused() -> None:
    with pytest.raises(ValueError, match=r"transfer.*weights=reload"):
        ServerConfig(kind="sglang", model="m", urls=("http://127.0.0.1:1",), weights="transfer")
    with pytest.raises(EngineError, match=r"engine\.weights=reload.*'transfer'"):
        using(SGLangServer(), lambda engine: engine.complete(ask()), way="transfer")


def test_a_server_of_another_kind_is_refused() -> None:
    class Other(SGLangServer):
        async def about(self, request: web.Request) -> web.Response:
            return web.Response(status=404)

    with pytest.raises(EngineError, match=r"engine\.kind=litellm"):
        using(Other(), lambda engine: engine.complete(ask()))
