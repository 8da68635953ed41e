"""The engine of servers against the real vLLM: what it samples, how sure it is, and which weights it used.

One server for all tests, on a random tiny Llama; `tests/contract/vllm_cpu.py` makes its environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents import Completion, EngineError, PromptTooLong, Request, rollout
from tapereel.agents.engines.servers import Completions, Generate, LocalServer, RemoteEngine
from tapereel.agents.engines.servers.connect import probe
from tapereel.agents.engines.servers.fleet import Member
from tapereel.agents.engines.servers.server_engine import Capabilities
from tapereel.agents.engines.transport import Server
from tapereel.agents.engines.weights import VLLMReload
from tapereel.agents.engines.weights.weight_transfer import VLLMTransfer
from tapereel.finetune import TrainConfig, rows
from tapereel.finetune.run import train
from tapereel.tapes import Sampling
from tapereel.tapes.store import Store

from ..agents import served
from ..agents.gateway import lab as gateway
from ..agents.served import CLOSE, SHOWS, Test, ask, long_one, seeds_of
from ..finetune.loop.lab import RENDERER, Letters, Speaker, assert_books_close, history_in, loop_in, settings_of, tasks
from ..finetune.loop.test_learning import climbed, rewards
from .lab import off, policy, swap
from .vllm_cpu import CONTEXT, ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_those_of_the_model(with_engine: Callable[[Test], Any], temperature: float) -> None:
    async def test(engine: RemoteEngine) -> None:
        asked = [ask("abcd"[k % 4] * (k + 1), k, temperature=temperature, max_tokens=64) for k in range(16)]
        for request, completion in zip(asked, await asyncio.gather(*map(engine.complete, asked)), strict=True):
            assert completion.ids
            assert off(0, request, completion) < CLOSE
            assert completion.spans == ((engine.version, 0, len(completion.ids)),)
            ended = completion.ids[-1] in RENDERER.end_ids
            assert completion.finish == ("stop" if ended else "length")
            assert completion.usage.completion_tokens == len(completion.ids)

    with_engine(test)


def test_a_teacher_on_vllm_says_what_the_model_says_of_given_tokens(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        request = ask("abca", 3, max_tokens=64)
        completion = await engine.complete(request)
        assert request.prompt is not None
        assert completion.ids
        ids = [*request.prompt, *completion.ids]
        with torch.no_grad():
            logits = policy(0)(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        # One after the other: vLLM's CPU build with --enable-lora dies if the prompt's log-probs are asked of it beside
        # another request (docs/how-to/vllm.md).
        said = [await engine.score(ids), await engine.score(ids[:5])]
        torch.testing.assert_close(torch.tensor(said[0], dtype=torch.float64), expected, rtol=0, atol=CLOSE)
        torch.testing.assert_close(torch.tensor(said[1], dtype=torch.float64), expected[:4], rtol=0, atol=CLOSE)

    with_engine(test)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        first, again, other = [await engine.complete(long_one(seed)) for seed in (3, 3, 4)]
        assert first.ids == again.ids
        assert first.ids != other.ids

    with_engine(test)


def test_greedy_logprobs_are_recorded_at_temperature_one_or_refused_as_rl_data(
    with_engine: Callable[[Test], Any],
) -> None:
    async def test(engine: RemoteEngine) -> None:
        request = ask(temperature=0.0, max_tokens=8)
        completion = await engine.complete(request)
        assert completion.ids
        assert not request.sampling.exact

    with_engine(test)


def test_both_dialects_sample_the_same(with_engine: Callable[[Test], Any], server: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        request = ask(temperature=0.7, max_tokens=40)
        one = await engine.complete(request)
        plain = RemoteEngine(
            [Member(Server(server), VLLMReload(Server(server)))],
            Completions(),
            RENDERER,
            engine.capabilities,
            served.servers(server),
            version=engine.version,
        )
        other = await plain.complete(request)
        await plain.close()
        assert (one.ids, one.finish) == (other.ids, other.finish)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)

    with_engine(test)


async def hears(engine: RemoteEngine) -> float:
    """Returns the time when the server has answered a small request."""
    await engine.fleet.best().get("/health", seconds=60.0)
    return time.perf_counter()


def test_a_cancelled_request_leaves_what_was_sampled(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        started = time.perf_counter()
        whole = await engine.complete(long_one(3, length=3600))
        took = time.perf_counter() - started
        assert whole.ids is not None
        assert len(whole.ids) == 3600
        for attempt in range(3):
            partial: list[Completion] = []
            request = long_one(3, partial.append, length=3600)
            asked = asyncio.create_task(engine.complete(request))
            await asyncio.sleep(took / 4 / 2**attempt)
            asked.cancel()
            cancelled, hearing = time.perf_counter(), asyncio.create_task(hears(engine))
            with pytest.raises(asyncio.CancelledError):
                await asked
            ended, heard = time.perf_counter(), await hearing
            (left,) = partial
            assert left.finish == "cancelled"
            assert left.ids is not None
            if 0 < len(left.ids) < len(whole.ids):
                break
            # While vLLM samples faster than its front end reads the tokens, the front end reads no request.
            assert heard - cancelled > (ended - cancelled) / 2, "the server read requests, and went on sampling"
        assert left.ids == whole.ids[: len(left.ids)]
        assert off(0, request, left) < CLOSE

    with_engine(test)


def test_an_answer_that_is_heard_while_it_is_sampled_is_the_same_and_exact(
    with_engine: Callable[[Test], Any], tmp_path: Path
) -> None:
    async def test(engine: RemoteEngine) -> None:
        async with gateway.served(tmp_path / "run", engine, sampling=Sampling(max_tokens=200)) as there:
            for attempt in range(50):  # a random model may end at once, and a fast server says much in one part
                tape, client = await there.begin(task="t", attempt=attempt)
                async with gateway.streamed(client, "abcd", temperature=1.5) as stream:
                    events = await stream.rest()
                (call,) = there.tape(tape).calls
                assert (stream.text, events[-1]) == (call.text, "[DONE]")
                if len(events) > 4:
                    break
        assert len(events) > 4
        await served.hears_what_is_sampled(engine)
        request, left = await served.leaves_what_was_heard(engine)
        assert off(0, request, left) < CLOSE
        request, found = await served.hears_through_a_change_of_weights(engine, policy)
        for seed, (_, start, end) in enumerate(found.spans):
            assert off(seed, request, found, start, end) < CLOSE

    with_engine(test)


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_every_token_is_stamped_with_the_weights_that_gave_it(with_engine: Callable[..., Any], way: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        versions, answers = await swap(engine, "reprefill", 3, SHOWS["reprefill"])
        for request, completion in answers:
            for seed, start, end in seeds_of(completion, versions):
                assert off(seed, request, completion, start, end) < CLOSE

    with_engine(test, way)


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_stale_kv_gives_logprobs_of_no_model(with_engine: Callable[..., Any], way: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        versions, answers = await swap(engine, "stale_kv", 1, lambda completion, _: len(completion.spans) >= 2)
        errors = [
            off(seed, request, completion, start, end)
            for request, completion in answers
            for seed, start, end in seeds_of(completion, versions)
            if seed and start
        ]
        assert max(errors) > 1e-2

    with_engine(test, way)


def test_drain_lets_completions_end_with_the_weights_they_began_with(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        versions, answers = await swap(engine, "drain", 1, SHOWS["drain"])
        for request, completion in answers:  # on a loaded machine, some begin only after the change
            assert completion.ids is not None
            ((seed, start, end),) = seeds_of(completion, versions)
            assert (start, end) == (0, len(completion.ids))
            assert off(seed, request, completion) < CLOSE
        after = await engine.complete(ask())
        assert {version for version, _, _ in after.spans} == set(versions)

    with_engine(test)


def test_abort_gives_back_what_there_is(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        _, answers = await swap(engine, "abort", 1, SHOWS["abort"])
        for request, completion in answers:
            if completion.finish == "abort" and completion.ids:
                assert off(0, request, completion) < CLOSE

    with_engine(test)


def test_prompts_that_fill_more_than_one_batch_are_read_whole(with_engine: Callable[[Test], Any]) -> None:
    """vLLM's CPU build dies of one with a seed that it reads in parts, which `LocalServer` forbids it to do."""

    async def test(engine: RemoteEngine) -> None:
        asked = [ask("abcd" * 700, seed, max_tokens=4) for seed in range(1, 9)]
        for request, completion in zip(asked, await asyncio.gather(*map(engine.complete, asked)), strict=True):
            assert off(0, request, completion) < CLOSE

    with_engine(test)


class NoReset(VLLMReload):
    """Forgets that the prefix cache holds the keys and values of older weights."""

    async def pause(self, mode: Any) -> None:
        await super().pause("stale_kv")

    async def finish(self, version: str, mode: Any) -> None:
        await super().finish(version, "stale_kv")


class NoResetTransfer(NoReset, VLLMTransfer):
    """So does this one."""


@pytest.mark.parametrize("way", ["reload", "transfer"])
@pytest.mark.parametrize("reset", [True, False])
def test_no_prompt_is_read_with_the_cache_of_older_weights(
    with_engine: Callable[..., Any], reset: bool, way: str
) -> None:
    async def test(engine: RemoteEngine) -> float:
        request = ask("abcdabcd" * 24, 5, max_tokens=8)  # longer than a block of the prefix cache, which is 128 here
        assert off(0, request, await engine.complete(request)) < CLOSE
        if not reset:
            forgetful = NoReset if way == "reload" else NoResetTransfer
            for member in engine.fleet.members:
                member.sync = forgetful(member.server)
        await engine.sync_weights(policy(1).state_dict(), f"{engine.version}+reset")
        return off(1, request, await engine.complete(request))

    error = with_engine(test, way)
    assert (error < CLOSE) == reset, error


def test_a_conversation_of_several_turns_is_exact_on_the_tape(with_engine: Callable[[Test], Any]) -> None:
    async def test(engine: RemoteEngine) -> None:
        tape = await rollout(Speaker(), Letters(), task="abca", engine=engine, sampling=Sampling(max_tokens=8))
        assert tape.status == "finished", tape.cause
        (row,) = rows(tape)
        ids = torch.from_numpy(row.input_ids).long()[None]
        with torch.no_grad():
            exact = policy(0)(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own = torch.from_numpy(row.own).long()
        torch.testing.assert_close(exact[own - 1], torch.from_numpy(row.old), rtol=0, atol=CLOSE)

    with_engine(test)


def test_what_cannot_be_served_is_refused_with_the_reason(with_engine: Callable[[Test], Any], folder: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        assert engine.context == CONTEXT
        with pytest.raises(PromptTooLong, match=str(CONTEXT)):
            await engine.complete(Request(messages=[], prompt=array("i", [9] * CONTEXT), sampling=Sampling(), seed=0))
        with pytest.raises(EngineError, match="renderer"):
            await engine.complete(Request(messages=[], prompt=None, sampling=Sampling(), seed=0))
        with pytest.raises(EngineError, match="400"):
            await engine.complete(ask(extra={"presence_penalty": 7.0}))
        with pytest.raises(EngineError, match="400"):
            await engine.complete(Request(messages=[], prompt=array("i", [70_000]), sampling=Sampling(), seed=0))
        weights = policy(1).state_dict()
        for wrong in ({"nonsense.weight": torch.zeros(2, 2)}, weights | {"model.norm.weight": torch.zeros(3)}):
            with pytest.raises(ValueError, match=r"'\w[\w.]*weight'"):
                await engine.sync_weights(wrong, f"{engine.version}+wrong")
        request = ask()
        assert off(0, request, await engine.complete(request)) < CLOSE

    with_engine(test)


def test_the_probe_tells_what_the_server_can_do(server: str) -> None:
    async def test() -> None:
        here = Server(server)
        dialect, found = await probe(here, RENDERER)
        await here.close()
        assert isinstance(dialect, Generate)
        told = (found.context, found.logprobs, found.versions, found.takes_weights)
        assert told == (CONTEXT, "processed", True, True)
        assert found.server == "vLLM 0.32.0"

    asyncio.run(test())


def test_the_loop_trains_with_it(with_engine: Callable[[Test], Any], tmp_path: Path) -> None:
    config = settings_of(updates=16, groups=8, group_size=8, recipe="grpo", max_lag=1)
    path = tmp_path / "run"

    async def test(engine: RemoteEngine) -> None:
        with Store.create(path, durability="os") as store:
            history = history_in(store, path, config, policy=policy(0))
            await engine.sync_weights(history.model.state_dict(), history.version)
            await loop_in(history, config, engine=engine, tasks=tasks(1)).run()

    with_engine(test)
    assert_books_close(path)
    batches = rewards(path)
    print("mean rewards:", [round(statistics.fmean(batch), 2) for batch in batches])
    assert climbed(batches) > 3


def test_the_train_verb_s_function_trains_with_it(server: str, folder: Path, tmp_path: Path) -> None:
    scene: dict[str, Any] = {
        "agent": f"{Speaker.__module__}:Speaker",
        "env": f"{Letters.__module__}:Letters",
        "tasks": ("a", "b", "c", "d", "ab", "cd"),
        "evaluation": {"fraction": 0.34},
    }
    engine = {"kind": "vllm", "model": str(folder), "urls": [server], "weights_folder": str(tmp_path / "weights")}
    config = TrainConfig(**scene, engine=engine, loop=settings_of(updates=3, max_lag=1))
    for resume in (False, True):
        summary = train(config, tmp_path / "run", resume=resume)
        assert (summary.books_close, summary.updates) == (True, 3)
        assert summary.held_out["after"] is not None
    assert_books_close(tmp_path / "run")


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        asyncio.run(LocalServer(tmp_path / "nowhere", python=str(PYTHON), environment=ENVIRONMENT).start())


def test_a_server_of_texts_is_no_source_of_rl_data(server: str) -> None:
    class Typo(Generate):
        """Asks for no log-probs, as a client with a misspelt field would."""

        def body(self, request: Request, **more: Any) -> dict[str, Any]:
            body = super().body(request, **more)
            del body["sampling_params"]["logprobs"]
            return body

    async def test() -> None:
        here = Server(server)
        try:
            answer = await here.post(Generate.route, Typo().body(ask(), model="", request_id="x", stops=()))
            Generate().parse(answer)
        finally:
            await here.close()

    with pytest.raises((EngineError, EngineError), match="log-probs"):
        asyncio.run(test())


async def capabilities(url: str) -> Capabilities:
    here = Server(url)
    try:
        return (await probe(here, RENDERER))[1]
    finally:
        await here.close()


def test_the_serve_verb_starts_a_server_and_takes_it_down(folder: Path, tmp_path: Path) -> None:
    options = " ".join(OPTIONS)
    command = [
        sys.executable,
        "-m",
        "tapereel.cli",
        "serve",
        "model",
        str(folder),
        "--port",
        "0",
        "--python",
        str(PYTHON),
        "--options",
        options,
        "--log",
        str(tmp_path / "log"),
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
    try:
        assert process.stdout is not None
        with process.stdout as printed:
            told = json.loads(printed.readline())

        assert asyncio.run(capabilities(told["url"])).takes_weights
    finally:
        process.terminate()
        assert process.wait(60) == 0
    with pytest.raises(EngineError, match="Cannot connect"):
        asyncio.run(capabilities(told["url"]))
