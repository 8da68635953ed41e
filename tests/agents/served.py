"""What holds of any server that speaks vLLM's protocol: the engine of servers samples from it and gives it weights.

`class TestSome(Served)` with a fixture `runs` says which server is meant: `runs(test)` runs an async test with an
engine whose server has the weights of `policy(0)` under a version of their own.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tapereel.agents import Completion, EngineError, PromptTooLong, Request, rollout
from tapereel.agents.engines.servers import Broadcast, RemoteEngine
from tapereel.agents.engines.servers.server_config import Adapters, Reload, ServerSettings, Transfer
from tapereel.agents.engines.weights import PublishFailed
from tapereel.finetune import rows
from tapereel.tapes import Sampling

from ..finetune.loop.lab import RENDERER, Letters, Speaker
from ..finetune.loop.lab import model as micro
from .embedded_lab import worst

CLOSE = 1e-4
"""Nats between a recorded log-prob and the model's own forward over everything."""
CONTEXT = 2048
Tries = Sequence[tuple[int, float, int]]
"""(tokens of the answers in which the weights are to change, seconds before each change, number of answers). The next
one is used if the machine is so fast or so slow that no answer lived through the changes."""
TRIES: Tries = ((300, 0.05, 8), (900, 0.1, 8), (1800, 0.3, 8))

Test = Callable[[RemoteEngine], Awaitable[Any]]
Runs = Callable[[Test], Any]
Answers = list[tuple[Request, Completion]]


def servers(
    *urls: str, model: Any = ".", way: Any = "reload", weights_folder: Any = None, **more: Any
) -> ServerSettings:
    """Settings of those servers. `way` is `reload`, `transfer`, `lora`, `nccl` or a value of `weights`."""
    ways = {"reload": Reload(), "transfer": Transfer(), "lora": Adapters(rank=2, alpha=4), "nccl": Broadcast()}
    folder = None if weights_folder is None else str(weights_folder)
    return ServerSettings(
        model=str(model), urls=urls, weights=ways[way] if isinstance(way, str) else way, weights_folder=folder, **more
    )


def ask(text: str = "abcd", seed: int = 1, on_partial: Any = None, **sampling: Any) -> Request:
    messages = [{"role": "user", "content": text}]
    return Request(
        messages=messages,
        prompt=RENDERER.prompt(messages).ids,
        seed=seed,
        on_partial=on_partial,
        sampling=Sampling(**sampling),
        cache_key=text,
    )


def long_one(seed: int, on_partial: Any = None, length: int = 200) -> Request:
    """Asks for an answer of `length` tokens that nothing ends."""
    return ask("abcdabcd" * 4, seed, on_partial, max_tokens=length, extra={"ignore_eos": True, "stop_token_ids": []})


class Heard:
    """Keeps what it is told of, and says when that begins."""

    def __init__(self) -> None:
        self.pieces: list[array[int]] = []
        self.begun = asyncio.Event()
        self.void = 0
        """How often all of it was."""

    def tokens(self, ids: array[int]) -> None:
        self.pieces.append(ids)
        self.begun.set()

    def again(self) -> None:
        self.pieces.clear()
        self.void += 1

    @property
    def ids(self) -> list[int]:
        return [id for piece in self.pieces for id in piece]


async def hears_what_is_sampled(engine: RemoteEngine) -> None:
    """An answer is the same whether somebody listens or not, and comes in several pieces: a fast server sends a short
    one as a whole."""
    for length in (100, 500, 1900):
        request, heard = long_one(3, length=length), Heard()
        whole = await engine.complete(request)
        found = await engine.complete(replace(request, listener=heard))
        assert found.ids is not None
        assert (found.ids, found.spans, found.finish, found.usage.completion_tokens) == (
            whole.ids,
            whole.spans,
            whole.finish,
            whole.usage.completion_tokens,
        )
        assert found.usage.prompt_tokens == whole.usage.prompt_tokens == len(request.prompt or ())
        assert list(found.logprobs or ()) == pytest.approx(list(whole.logprobs or ()), abs=CLOSE)
        assert heard.ids == list(found.ids)
        if len(heard.pieces) > 1:
            return
    pytest.fail(f"an answer of {length} tokens came in one piece")


@asynccontextmanager
async def busy(engine: RemoteEngine, others: int = 16) -> AsyncIterator[None]:
    """With other requests under way, so that a fast server doesn't end an answer before it is looked at."""
    asked = [asyncio.create_task(engine.complete(long_one(100 + k, length=1900))) for k in range(others)]
    try:
        yield
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def leaves_what_was_heard(engine: RemoteEngine) -> tuple[Request, Completion]:
    """Cancelled while it is heard: what is left begins with that."""
    heard, partial = Heard(), list[Completion]()
    request = replace(long_one(3, partial.append, length=1500), listener=heard)
    async with busy(engine):
        asked = asyncio.create_task(engine.complete(request))
        await heard.begun.wait()
        told = heard.ids
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    (left,) = partial
    assert left.ids is not None
    assert (left.finish, left.ids[: len(told)].tolist()) == ("cancelled", told)
    assert left.spans == ((engine.version, 0, len(left.ids)),)
    assert len(told) <= len(left.ids) < 1500
    return request, left


async def hears_through_a_change_of_weights(
    engine: RemoteEngine, policy: Callable[[int], Any]
) -> tuple[Request, Completion]:
    """The weights of seed 1 come in place of those of seed 0 while an answer is heard, which is exact for both."""
    for _ in range(4):
        heard, before = Heard(), engine.version
        request = replace(long_one(3, length=1500), listener=heard)
        async with busy(engine):
            asked = asyncio.create_task(engine.complete(request))
            await heard.begun.wait()
            await engine.sync_weights(policy(1).state_dict(), f"{before}+heard")
            found = await asked
        assert heard.ids == list(found.ids or ())
        versions = [version for version, _, _ in found.spans]
        # On a busy machine a server may seem away, and the answer begins again under the new weights.
        if len(versions) > 1 and heard.void == 0:
            assert versions == [before, f"{before}+heard"]
            return request, found
        await engine.sync_weights(policy(0).state_dict(), f"{before}/again")
    pytest.fail("no answer lived through the change of weights")


Enough = Callable[[Completion, list[str]], bool]
"""(an answer, the versions published while it was under way) -> whether it shows what is to be shown."""


async def swap(
    engine: RemoteEngine,
    policy: Callable[[int], Any],
    mode: Any,
    times: int,
    enough: Enough,
    tries: Tries = TRIES,
) -> tuple[list[str], Answers]:
    """Publishes the weights of seeds 1, 2, ... `times` times while answers are under way, until `enough` holds for one
    of these; gives the versions published and the answers."""
    for k, (length, pause, number) in enumerate(tries):
        if k:
            await engine.sync_weights(policy(0).state_dict(), f"{engine.version}/again")
        versions = [f"{engine.version}+{seed}" for seed in range(1, times + 1)]
        requests = [long_one(seed, length=length) for seed in range(3, 3 + number)]
        asked = [asyncio.create_task(engine.complete(request)) for request in requests]
        for seed, version in enumerate(versions, start=1):
            await asyncio.sleep(pause)
            await engine.sync_weights(policy(seed).state_dict(), version, mode)
        answers = list(zip(requests, await asyncio.gather(*asked), strict=True))
        if any(enough(completion, versions) for _, completion in answers):
            return versions, answers
    pytest.fail(f"no answer lived through {times} changes of weights, not even one of {tries[-1][0]} tokens")


def seeds_of(completion: Completion, versions: list[str]) -> list[tuple[int, int, int]]:
    """Its spans with policy seeds for versions."""
    return [
        (versions.index(version) + 1 if version in versions else 0, start, end)
        for version, start, end in completion.spans
    ]


SHOWS: dict[str, Enough] = {
    "reprefill": lambda completion, _: len(completion.spans) >= 3,
    "drain": lambda completion, versions: completion.spans[0][0] not in versions,
    "abort": lambda completion, _: completion.finish == "abort" and bool(completion.ids),
}
"""What an answer that lived through changes of weights looks like, by the way in which they were published."""


class Served:
    """The tests."""

    @staticmethod
    def policy(seed: int) -> Any:
        """A random model; seeds lie far apart."""
        return micro(seed, CONTEXT)

    def off(self, seed: int, request: Request, completion: Completion, start: int = 0, end: int | None = None) -> float:
        """The largest error of the log-probs in [start, end)."""
        return worst(self.policy(seed), request, completion, start, end)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
    def test_log_probs_are_those_of_the_model(self, runs: Runs, temperature: float) -> None:
        async def test(engine: RemoteEngine) -> None:
            asked = [ask("abcd"[k % 4] * (k + 1), k, temperature=temperature, max_tokens=64) for k in range(8)]
            for request, completion in zip(asked, await asyncio.gather(*map(engine.complete, asked)), strict=True):
                assert completion.ids
                assert self.off(0, request, completion) < CLOSE
                assert completion.spans == ((engine.version, 0, len(completion.ids)),)
                assert completion.finish == ("stop" if completion.ids[-1] in RENDERER.end_ids else "length")
                assert completion.usage.completion_tokens == len(completion.ids)

        runs(test)

    def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            first, again, other = [await engine.complete(long_one(seed, length=40)) for seed in (3, 3, 4)]
            assert first.ids == again.ids
            assert first.ids != other.ids

        runs(test)

    def test_a_cancelled_request_leaves_what_was_sampled(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            whole = await engine.complete(long_one(3, length=500))
            assert whole.ids is not None
            for pause in (0.02, 0.1, 0.4, 1.6):  # until a machine as fast as this one is cut short, in the midst
                partial: list[Completion] = []
                asked = asyncio.create_task(engine.complete(long_one(3, partial.append, length=500)))
                await asyncio.sleep(pause)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                (left,) = partial
                assert left.finish == "cancelled"
                assert left.ids is not None
                assert left.ids == whole.ids[: len(left.ids)]
                if 0 < len(left.ids) < len(whole.ids):
                    assert self.off(0, long_one(3), left) < CLOSE
                    return
            pytest.fail("no request was cut short in the midst")

        runs(test)

    def test_an_answer_that_is_heard_is_the_same(self, runs: Runs) -> None:
        runs(hears_what_is_sampled)

    def test_one_that_is_cancelled_while_it_is_heard_leaves_what_was_sampled(self, runs: Runs) -> None:
        request, left = runs(leaves_what_was_heard)
        assert self.off(0, request, left) < CLOSE

    def test_weights_that_change_while_an_answer_is_heard_are_stamped_exactly(self, runs: Runs) -> None:
        request, found = runs(lambda engine: hears_through_a_change_of_weights(engine, self.policy))
        for seed, (_, start, end) in enumerate(found.spans):
            assert self.off(seed, request, found, start, end) < CLOSE

    @pytest.mark.parametrize("mode", ["reprefill", "drain", "abort"])
    def test_every_token_is_stamped_with_the_weights_that_gave_it(self, runs: Runs, mode: str) -> None:
        async def test(engine: RemoteEngine) -> None:
            versions, answers = await swap(engine, self.policy, mode, 3, SHOWS[mode])
            for request, completion in answers:
                for seed, start, end in seeds_of(completion, versions):
                    assert self.off(seed, request, completion, start, end) < CLOSE
            after = ask(seed=9)
            found = await engine.complete(after)
            assert {version for version, _, _ in found.spans} == {versions[-1]}
            assert self.off(3, after, found) < CLOSE

        runs(test)

    def test_no_prompt_is_read_with_the_cache_of_older_weights(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            request = ask("abcdabcd" * 24, 5, max_tokens=8)
            assert self.off(0, request, await engine.complete(request)) < CLOSE
            await engine.sync_weights(self.policy(1).state_dict(), f"{engine.version}+other")
            assert self.off(1, request, await engine.complete(request)) < CLOSE

        runs(test)

    def test_a_publish_that_fails_is_told_and_nothing_is_sampled_after_it(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            (member,) = engine.fleet.members

            class Lost(type(member.sync)):  # its folder is gone when it is to be read
                async def update(self, folder: Any) -> None:
                    await super().update(folder / "nowhere")

            member.sync = Lost(member.server)
            with pytest.raises(PublishFailed, match="update"):
                await engine.sync_weights(self.policy(1).state_dict(), f"{engine.version}+lost")
            with pytest.raises(EngineError, match="publish"):
                await engine.complete(ask())

        runs(test)

    def test_a_conversation_of_several_turns_is_exact_on_the_tape(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            tape = await rollout(Speaker(), Letters(), task="abca", engine=engine, sampling=Sampling(max_tokens=8))
            assert tape.status == "finished", tape.cause
            (row,) = rows(tape)
            ids = torch.from_numpy(row.input_ids).long()[None]
            with torch.no_grad():
                exact = self.policy(0)(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            own = torch.from_numpy(row.own).long()
            torch.testing.assert_close(exact[own - 1], torch.from_numpy(row.old), rtol=0, atol=CLOSE)

        runs(test)

    def test_what_cannot_be_served_is_refused_with_the_reason(self, runs: Runs) -> None:
        async def test(engine: RemoteEngine) -> None:
            assert engine.context is not None
            full = array("i", [9] * engine.context)
            with pytest.raises(PromptTooLong, match=str(engine.context)):
                await engine.complete(Request(messages=[], prompt=full, sampling=Sampling(), seed=0))
            with pytest.raises(EngineError, match="renderer"):
                await engine.complete(Request(messages=[], prompt=None, sampling=Sampling(), seed=0))
            with pytest.raises(EngineError, match="400"):
                await engine.complete(ask(extra={"presence_penalty": 7.0}))
            outside = Request(messages=[], prompt=array("i", [70_000]), sampling=Sampling(), seed=0)
            with pytest.raises(EngineError, match="400"):
                await engine.complete(outside)
            weights = self.policy(1).state_dict()
            for wrong in ({"nonsense.weight": torch.zeros(2, 2)}, weights | {"model.norm.weight": torch.zeros(3)}):
                with pytest.raises(ValueError, match=r"'\w[\w.]*weight'"):
                    await engine.sync_weights(wrong, f"{engine.version}+wrong")
            request = ask()
            assert self.off(0, request, await engine.complete(request)) < CLOSE

        runs(test)
