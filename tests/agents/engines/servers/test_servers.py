"""Engines of servers beyond one request: ways to take weights, versions that nobody names, health and timers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from tapereel.agents import EngineError
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.engines.servers import Broadcast, LocalServer, RemoteEngine
from tapereel.agents.engines.servers.connect import DIFFERENT, connect
from tapereel.agents.engines.servers.health import Wellness
from tapereel.agents.engines.servers.launch import flags_of, lora_flags
from tapereel.agents.engines.servers.lora_servers import AdapterEngine, adapters_in, write_adapter
from tapereel.agents.engines.transport import Server
from tapereel.agents.engines.weights import AdapterConfig, PublishFailed, add_adapters
from tapereel.agents.engines.weights.weight_transfer import port_at, update_info, worker_infos
from tapereel.agents.setup import ServerConfig
from tapereel.cli import main
from tapereel.tapes import MissingExtra

from ....finetune.loop.lab import RENDERER, WORDS
from ...faulty import FaultyServer, Mortal, dropped, status
from ...served import servers as settings
from .test_remote import ask

pytestmark = pytest.mark.timeout(60)

WEIGHTS = {"w": torch.zeros(2)}
STEPS = ("pause", "start", "update", "finish", "resume")
ADAPTERS = AdapterConfig(rank=2, alpha=4)


def using(servers: list[FaultyServer], test: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """What `test` gives with an engine of those servers."""

    async def whole() -> Any:
        async with asyncio.timeout(50):
            ups = [server.up() for server in servers]
            urls = [await up.__aenter__() for up in ups]
            try:
                engine = await connect(settings(*urls, **options), RENDERER, weights=True)
                try:
                    return await test(engine)
                finally:
                    await engine.close()
            finally:
                for up in ups:
                    await up.__aexit__(None, None, None)

    return asyncio.run(whole())


def adapted(seed: int = 0) -> Any:
    return add_adapters(tiny_model(WORDS, "micro", context=64), ADAPTERS, seed=seed)


# -- transfer -----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("X9")
def test_transfer_starts_updates_and_finishes_with_the_version(tmp_path: Path) -> None:
    server = FaultyServer()

    async def test(engine: RemoteEngine) -> Any:
        await engine.sync_weights(WEIGHTS, "run:1")
        return await engine.complete(ask())

    assert using([server], test, way="transfer", weights_folder=tmp_path).spans == (("run:1", 0, 5),)
    assert server.told == [
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/pause", {"mode": "keep", "clear_cache": "true"}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"folder": str(tmp_path / "run_1")}}),
        ("/reset_prefix_cache", {}),
        ("/finish_weight_update", {"weight_version": "run:1"}),
        ("/resume", {}),
    ]


def test_a_transfer_that_failed_ends_the_engine(tmp_path: Path) -> None:
    server = FaultyServer()
    server.broken_step = "/update_weights"

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(PublishFailed, match=r"`update`.*memory"):
            await engine.sync_weights(WEIGHTS, "run:1")
        with pytest.raises(EngineError, match="'run:1'"):
            await engine.complete(ask())

    using([server], test, way="transfer", weights_folder=tmp_path)
    assert server.control[-3:] == ["/pause", "/finish_weight_update", "/resume"]
    assert server.version == "unknown: publishing run:1 failed"


def test_what_is_said_over_nccl() -> None:
    common = {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 8, "packed": True}
    assert worker_infos(address="10.0.0.1", port=29500, workers=(4, 1, 2)) == [
        {**common, "rank_offset": 1},
        {**common, "rank_offset": 5},
        {**common, "rank_offset": 6},
    ]
    with pytest.raises(ValueError, match="0 workers"):
        worker_infos(address="10.0.0.1", port=1, workers=[2, 0])
    state = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(4))]
    assert update_info(state) == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}


def test_nccl_is_a_setting_of_vllm_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the first call of CUDA, which needs a GPU here and there."""
    given: dict[str, Any] = {"model": "m", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
    config = ServerConfig.model_validate(
        {**given, "weights": {"kind": "broadcast", "address": "10.0.0.1", "port": 29500}}
    )
    assert config.weights == Broadcast(address="10.0.0.1", port=29500)
    assert ServerConfig.model_validate({**given, "weights": "broadcast"}).weights == Broadcast()
    with pytest.raises(ValueError, match="port"):
        ServerConfig.model_validate({**given, "weights": {"kind": "reload", "port": 29500}})
    ServerConfig.model_validate({**given, "weights": {"kind": "broadcast", "port": 65535}})  # the only port
    with pytest.raises(ValueError, match=r"broadcast.*weights=transfer"):
        ServerConfig.model_validate({"model": "m", "weights": "broadcast"})
    assert main(["serve", "model", str(tmp_path), "--nccl", "--transfer"]) == 64
    assert re.search("--nccl .*--transfer .*--no-weights", capsys.readouterr().err)
    with pytest.raises(ValueError, match=r"broadcast.*weights=reload"):
        ServerConfig.model_validate({**given, "kind": "sglang", "weights": "broadcast"})


def test_the_workers_come_to_one_port_of_this_machine() -> None:
    assert port_at("127.0.0.1", 29500) == 29500
    assert 0 < port_at("127.0.0.1", None) <= 65535
    with pytest.raises(EngineError, match=r"engine\.weights\.address='192\.0\.2\.1'"):
        port_at("192.0.2.1", 29500)


def test_without_vllm_or_a_gpu_nothing_is_connected_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(engine: Any) -> None:
        raise AssertionError("it was connected")

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"NCCL.*tapereel\[vllm\]"):
        using([FaultyServer()], never, way="nccl")
    for name in (
        "vllm",
        "vllm.distributed",
        "vllm.distributed.weight_transfer",
        "vllm.distributed.weight_transfer.nccl_common",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"engine\.weights=broadcast.*engine\.weights=reload"):
        using([FaultyServer()], never, way="nccl")


def test_the_first_connection_waits_for_a_server() -> None:
    server = Mortal(dead=True)

    async def test() -> None:
        async with server.up() as url:
            with pytest.raises(EngineStopped) as stopped:
                await connect(settings(url, patience=0.5), RENDERER)
            assert stopped.value.reason == "away"
            asyncio.get_running_loop().call_later(0.5, setattr, server, "dead", False)
            await (await connect(settings(url, patience=30.0), RENDERER)).close()

    asyncio.run(test())


def test_a_server_of_this_run_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer([dropped] * 1000)
    monkeypatch.setattr(Server, "ended", lambda self: "vLLM ended with exit code 9")

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(EngineStopped, match="code 9"):
            await engine.complete(ask())
        assert len(server.asked) == 1

    using([server], test, patience=600.0)


def test_a_server_with_foreign_weights_that_this_engine_cannot_replace_stops_the_run() -> None:
    server = FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        server.version = "somebody's"
        with pytest.raises(EngineStopped, match=r"somebody's.*'default'") as stopped:
            await engine.complete(ask("a"))
        assert stopped.value.reason == "model"

    using([server], test)


@pytest.mark.parametrize(("way", "begun"), [("reload", False), ("transfer", True), ("transfer", False)])
def test_a_server_that_a_dead_trainer_left_paused_is_freed(way: str, begun: bool) -> None:
    class Paused(FaultyServer):
        """A trainer died when it had paused it, or later."""

        paused = True

        async def about(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/is_paused":
                return web.json_response({"is_paused": self.paused})
            return await super().about(request)

        async def step(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/resume":
                self.paused = False
            if request.path == "/finish_weight_update" and not begun and self.control[-1] != "/start_weight_update":
                self.control.append(request.path)
                return web.Response(status=500, text="finish_weight_update called without a matching start")
            return await super().step(request)

    server = Paused()

    async def test(engine: RemoteEngine) -> None:
        assert engine.version == "unknown: the server was found paused"
        assert not server.paused

    using([server], test, way=way)
    named = {"reload": ["/update_weight_version"], "transfer": ["/finish_weight_update"]}[way]
    named += ["/start_weight_update", *named] if way == "transfer" and not begun else []
    assert server.control[: len(named) + 4] == ["/pause", "/wake_up", "/pause", *named, "/resume"]
    server.paused = True
    with pytest.raises(EngineError, match=r"adapters.*'unknown: "):
        using([server], test, way="lora")


def test_servers_with_different_weights_are_connected_for_training_alone() -> None:
    ahead, anew = FaultyServer(), FaultyServer()
    ahead.version = "run:7"

    async def test(engine: RemoteEngine) -> None:
        assert engine.version == DIFFERENT
        with pytest.raises(EngineError, match=re.escape(repr(DIFFERENT))):
            await engine.complete(ask())
        await engine.sync_weights(WEIGHTS, "run:7")
        assert (await engine.complete(ask())).spans == (("run:7", 0, 5),)
        assert (ahead.version, anew.version) == ("run:7", "run:7")

    using([ahead, anew], test)
    ahead.version, anew.version = "run:7", "default"
    with pytest.raises(EngineError, match=r"\['default', 'run:7'\]"):
        using([ahead, anew], test, way="lora")


# -- adapters -----------------------------------------------------------------------------------------------------


def test_adapters_are_the_same_for_a_seed_change_nothing_at_first_and_alone_are_trained() -> None:
    plain, model = tiny_model(WORDS, "micro", context=64), adapted(1)
    ids = torch.tensor([[8, 9, 10]])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    again, other = adapted(1).state_dict(), adapted(2).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in again.items())


def test_an_adapter_on_disk_is_one_that_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    write_adapter(model.state_dict(), tmp_path / "a", ADAPTERS, Path("base"))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found: Any = PeftModel.from_pretrained(tiny_model(WORDS, "micro", context=64), str(tmp_path / "a"))
    ids = torch.tensor([[8, 9, 10]])
    torch.testing.assert_close(found(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"lora_A\.weight"):
        adapters_in(WEIGHTS)


def test_each_version_is_an_adapter_and_those_that_nobody_uses_are_unloaded(tmp_path: Path) -> None:
    server = FaultyServer()

    async def test(engine: AdapterEngine) -> None:
        for version in ("run:1", "run:2"):
            await engine.sync_weights(adapted().state_dict(), version)
        assert server.control == ["/v1/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
        server.faults = [server.hang]
        asked = asyncio.create_task(engine.complete(ask()))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        await engine.sync_weights(adapted().state_dict(), "run:3")
        assert server.control[3:] == ["/v1/load_lora_adapter"], "run:2 is in use"
        server.pending.popitem()[1].set()
        assert (await asked).spans == (("run:2", 0, 2),)
        assert (await engine.complete(ask())).spans == (("run:3", 0, 5),)
        assert [body["model"] for body in server.asked] == ["run:2", "run:3"]
        await engine.sync_weights(adapted().state_dict(), "run:4")
        unloaded = [body["lora_name"] for route, body in server.told if "unload" in route]
        assert unloaded == ["run:1", "run:2", "run:3"]
        server.version = "somebody's"
        with pytest.raises(EngineError, match=r"somebody's.*'default'"):
            await engine.complete(ask())

    using([server], test, way="lora", weights_folder=tmp_path)


def test_an_adapter_that_one_server_refuses_is_taken_back_from_the_others(tmp_path: Path) -> None:
    well, ill = FaultyServer(), FaultyServer()

    async def test(engine: AdapterEngine) -> None:
        await engine.sync_weights(adapted().state_dict(), "run:1")
        ill.broken_step = "/v1/load_lora_adapter"
        with pytest.raises(PublishFailed, match=r"'run:1'.*--lora 2"):
            await engine.sync_weights(adapted().state_dict(), "run:2")
        assert well.told[-1] == ("/v1/unload_lora_adapter", {"lora_name": "run:2"})
        assert (await engine.complete(ask())).spans == (("run:1", 0, 5),)

    using([well, ill], test, way="lora", weights_folder=tmp_path)


def test_a_rank_that_vllm_does_not_take_is_refused_and_another_is_rounded_up() -> None:
    assert lora_flags(4)[:3] == ["--enable-lora", "--max-lora-rank", "8"]
    with pytest.raises(ValueError, match=r"1000.*512"):
        lora_flags(1000)
    assert flags_of({"max_model_len": 8192, "enforce_eager": True, "swap": None, "lora": False, "cuts": [1, 2]}) == [
        "--max-model-len",
        "8192",
        "--enforce-eager",
        "--no-lora",
        "--cuts",
        "[1, 2]",
    ]
    command = LocalServer("m", transfer=True, lora_rank=9).command
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "tapereel"}
    with pytest.raises(ValueError, match=r"transfer.*control=False"):
        LocalServer("m", transfer=True, control=False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_an_interpreter_without_vllm_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tapereel\[vllm\].*--python"):
        asyncio.run(LocalServer(tmp_path).start())


def test_a_cpu_build_reads_prompts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    whole = "--no-enable-chunked-prefill"
    assert whole in LocalServer("m", environment={"VLLM_TARGET_DEVICE": "cpu"}).command
    assert whole not in LocalServer("m", environment={"VLLM_TARGET_DEVICE": "cuda"}).command
    command = LocalServer("m", environment={"VLLM_TARGET_DEVICE": "cpu"}, options=["--enable-chunked-prefill"]).command
    assert command.index(whole) < command.index("--enable-chunked-prefill"), "who says otherwise is obeyed"


# -- versions that nobody names -----------------------------------------------------------------------------------


class Silent(FaultyServer):
    """Doesn't say which weights sampled what, and answers to a request when told to."""

    def answer(self, body: dict[str, Any], length: int = 5, finish: str = "length") -> dict[str, Any]:
        answer = super().answer(body, length, finish)
        del answer["choices"][0]["weight_versions"]
        return answer

    async def step(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/resume" and self.pending:
            self.pending.popitem()[1].set()
            await asyncio.sleep(0.05)  # the answer overtakes the end of the publish
        return await super().step(request)


@pytest.mark.parametrize(("mode", "known"), [("reprefill", False), ("drain", True)])
def test_answers_of_a_silent_server_in_the_middle_of_a_publish(mode: Any, known: bool, tmp_path: Path) -> None:
    server = Silent()

    async def test(engine: RemoteEngine) -> None:
        server.faults = [server.hang]
        asked = asyncio.create_task(engine.complete(ask()))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        await engine.sync_weights(WEIGHTS, "run:1", mode)
        if known:
            assert (await asked).spans == (("default", 0, 2),)
        else:
            with pytest.raises(EngineError, match=r"--enable-scale-out.*drain"):
                await asked
        assert (await engine.complete(ask())).spans == (("run:1", 0, 5),)

    using([server], test, weights_folder=tmp_path)


# -- health and timers --------------------------------------------------------------------------------------------


def test_timers_and_sums_only_grow(tmp_path: Path) -> None:
    server = FaultyServer([status(503, **{"Retry-After": "0"}), status(500)])

    async def test(engine: RemoteEngine) -> None:
        before: dict[str, float] = {}
        for k in range(3):
            if k == 0:
                with pytest.raises(EngineError):
                    await engine.complete(ask())
            else:
                await engine.complete(ask())
            await engine.sync_weights(WEIGHTS, f"run:{k}")
            now = {**engine.stats.timers, "busy": engine.stats.busy_seconds}
            assert {"request", "publish", *(f"publish/{step}" for step in STEPS)} <= set(now)
            assert all(now[name] >= seconds for name, seconds in before.items())
            assert now["publish"] > before.get("publish", 0.0)
            before = now
        stats = engine.stats
        assert (stats.requests, stats.tokens, stats.failed, stats.refused, stats.publishes) == (3, 10, 1, 1, 3)

    using([server], test, weights_folder=tmp_path)


@pytest.mark.ledger("X9")
@pytest.mark.parametrize(
    ("under_way", "new"),
    [
        ((0, 0, 0), (3, 2, 2)),
        ((5, 0, 2), (0, 4, 2)),
        ((9, 9, 0), (0, 0, 6)),
        ((1, 1), (2, 1)),
        ((4,), (3,)),
    ],
)
def test_conversations_that_begin_at_once_go_where_the_least_is_under_way(under_way: Any, new: Any) -> None:
    async def placed() -> list[Any]:
        return [wellness.best(servers) for _ in range(sum(new))]

    servers: list[Any] = [SimpleNamespace(in_flight=n) for n in under_way]
    wellness = Wellness()
    found = asyncio.run(placed())
    assert tuple(sum(one is server for one in found) for server in servers) == new
    assert asyncio.run(placed()) == found, "what has begun by now is counted once"


@pytest.mark.ledger("X9")
def test_new_conversations_avoid_a_server_that_was_lost() -> None:
    first, second = FaultyServer([dropped]), FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        for letter in "abcd":
            await engine.complete(ask(letter))
        assert (len(first.asked), len(second.asked)) == (1, 4)

    using([first, second], test)


@pytest.mark.parametrize(
    "more",
    [
        ("--lora", "4"),
        ("--transfer",),
        ("--nccl",),
        ("--no-weights",),
        ("--patience", "3"),
        ("--log", "elsewhere"),
        ("--options=--dtype float32",),
    ],
)
def test_what_the_embedded_engine_would_ignore_is_refused(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", str(tmp_path), "--engine", "embedded", *more]) == 64
    assert re.search(f"{more[0].partition('=')[0]} .*vLLM", capsys.readouterr().err)
