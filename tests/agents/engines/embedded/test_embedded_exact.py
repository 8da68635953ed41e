"""The embedded engine's log-probs are those of the weights that its versions name, and its tokens depend on nothing
but seed, prompt and weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapereel.agents import Completion, Request

from ...embedded_lab import FAMILIES, ask, assert_faithful, decoder, engine, prompt_of, recompute, until, worst


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_exact_over_conversations_whose_kv_was_parked(family: str, temperature: float) -> None:
    model = decoder(family)

    async def conversation(shared: Any, number: int) -> list[tuple[Request, Completion]]:
        prompt, turns = prompt_of(number, 3 + number), []
        for turn in range(4):
            request = ask(prompt, seed=100 * number + turn, key=f"c{number}", temperature=temperature, max_tokens=14)
            completion = await shared.complete(request)
            turns.append((request, completion))
            prompt = prompt + completion.ids + prompt_of(1000 + 10 * number + turn, 1 + (number + turn) % 7)
        return turns

    async def main() -> tuple[list[Any], Any]:
        shared = engine(model, slots=5)
        return await asyncio.gather(*(conversation(shared, n) for n in range(12))), shared.stats

    conversations, stats = asyncio.run(main())
    for turns in conversations:
        for k, (request, completion) in enumerate(turns):
            assert worst(model, request, completion) < 1e-4
            assert_faithful({"v0": model}, request, completion)
            before = turns[k - 1] if k else None
            # all of the earlier turn but its last token, which was never fed
            parked = len(before[0].prompt) + len(before[1].ids) - 1 if before else 0
            assert (completion.usage.cached_tokens or 0) >= parked, "more, if a running row begins with more of them"
    assert stats.reused == sum(c.usage.cached_tokens or 0 for turns in conversations for _, c in turns)
    assert stats.max_batch == 5


def swapped(
    mode: Any, temperature: float, family: str = "llama", tokens: int = 96
) -> tuple[Mapping[str, Any], list[tuple[Request, Completion]], Any]:
    """Six completions, and four versions published while they run."""
    models = {f"v{k}": decoder(family, k) for k in range(4)}
    requests = [ask(prompt_of(n, 5 + 3 * n), seed=n, temperature=temperature, max_tokens=tokens) for n in range(6)]

    async def main() -> tuple[list[Completion], Any]:
        shared = engine(models["v0"], slots=4, end_ids=())
        running = [asyncio.ensure_future(shared.complete(request)) for request in requests]
        for k in (1, 2, 3):
            await until(lambda k=k: shared.stats.steps >= 22 * k)
            await shared.sync_weights(models[f"v{k}"].state_dict(), f"v{k}", mode)
        return await asyncio.gather(*running), shared

    completions, shared = asyncio.run(main())
    return models, list(zip(requests, completions, strict=True)), shared


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_span_is_exact_for_its_version_through_three_swaps(family: str, temperature: float) -> None:
    models, pairs, shared = swapped("reprefill", temperature, family)
    versions = [[version for version, _, _ in completion.spans] for _, completion in pairs]
    assert versions[:4] == [["v0", "v1", "v2", "v3"]] * 4
    for request, completion in pairs:
        assert completion.ids is not None
        assert request.prompt is not None
        assert len(completion.ids) == 96
        for version, start, end in completion.spans:
            assert worst(models[version], request, completion, start, end) < 1e-4
            others = [
                recompute(m, request.prompt, completion.ids, temperature) for v, m in models.items() if v != version
            ]
            own = recompute(models[version], request.prompt, completion.ids, temperature)
            assert all(float((own - other)[start:end].abs().mean()) > 0.1 for other in others)
        assert_faithful(dict(models), request, completion)
    assert shared.stats.swaps == 3
    assert shared.stats.recomputed > 0


def test_keeping_the_kv_of_older_weights_is_not_exact() -> None:
    models, pairs, _ = swapped("stale_kv", 1.0)
    request, completion = pairs[0]
    assert [version for version, _, _ in completion.spans] == ["v0", "v1", "v2", "v3"]
    errors = {
        version: worst(models[version], request, completion, start, end) for version, start, end in completion.spans
    }
    assert errors.pop("v0") < 1e-4
    assert all(error > 1e-3 for error in errors.values()), errors


def test_draining_gives_each_completion_one_version() -> None:
    models, pairs, _ = swapped("drain", 1.0)
    for request, completion in pairs:
        ((version, _, _),) = completion.spans
        assert worst(models[version], request, completion) < 1e-4
    # the four that ran finish under v0; the two that waited begin when every drain is through
    assert [completion.spans[0][0] for _, completion in pairs] == ["v0"] * 4 + ["v3"] * 2


def test_nobody_joins_while_the_batch_drains_but_what_was_begun_goes_on() -> None:
    models = {f"v{k}": decoder(seed=k) for k in range(3)}
    requests = [ask(prompt_of(n, 5 + n), seed=n, max_tokens=length) for n, length in enumerate((30, 60, 60, 9, 9))]

    async def main() -> list[Completion]:
        shared = engine(models["v0"], slots=3, prefill_tokens=1, end_ids=())
        running = [asyncio.ensure_future(shared.complete(request)) for request in requests]
        await until(lambda: shared.stats.max_batch == 3)
        # evicts all three, which come back one by one; before they are all back, the next swap waits for them
        await shared.sync_weights(models["v1"].state_dict(), "v1")
        await shared.sync_weights(models["v2"].state_dict(), "v2", "drain")
        assert [task.done() for task in running] == [True, True, True, False, False]
        return await asyncio.gather(*running)

    completions = asyncio.run(main())
    assert [[v for v, _, _ in c.spans] for c in completions] == [["v0", "v1"]] * 3 + [["v2"]] * 2
    for request, completion in zip(requests, completions, strict=True):
        assert_faithful(dict(models), request, completion)


def test_what_mixed_old_and_new_weights_is_never_parked() -> None:
    models = {"v0": decoder(seed=0), "v1": decoder(seed=1)}

    async def main() -> tuple[Request, Completion]:
        shared = engine(models["v0"], end_ids=())
        first = ask(prompt_of(0, 8), key="c", max_tokens=40)
        running = asyncio.ensure_future(shared.complete(first))
        await until(lambda: shared.stats.steps >= 10)
        await shared.sync_weights(models["v1"].state_dict(), "v1", "stale_kv")
        half = await running
        second = ask(first.prompt + half.ids + prompt_of(1, 3), key="c", max_tokens=20)
        return second, await shared.complete(second)

    request, completion = asyncio.run(main())
    assert completion.usage.cached_tokens == 0
    assert worst(models["v1"], request, completion) < 1e-4


def test_parked_kv_of_an_older_version_is_computed_again() -> None:
    models = {"v0": decoder(seed=0), "v1": decoder(seed=1)}

    async def main() -> tuple[Request, Completion]:
        shared = engine(models["v0"])
        first = ask(prompt_of(0, 8), key="c", max_tokens=12)
        reply = await shared.complete(first)
        await shared.sync_weights(models["v1"].state_dict(), "v1")
        second = ask(first.prompt + reply.ids + prompt_of(1, 3), key="c", max_tokens=12)
        return second, await shared.complete(second)

    request, completion = asyncio.run(main())
    assert completion.usage.cached_tokens == 0
    assert worst(models["v1"], request, completion) < 1e-4


def test_a_conversation_that_forks_reuses_what_it_shares() -> None:
    model = decoder()

    async def main() -> list[tuple[Request, Completion]]:
        shared = engine(model)
        first = ask(prompt_of(0, 20), key="c", max_tokens=10)
        out = [(first, await shared.complete(first))]
        for length in (20, 13):  # the very same prompt again, then one that leaves it after 13 tokens
            again = ask(first.prompt[:length] + prompt_of(7, 0 if length == 20 else 4), seed=5, key="c", max_tokens=10)
            out.append((again, await shared.complete(again)))
        return out

    _, same, fork = asyncio.run(main())
    assert same[1].usage.cached_tokens == 19  # its last token must be fed to sample after it
    assert fork[1].usage.cached_tokens == 13
    assert worst(model, *same) < 1e-4
    assert worst(model, *fork) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_and_neighbours_don_t_change_what_is_sampled(family: str) -> None:
    requests = [ask(prompt_of(n, 2 + n % 9), seed=n * 2**40, max_tokens=24, key=f"c{n}") for n in range(24)]

    def tokens(slots: int, chosen: list[Request]) -> list[list[int]]:
        async def main() -> list[Completion]:
            shared = engine(decoder(family), slots=slots)
            return await asyncio.gather(*(shared.complete(request) for request in chosen))

        return [list(completion.ids or ()) for completion in asyncio.run(main())]

    many = tokens(16, requests)
    assert tokens(5, requests) == many
    assert tokens(1, requests) == many
    assert tokens(16, list(reversed(requests)))[::-1] == many
    assert tokens(3, requests[4:5]) == many[4:5]
    assert len({tuple(ids) for ids in many}) > 20


def test_two_prompts_that_differ_in_seed_only_sample_differently() -> None:
    async def main() -> list[Completion]:
        shared = engine(decoder(), end_ids=())
        return await asyncio.gather(
            *(shared.complete(ask(prompt_of(0, 4), seed=seed, max_tokens=16)) for seed in (0, 1, -1, 2**64 - 1, 2**63))
        )

    zero, one, minus, top, half = (tuple(c.ids or ()) for c in asyncio.run(main()))
    assert len({zero, one, minus, half}) == 4
    assert minus == top  # seeds are 64 bits wide


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that join at some tick, some of them cancelled at a later one, and weights swapped in between."""
    requests = [
        {
            "at": draw(st.integers(0, 25)),
            "length": draw(st.integers(1, 20)),
            "seed": draw(st.integers(0, 2**64 - 1)),
            "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.0])),
            "max_tokens": draw(st.integers(1, 24)),
            "key": draw(st.sampled_from(["", "a", "b"])),
            "cancel": draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
        }
        for _ in range(draw(st.integers(1, 9)))
    ]
    swaps = draw(
        st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["reprefill", "reprefill", "drain"])), max_size=4)
    )
    return {
        "requests": requests,
        "swaps": swaps,
        "slots": draw(st.integers(1, 4)),
        "park": draw(st.sampled_from([0, 30, 400])),
        "prefill": draw(st.sampled_from([1, 16, 2048])),
        "family": draw(st.sampled_from(list(FAMILIES))),
    }


@pytest.mark.attack
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(programs())
def test_any_joins_leaves_cancels_and_swaps_agree_with_the_naive_loop(program: dict[str, Any]) -> None:
    models = {f"v{k}": decoder(program["family"], k) for k in range(len(program["swaps"]) + 1)}
    landed: list[tuple[Request, Completion]] = []

    async def one(shared: Any, spec: dict[str, Any]) -> None:
        await ticks(spec["at"])
        partials: list[Completion] = []
        # prompts under one key begin alike, so that parked KV is found again
        prompt = prompt_of(3, 8)[: spec["length"]] + prompt_of(spec["length"], max(0, spec["length"] - 8))
        request = ask(
            prompt,
            spec["seed"],
            key=spec["key"],
            on_partial=partials.append,
            temperature=spec["temperature"],
            max_tokens=spec["max_tokens"],
        )
        task = asyncio.ensure_future(shared.complete(request))
        if spec["cancel"] is not None:
            await ticks(spec["cancel"])
            task.cancel()
        try:
            completion = await task
        except asyncio.CancelledError:
            (completion,) = partials or [None]
            if completion is None:  # cancelled before it began: the call never ran
                assert spec["cancel"] == 0
                return
            assert completion.finish == "cancelled"
        else:
            assert not partials
        landed.append((request, completion))

    async def publish(shared: Any, version: str, at: int, mode: Any) -> None:
        await ticks(at)
        await shared.sync_weights(models[version].state_dict(), version, mode)

    async def main() -> Any:
        shared = engine(
            models["v0"], slots=program["slots"], park_tokens=program["park"], prefill_tokens=program["prefill"]
        )
        await asyncio.gather(
            *(one(shared, spec) for spec in program["requests"]),
            *(publish(shared, f"v{k}", at, mode) for k, (at, mode) in enumerate(program["swaps"], 1)),
        )
        await ticks(3)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "the driver runs on with nothing to do"
        return shared

    shared = asyncio.run(main())
    assert shared.stats.sampled == sum(len(completion.ids or ()) for _, completion in landed)
    assert shared.stats.max_batch <= program["slots"]
    for request, completion in landed:
        assert_faithful(models, request, completion)
        assert completion.ids is not None
        ended = [id for id in completion.ids if id in shared.end_ids]
        if completion.finish == "stop":
            assert ended == [completion.ids[-1]]
        elif completion.finish == "length":
            assert len(completion.ids) == request.sampling.max_tokens
            assert not ended


async def ticks(n: int) -> None:
    """n turns of the loop."""
    for _ in range(n):
        await asyncio.sleep(0)


def test_a_bfloat16_model_samples_and_its_log_probs_are_close() -> None:
    model = copy.deepcopy(decoder()).bfloat16()
    request = ask(prompt_of(0, 9), max_tokens=32)
    completion = asyncio.run(engine(model, end_ids=()).complete(request))
    assert completion.ids is not None
    assert len(completion.ids) == 32
    assert worst(model, request, completion) < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_an_engine_samples_what_a_trainer_forwards(family: str) -> None:
    model: Any = decoder(family, initializer_range=0.08)

    async def off(autocast: torch.dtype | None) -> float:
        sampling = engine(model, autocast=autocast)
        # New weights arrive as they leave the trainer: in float32.
        await sampling.sync_weights(model.state_dict(), "v1")
        requests = [ask(prompt_of(n, 5 + 7 * n), n, max_tokens=40) for n in range(6)]
        gaps: list[torch.Tensor] = []
        for request, said in zip(requests, await asyncio.gather(*map(sampling.complete, requests)), strict=True):
            assert said.ids is not None
            whole = torch.tensor([[*(request.prompt or ()), *said.ids]])
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                hidden = model.get_decoder()(input_ids=whole, use_cache=False).last_hidden_state[0]
            with torch.no_grad():
                under = model.get_output_embeddings()(hidden.float()).log_softmax(-1)[-len(said.ids) - 1 : -1]
            gaps.append((under.gather(1, whole[0, -len(said.ids) :, None])[:, 0] - torch.tensor(said.logprobs)).abs())
        return float(torch.cat(gaps).mean())

    narrow, wide = asyncio.run(off(torch.bfloat16)), asyncio.run(off(None))
    assert 0 < 2.5 * narrow < wide, (narrow, wide)
