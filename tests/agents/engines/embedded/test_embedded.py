"""The embedded engine under load, when cancelled, at its limits, and when the model fails."""

from __future__ import annotations

import asyncio
import copy
import gc
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tapereel.agents import Completion, EmbeddedEngine, EngineError, PromptTooLong
from tapereel.agents.engines.engine import require
from tapereel.tapes.arrays import ints
from tapereel.tapes.errors import UsageError

from ...embedded_lab import END, Digits, ask, assert_faithful, decoder, engine, prompt_of, until, worst


def test_it_is_an_engine() -> None:
    shared = engine(decoder(), capacity=50)
    assert shared.can == {"stats", "weights", "score", "grammar"}
    require(shared, shared.can, "This test")
    assert shared.context == 50
    assert isinstance(shared.renderer, Digits)
    assert shared.name == "embedded"


def test_hundreds_of_requests_share_it_and_each_is_its_own() -> None:
    requests = [ask(prompt_of(n, 1 + n % 23), seed=n, max_tokens=1 + n % 13, key=f"c{n % 50}") for n in range(400)]

    async def main() -> tuple[list[Completion], EmbeddedEngine, int]:
        shared = engine(decoder(), slots=64)
        turns = 0

        async def bystander() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(bystander())
        completions = await asyncio.gather(*(shared.complete(request) for request in requests))
        beside.cancel()
        return completions, shared, turns

    completions, shared, turns = asyncio.run(main())
    assert turns >= shared.stats.steps  # the loop was free between any two decoding steps
    assert shared.stats.max_batch == 64
    assert shared.stats.sampled == sum(len(c.ids or ()) for c in completions)
    assert shared.stats.prefilled + shared.stats.reused == sum(len(r.prompt or ()) for r in requests)
    for request, completion in zip(requests[::20], completions[::20], strict=True):
        assert_faithful({"v0": decoder()}, request, completion)


def test_a_prompt_of_several_requests_is_computed_once() -> None:
    """Of a group, and of prompts that begin another one; a change inside a prompt is computed."""
    long = prompt_of(1, 12)
    prompts = [long, long, long[:5], long[:9], prompt_of(2, 12), [*long[:8], 3, *long[9:]]]
    requests = [ask(ids, seed=n, max_tokens=4, key=f"c{n}") for n, ids in enumerate(prompts)]

    async def main() -> tuple[list[Completion], EmbeddedEngine]:
        shared = engine(decoder())
        return await asyncio.gather(*(shared.complete(request) for request in requests)), shared

    completions, shared = asyncio.run(main())
    assert shared.stats.prefilled == 3 * 12
    assert [c.usage.cached_tokens for c in completions].count(0) == 3
    assert completions[0].ids != completions[1].ids, "each has its own seed"
    for request, completion in zip(requests, completions, strict=True):
        assert_faithful({"v0": decoder()}, request, completion)


def test_usage_text_and_finish() -> None:
    async def main() -> tuple[Completion, Completion]:
        shared = engine(decoder())
        free = await shared.complete(ask(prompt_of(0, 6), temperature=0.0, max_tokens=30))
        assert free.ids is not None
        return free, await shared.complete(ask(prompt_of(0, 6), temperature=0.0, max_tokens=30, stop=(free.ids[2],)))

    free, stopped = asyncio.run(main())
    assert free.ids is not None
    assert stopped.ids is not None
    at = free.ids.index(free.ids[2]) + 1
    assert stopped.ids == free.ids[:at]  # the id that stops is part of the completion
    assert stopped.finish == "stop"
    assert stopped.text == " ".join(map(str, stopped.ids))
    assert stopped.usage.prompt_tokens == 6
    assert stopped.usage.completion_tokens == at
    assert stopped.spans == (("v0", 0, at),)
    assert stopped.ids.typecode == "i"
    assert stopped.logprobs is not None
    assert stopped.logprobs.typecode == "f"


def test_a_cut_answer_keeps_its_last_token_and_gets_no_forged_end() -> None:
    request = ask(prompt_of(1, 6), seed=3, max_tokens=11)
    cut = asyncio.run(engine(decoder(), end_ids=()).complete(request))
    whole = asyncio.run(engine(decoder(), end_ids=()).complete(ask(prompt_of(1, 6), seed=3, max_tokens=40)))
    assert cut.finish == "length"
    assert cut.ids == whole.ids[:11]  # type: ignore[index]


def test_capacity_ends_a_completion_and_refuses_a_prompt_without_room() -> None:
    shared = engine(decoder(), capacity=16, end_ids=())

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(shared.complete(ask(prompt_of(0, n), max_tokens=99)) for n in (10, 15, 16, 17)), return_exceptions=True
        )

    ten, fifteen, *refused = asyncio.run(main())
    assert (ten.finish, len(ten.ids)) == ("length", 6)
    assert (fifteen.finish, len(fifteen.ids)) == ("length", 1)
    assert worst(decoder(), ask(prompt_of(0, 10)), ten) < 1e-4
    assert all(isinstance(error, PromptTooLong) for error in refused)
    assert ["16" in str(refused[0]), "17" in str(refused[1])] == [True, True]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(()), "renderer"),
        (ask((3, 4, 40)), " 40 .* 2 "),
        (ask((3, -1, 4)), " -1 .* 1 "),
        (ask((3,), extra={"repetition_penalty": 0}), "repetition_penalty"),
        (ask((3,), extra={"typical_p": 0.5}), "typical_p"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_reason(request_: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        asyncio.run(engine(decoder()).complete(request_))


def test_greedy_takes_the_likeliest_and_records_it_at_temperature_one() -> None:
    request = ask(prompt_of(2, 7), temperature=0.0, max_tokens=20)
    completion = asyncio.run(engine(decoder(), end_ids=()).complete(request))
    assert worst(decoder(), request, completion) < 1e-4
    assert_faithful({"v0": decoder()}, request, completion)


def test_cancelling_in_mid_generation_leaves_the_partial_and_frees_the_slot() -> None:
    partials: list[Completion] = []
    cancelled = ask(prompt_of(0, 5), seed=1, max_tokens=100, key="c", on_partial=partials.append)

    async def main() -> tuple[Completion, EmbeddedEngine, Completion]:
        shared = engine(decoder(), slots=1, end_ids=())
        first = asyncio.ensure_future(shared.complete(cancelled))
        second = asyncio.ensure_future(shared.complete(ask(prompt_of(9, 4), max_tokens=6)))
        await until(lambda: shared.stats.sampled >= 12)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        other = await second
        whole = ask(cancelled.prompt + partials[0].ids + prompt_of(5, 3), key="c", max_tokens=4)
        return other, shared, await shared.complete(whole)

    other, shared, after = asyncio.run(main())
    (partial,) = partials
    assert partial.finish == "cancelled"
    assert partial.ids is not None
    assert len(partial.ids) >= 12
    assert_faithful({"v0": decoder()}, cancelled, partial)
    assert len(other.ids or ()) == 6
    assert shared.stats.sampled == len(partial.ids) + 6 + 4
    assert after.usage.cached_tokens == 5 + len(partial.ids) - 1  # what was paid for is not paid for again


def test_cancelling_one_that_still_waits_gives_an_empty_partial() -> None:
    partials: list[Completion] = []

    async def main() -> None:
        shared = engine(decoder(), slots=1, end_ids=())
        first = asyncio.ensure_future(shared.complete(ask((5,), max_tokens=30)))
        waits = asyncio.ensure_future(shared.complete(ask((6,), on_partial=partials.append)))
        await until(lambda: shared.stats.sampled >= 3)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert len((await first).ids or ()) == 30

    asyncio.run(main())
    (partial,) = partials
    assert (partial.text, partial.ids, partial.spans, partial.finish) == ("", ints(), (), "cancelled")


def test_a_timeout_around_a_call_is_a_cancellation() -> None:
    partials: list[Completion] = []

    async def main() -> None:
        shared = engine(decoder(), end_ids=())

        async def bounded() -> None:
            async with asyncio.timeout(None) as bound:
                call = asyncio.ensure_future(shared.complete(ask((5,), max_tokens=100, on_partial=partials.append)))
                await until(lambda: shared.stats.sampled >= 5)
                bound.reschedule(0)
                await call

        with pytest.raises(TimeoutError):
            await bounded()

    asyncio.run(main())
    assert len(partials) == 1
    assert len(partials[0].ids or ()) >= 5


@pytest.mark.parametrize("fails", [False, True])
def test_cancelling_one_that_has_just_landed_loses_nothing(fails: bool) -> None:
    partials: list[Completion] = []
    complaints: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        model = faulty()
        shared = engine(model, end_ids=(), copy=False)
        call = asyncio.ensure_future(shared.complete(ask((5,), max_tokens=4, stop=(13,), on_partial=partials.append)))
        await until(lambda: shared.stats.sampled >= 2)
        model.broken = fails
        await until(lambda: not shared._flights)
        assert not call.done()  # landed, but not told yet
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    gc.collect()
    (partial,) = partials
    assert partial.finish == "cancelled"
    assert len(partial.ids or ()) == (2 if fails else 4)
    assert complaints == []


class Faulty(LlamaForCausalLM):
    """Raises when it is fed the id 13, and when `broken` is set."""

    broken = False

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """As a Llama, or not at all."""
        if self.broken or bool((input_ids == 13).any()):
            raise RuntimeError("the device fell off the bus")
        return super().forward(input_ids=input_ids, **kwargs)


def faulty() -> Faulty:
    """A model that fails on demand, with weights of its own."""
    torch.manual_seed(0)
    return Faulty(decoder().config).eval()


def test_a_forward_that_raises_fails_those_involved_and_the_engine_goes_on() -> None:
    async def main() -> tuple[list[Any], Completion]:
        model = faulty()
        shared = engine(model, end_ids=(), copy=False)
        poison = ask([*prompt_of(3, 150), 13], max_tokens=5)  # long, so that it is prefilled alone
        # 13 ends the spared one, so that it is never fed
        results = await asyncio.gather(
            shared.complete(poison), shared.complete(ask((4, 5), stop=(13,))), return_exceptions=True
        )
        model.broken = True
        results.append((await asyncio.gather(shared.complete(ask((4, 5))), return_exceptions=True))[0])
        model.broken = False
        return results, await shared.complete(ask((4, 5), temperature=0.0, max_tokens=12))

    (poisoned, spared, broken), after = asyncio.run(main())
    for error in (poisoned, broken):
        assert isinstance(error, EngineError)
        assert "prefilling 1 " in str(error)
        assert f"RuntimeError: {error.__cause__}" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    assert isinstance(spared, Completion)
    assert len(after.ids or ()) == 12


def test_a_decoding_step_that_raises_fails_all_running_rows() -> None:
    async def main() -> tuple[list[Any], Completion]:
        model = faulty()
        shared = engine(model, slots=4, end_ids=(), copy=False)
        running = [
            asyncio.ensure_future(shared.complete(ask((n + 20,), max_tokens=9, temperature=0.0))) for n in range(6)
        ]
        await until(lambda: shared.stats.steps >= 2)
        model.broken = True
        await until(lambda: running[0].done())
        model.broken = False
        return await asyncio.gather(*running, return_exceptions=True), await shared.complete(ask((20,), max_tokens=9))

    results, after = asyncio.run(main())
    assert all("decoding 4 " in str(error) for error in results[:4])
    assert len({id(error) for error in results[:4]}) == 4
    assert len(after.ids or ()) == 9


def test_weights_that_are_not_finite_fail_their_requests_and_leave_nothing_behind() -> None:
    good = decoder(seed=1).state_dict()
    bad = {name: value * float("nan") for name, value in good.items()}

    async def main() -> tuple[list[Any], list[Any]]:
        shared = engine(decoder(), slots=4)
        running = [
            asyncio.ensure_future(shared.complete(ask(prompt_of(n, 4), seed=n, max_tokens=60, key=f"c{n}")))
            for n in range(4)
        ]
        await until(lambda: shared.stats.steps >= 3)
        await shared.sync_weights(bad, "bad")
        failed = await asyncio.gather(*running, return_exceptions=True)
        await shared.sync_weights(good, "v1")
        # of uneven length, so that the short ones see what the failed ones left behind their own tokens
        requests = [ask(prompt_of(n, 40 if n == 3 else 1), seed=n, max_tokens=60, key=f"c{n}") for n in range(4)]
        return failed, list(zip(requests, await asyncio.gather(*(shared.complete(r) for r in requests)), strict=True))

    failed, after = asyncio.run(main())
    broken = [error for error in failed if isinstance(error, EngineError)]
    assert broken
    assert all("'bad'" in str(error) for error in broken)
    for request, completion in after:
        assert_faithful({"v1": decoder(seed=1)}, request, completion)


def test_forgetting_a_conversation_drops_its_kv_also_while_it_runs() -> None:
    async def main() -> list[int | None]:
        shared = engine(decoder(), end_ids=())
        cached = []
        for _ in range(3):
            running = asyncio.ensure_future(shared.complete(ask(prompt_of(0, 9), key="c", max_tokens=5)))
            if len(cached) == 1:
                await until(lambda: shared.stats.sampled >= 8)
                shared.forget("c")
            cached.append((await running).usage.cached_tokens)
        return cached

    assert asyncio.run(main()) == [0, 8, 0]


def test_parked_kv_stays_within_its_budget_oldest_out_first() -> None:
    async def main() -> tuple[list[int | None], int]:
        shared = engine(decoder(), park_tokens=30, end_ids=())
        for key in ("a", "b", "a", "c"):  # 13 tokens are parked each time: two conversations fit
            await shared.complete(ask(prompt_of(ord(key), 9), key=key, max_tokens=5))
        held = shared._batch.parked.used
        again = [await shared.complete(ask(prompt_of(ord(key), 9), key=key, max_tokens=5)) for key in "acb"]
        return [completion.usage.cached_tokens for completion in again], held

    cached, held = asyncio.run(main())
    assert held == 26
    assert cached == [8, 8, 0]


def test_closing_ends_what_is_in_flight_as_abort() -> None:
    async def main() -> tuple[list[Any], EmbeddedEngine]:
        shared = engine(decoder(), slots=2, end_ids=())
        running = [asyncio.ensure_future(shared.complete(ask((n + 3,), seed=n, max_tokens=90))) for n in range(3)]
        await until(lambda: shared.stats.steps >= 4)
        swap = asyncio.ensure_future(shared.sync_weights(decoder(seed=1).state_dict(), "v1", "drain"))
        await asyncio.sleep(0)
        await shared.close()
        await shared.close()
        with pytest.raises(EngineError, match="closed"):
            await shared.complete(ask((3,)))
        with pytest.raises(EngineError, match="published"):
            await swap
        return await asyncio.gather(*running), shared

    completions, shared = asyncio.run(main())
    assert [completion.finish for completion in completions] == ["abort"] * 3
    assert [len(completion.ids) > 3 for completion in completions] == [True, True, False]
    assert completions[2].spans == ()
    for n in (0, 1):
        assert_faithful({"v0": decoder()}, ask((n + 3,), seed=n), completions[n])
    assert shared.version == "v0"


def test_a_swap_that_waits_for_the_batch_goes_on_when_the_batch_is_cancelled() -> None:
    async def main() -> Completion:
        shared = engine(decoder(), slots=1, end_ids=())
        call = asyncio.ensure_future(shared.complete(ask((5,), max_tokens=90)))
        waits = asyncio.ensure_future(shared.complete(ask((6,), max_tokens=3)))
        await until(lambda: shared.stats.sampled >= 2)
        swap = asyncio.ensure_future(shared.sync_weights(decoder(seed=1).state_dict(), "v1", "drain"))
        given_up = asyncio.ensure_future(shared.sync_weights(decoder(seed=2).state_dict(), "v2", "drain"))
        await asyncio.sleep(0)
        given_up.cancel()
        call.cancel()
        await until(swap.done)
        return await waits

    assert asyncio.run(main()).spans == (("v1", 0, 3),)


def test_one_engine_serves_one_loop_after_another() -> None:
    shared = engine(decoder(), end_ids=())
    request = ask(prompt_of(0, 6), max_tokens=20)
    assert asyncio.run(shared.complete(request)).ids == asyncio.run(shared.complete(request)).ids

    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(shared.complete(ask(prompt_of(1, 6), max_tokens=90)))
    loop.run_until_complete(asyncio.sleep(0))
    driver = shared._driver
    assert driver is not None
    with pytest.raises(EngineError, match="loop"):
        asyncio.run(shared.complete(request))
    for task in (driver, abandoned):
        task.cancel()
    loop.run_until_complete(asyncio.gather(driver, abandoned, return_exceptions=True))
    loop.close()
    assert len(asyncio.run(shared.complete(request)).ids or ()) == 20


def test_the_model_given_is_copied_unless_it_is_handed_over() -> None:
    mine, other = copy.deepcopy(decoder()), decoder(seed=1).state_dict()

    async def swap(copied: bool) -> None:
        await engine(mine, copy=copied).sync_weights(other, "v1")

    before = {name: value.clone() for name, value in mine.state_dict().items()}
    asyncio.run(swap(True))
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    assert all(parameter.requires_grad for parameter in mine.parameters())
    asyncio.run(swap(False))
    assert all(torch.equal(other[name], value) for name, value in mine.state_dict().items())


def test_weights_of_another_shape_change_nothing() -> None:
    own = decoder().state_dict()
    short = {name: value for name, value in own.items() if "mlp" not in name}
    wide = {**own, "model.norm.weight": torch.ones(33)}

    async def main() -> EmbeddedEngine:
        shared = engine(decoder())
        for state, words in (
            (short, r"model\.layers\.0\.mlp"),
            (wide, r"\(33,\)"),
            ({**own, "model.norm.bias": torch.ones(32)}, r"model\.norm\.bias"),
        ):
            with pytest.raises(UsageError, match=words):
                await shared.sync_weights(state, "v1")
        with pytest.raises(ValueError, match="'v0'"):
            await shared.sync_weights(own, "v0")
        with pytest.raises(ValueError, match="'now'"):
            await shared.sync_weights(own, "v1", "now")  # type: ignore[arg-type]
        return shared

    shared = asyncio.run(main())
    assert shared.version == "v0"
    assert shared.stats.swaps == 0
    assert END in shared.end_ids


@pytest.mark.parametrize("names", ["both", "embedding", "head"])
def test_tied_weights_are_published_by_either_name(names: str) -> None:
    model = decoder("qwen2", 1)
    state = dict(model.state_dict())
    if names != "both":
        del state["lm_head.weight" if names == "embedding" else "model.embed_tokens.weight"]
    request = ask(prompt_of(0, 6), max_tokens=20)

    async def main() -> Completion:
        shared = engine(decoder("qwen2", 0), end_ids=())
        await shared.sync_weights(state, "v1")
        split = {**model.state_dict(), "lm_head.weight": torch.zeros(40, 32)}
        with pytest.raises(UsageError, match=r"embed_tokens\.weight.*lm_head\.weight"):
            await shared.sync_weights(split, "v2")
        return await shared.complete(request)

    assert worst(model, request, asyncio.run(main())) < 1e-4


def test_prefills_are_bounded_and_not_mostly_padding() -> None:
    lengths = [3, 180, 4, 5, 178, 100]

    async def main(prefill_tokens: int) -> tuple[int, int]:
        shared = engine(decoder(), prefill_tokens=prefill_tokens)
        grouped: list[list[int]] = []
        join = shared._batch.join

        def watched(group: Any) -> Any:
            grouped.append([len(family[0].prompt) for family in group])
            return join(group)

        shared._batch.join = watched  # type: ignore[method-assign]
        await asyncio.gather(*(shared.complete(ask(prompt_of(n, n), max_tokens=2)) for n in lengths))
        return len(grouped), max(len(group) * max(group) - sum(group) for group in grouped)

    groups, padding = asyncio.run(main(2048))
    assert groups == 2
    assert padding <= 130
    assert asyncio.run(main(1)) == (6, 0)
