"""Adapters of the real vLLM, its chat route and its sleep: what came with one server more, beside `test_vllm.py`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents import Completion, EngineError, Request
from tapereel.agents.engines.servers import Chat, Completions, RemoteEngine
from tapereel.agents.engines.servers.fleet import Member
from tapereel.agents.engines.servers.lora_servers import AdapterEngine
from tapereel.agents.engines.transport import Server
from tapereel.agents.engines.weights import PublishFailed, VLLMReload
from tapereel.agents.rendering import Renderer
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train

from ..agents.embedded_lab import worst
from ..agents.served import CLOSE, Test, ask, long_one, servers
from ..finetune.loop.lab import RENDERER, WORDS, Letters, Speaker, assert_books_close, settings_of
from .lab import ADAPTERS, adapted, merged, off, policy

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


async def under_way(engine: RemoteEngine, count: int) -> None:
    """Until so many requests are on their way."""
    while len(engine._flights) < count:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0)


async def names(engine: RemoteEngine) -> set[str]:
    """What the server serves beside its base."""
    models = await engine.fleet.members[0].server.get("/v1/models")
    return {model["id"] for model in models["data"][1:]}


def test_adapters_sample_as_the_merged_model_and_answers_keep_the_one_they_began_with(
    with_engine: Callable[..., Any],
) -> None:
    async def test(engine: AdapterEngine) -> None:
        base = engine.version
        versions = [f"{base}+{seed}" for seed in (1, 2)]
        await engine.sync_weights(adapted(1).state_dict(), versions[0])
        early = [asyncio.create_task(engine.complete(long_one(seed, length=3600))) for seed in range(3, 5)]
        await under_way(engine, len(early))
        await engine.sync_weights(adapted(2).state_dict(), versions[1])
        assert await names(engine) == set(versions), "an adapter in use stays"
        late = await asyncio.gather(*(engine.complete(long_one(seed)) for seed in range(3, 5)))
        for seed, completions in ((1, await asyncio.gather(*early)), (2, late)):
            for k, completion in enumerate(completions):
                assert completion.ids is not None
                assert completion.spans == ((versions[seed - 1], 0, len(completion.ids)),)
                assert worst(merged(seed), long_one(k + 3), completion) < CLOSE
                assert worst(merged(3 - seed), long_one(k + 3), completion) > 0.1
        await engine.sync_weights(adapted(1).state_dict(), f"{base}+3")
        assert await names(engine) == {f"{base}+3"}, "adapters that nobody uses go"

    with_engine(test, "lora")


def test_adapters_published_with_abort_end_what_older_ones_sample(with_engine: Callable[..., Any]) -> None:
    async def test(engine: AdapterEngine) -> None:
        for attempt in range(6):  # a fast server may end all answers before the adapter is loaded
            first = f"{engine.version}+1"
            await engine.sync_weights(adapted(1).state_dict(), first)
            asked = [
                asyncio.create_task(engine.complete(long_one(seed, length=3600))) for seed in range(3, 3 + 2**attempt)
            ]
            await under_way(engine, len(asked))
            await engine.sync_weights(adapted(2).state_dict(), f"{first}+2", "abort")
            completions = await asyncio.gather(*asked)
            assert {version for completion in completions for version, _, _ in completion.spans} <= {first}
            ended = [completion for completion in completions if completion.finish == "abort"]
            for completion in ended:
                assert completion.ids is not None
                assert len(completion.ids) < 3600
            if ended:
                return
        pytest.fail("no answer was under way when the second adapter was loaded")

    with_engine(test, "lora")


def test_an_adapter_that_cannot_be_loaded_changes_nothing(with_engine: Callable[..., Any]) -> None:
    async def test(engine: AdapterEngine) -> None:
        first = f"{engine.version}+1"
        await engine.sync_weights(adapted(1).state_dict(), first)
        with pytest.raises(ValueError, match=r"engine\.weights=reload"):
            await engine.sync_weights(policy(1).state_dict(), f"{first}+none")
        with pytest.raises(ValueError, match="'reprefill'"):
            await engine.sync_weights(adapted(2).state_dict(), f"{first}+mode", "reprefill")
        wide = {
            name: torch.cat([tensor] * 99, 0 if "lora_A" in name else 1)
            for name, tensor in adapted(2).state_dict().items()
            if "lora_" in name
        }
        with pytest.raises(PublishFailed, match="max_lora_rank"):
            await engine.sync_weights(wide, f"{first}+wide")
        assert await names(engine) == {first}
        request = ask(max_tokens=32)
        assert worst(merged(1), request, await engine.complete(request)) < CLOSE

    with_engine(test, "lora")


def test_training_adapters_publishes_adapters_only(server: str, folder: Path, tmp_path: Path) -> None:
    scene: dict[str, Any] = {
        "agent": f"{Speaker.__module__}:Speaker",
        "env": f"{Letters.__module__}:Letters",
        "tasks": ("a", "b", "c", "d", "ab", "cd"),
        "evaluation": {"fraction": 0.34},
    }
    engine = {
        "kind": "vllm",
        "model": str(folder),
        "urls": [server],
        "weights_folder": str(tmp_path / "weights"),
        "weights": {"kind": "adapters", **ADAPTERS.model_dump()},
    }
    loop = settings_of(updates=4, max_lag=0, in_flight="drain")
    with pytest.raises(ValueError, match=r"loop\.in_flight"):
        TrainConfig(**scene, engine=engine, loop=settings_of())
    config = TrainConfig(**scene, engine=engine, loop=loop)
    summary = train(config, tmp_path / "run")
    assert (summary.books_close, summary.updates) == (True, 4)
    assert summary.held_out["after"] is not None
    assert_books_close(tmp_path / "run")
    left = {path.name for path in (tmp_path / "weights").rglob("*") if path.is_file()}
    assert left <= {"adapter_model.safetensors", "adapter_config.json"}
    assert (Path(summary.model) / "adapter_model.safetensors").exists()


# -- chat ---------------------------------------------------------------------------------------------------------


def by_chat(engine: RemoteEngine, url: str, dialect: Any = None) -> RemoteEngine:
    """An engine of the same server that asks by messages."""
    server = Server(url)
    members = [Member(server, VLLMReload(server))]
    return RemoteEngine(members, dialect or Chat(), RENDERER, engine.capabilities, servers(url), version=engine.version)


def test_chat_samples_what_token_ids_do_and_says_what_it_read(with_engine: Callable[[Test], Any], server: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        talking = by_chat(engine, server)
        asked = [ask("abcd"[k % 4] * (k + 1), k, temperature=0.7, max_tokens=40) for k in range(8)]
        asked.append(spoken("ab", "cd"))
        for request in asked:
            one, other = await engine.complete(request), await talking.complete(request)
            assert (one.ids, one.finish, one.spans) == (other.ids, other.finish, other.spans)
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)
            assert off(0, request, other) < CLOSE
            assert other.usage.prompt_tokens == len(request.prompt or ())
        await talking.close()

    with_engine(test)


def spoken(*turns: str) -> Request:
    """A conversation of several turns."""
    messages = [
        {"role": "user" if k % 2 == 0 else "assistant", "content": turn} for k, turn in enumerate((*turns, "a"))
    ]
    request = ask(max_tokens=16)
    return Request(messages=messages, prompt=RENDERER.prompt(messages).ids, seed=1, sampling=request.sampling)


def test_chat_after_another_prompt_is_refused(with_engine: Callable[[Test], Any], server: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        talking = by_chat(engine, server)
        request = ask()
        other = Request(
            messages=[{"role": "user", "content": "dcba"}], prompt=request.prompt, seed=1, sampling=request.sampling
        )
        with pytest.raises(EngineError, match=r"limits\.keep_prompt") as caught:
            await talking.complete(other)
        assert not caught.value.retry
        await talking.close()

    with_engine(test)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_cancelled_request_of_other_routes_leaves_what_was_sampled(
    with_engine: Callable[[Test], Any], server: str, route: str
) -> None:
    async def test(engine: RemoteEngine) -> None:
        talking = by_chat(engine, server, Chat() if route == "chat" else Completions())
        for wait in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):  # on a busy machine, the first tokens may come late
            partial: list[Completion] = []
            request = long_one(3, partial.append, length=3600)
            asked = asyncio.create_task(talking.complete(request))
            await asyncio.wait({asked}, timeout=wait)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            assert len(partial) <= 1
            if partial and 0 < len(partial[0].ids or ()) < 3600:
                break
        else:
            pytest.fail(f"no request was cancelled while it was sampled: {partial}")
        assert off(0, request, partial[0]) < CLOSE
        await talking.close()

    with_engine(test)


def test_a_server_with_another_template_is_found_out(with_engine: Callable[[Test], Any], server: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        other = copy.deepcopy(WORDS)
        other.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}+"
        renderer = Renderer(other, end_tokens=(WORDS.eos_token,))
        messages = [{"role": "user", "content": "ab"}]
        request = Request(messages=messages, prompt=renderer.prompt(messages).ids, seed=1, sampling=ask().sampling)
        talking = by_chat(engine, server)
        with pytest.raises(EngineError, match=r"limits\.keep_prompt"):
            await talking.complete(request)
        await talking.close()

    with_engine(test)


def test_sleep_and_wake_are_taken_by_the_server(with_engine: Callable[[Test], Any]) -> None:
    """Its CPU build keeps its memory, and pauses."""

    async def test(engine: RemoteEngine) -> None:
        asked = asyncio.create_task(engine.complete(long_one(3, length=3600)))
        await under_way(engine, 1)
        await asyncio.sleep(0.2)
        for _ in range(2):
            await engine.sleep()
        assert (await asked).finish == "abort"
        with pytest.raises(EngineError, match="asleep"):
            await engine.complete(ask())
        await engine.sync_weights(policy(1).state_dict(), f"{engine.version}+asleep")
        for _ in range(2):
            await engine.wake()
        request = ask(max_tokens=32)
        assert off(1, request, await engine.complete(request)) < CLOSE
        assert engine.stats.timers["publish/update"] > 0

    with_engine(test)


def test_a_run_whose_server_sleeps_for_its_updates(server: str, folder: Path, tmp_path: Path) -> None:
    config = TrainConfig.model_validate(
        {
            "agent": f"{Speaker.__module__}:Speaker",
            "env": f"{Letters.__module__}:Letters",
            "tasks": ["a", "b", "c", "d"],
            "evaluation": {"fraction": 0},
            "engine": {"kind": "vllm", "model": str(folder), "urls": [server]},
            "loop": {**settings_of(updates=3, max_lag=0).model_dump(), "sleep": True},
        }
    )
    summary = train(config, tmp_path / "run")
    assert (summary.books_close, summary.updates) == (True, 3)
    assert_books_close(tmp_path / "run")
