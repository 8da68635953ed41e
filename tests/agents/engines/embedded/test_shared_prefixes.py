"""A prefix that several rows share is computed once: in an admission, from a running row, and after new weights."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tapereel.agents import Completion, EmbeddedEngine, Request
from tapereel.agents.engines.embedded import SlotDecoder
from tapereel.agents.engines.embedded.batch import Batch, Generation, Stats

from ...embedded_lab import ask, assert_faithful, decoder, engine, prompt_of, until

GROUPS, SIZE = 4, 8


def groups_of(length: int, max_tokens: int) -> list[Request]:
    """Four groups of eight requests. Each group has a prompt of its own."""
    return [
        ask(prompt_of(group, length), 100 * group + seed, key=f"{group}/{seed}", max_tokens=max_tokens, ignore_eos=True)
        for group in range(GROUPS)
        for seed in range(SIZE)
    ]


@pytest.mark.parametrize("length", [64, 350, 1500])
def test_the_prompt_of_a_group_is_prefilled_once(length: int) -> None:
    async def main() -> EmbeddedEngine:
        shared = engine(decoder(max_position_embeddings=2048), slots=32)
        await asyncio.gather(*(shared.complete(request) for request in groups_of(length, 2)))
        return shared

    assert asyncio.run(main()).stats.prefilled <= 1.1 * GROUPS * length


def test_after_new_weights_a_prompt_is_computed_once_and_each_row_s_own_tokens() -> None:
    models = {f"v{k}": decoder(seed=k, max_position_embeddings=512) for k in range(2)}
    requests = groups_of(350, 24)

    async def main() -> tuple[list[Completion], EmbeddedEngine, int]:
        shared = engine(models["v0"], slots=32)
        jobs = [asyncio.ensure_future(shared.complete(request)) for request in requests]
        await until(lambda: shared.stats.sampled >= 200)
        own = shared.stats.sampled
        await shared.sync_weights(dict(models["v1"].state_dict()), "v1", "reprefill")
        return await asyncio.gather(*jobs), shared, own

    completions, shared, own = asyncio.run(main())
    assert shared.stats.recomputed <= 1.15 * (GROUPS * 350 + own)
    for request, completion in zip(requests[::5], completions[::5], strict=True):
        assert_faithful(models, request, completion)


def test_a_request_copies_the_prompt_from_a_row_that_runs() -> None:
    first, second = (ask(prompt_of(1, 40), seed, max_tokens=30, ignore_eos=True) for seed in (1, 2))

    async def main() -> tuple[Completion, EmbeddedEngine]:
        shared = engine(decoder())
        running = asyncio.ensure_future(shared.complete(first))
        await until(lambda: shared.stats.sampled >= 5)
        found = await shared.complete(second)
        await running
        return found, shared

    found, shared = asyncio.run(main())
    assert (found.usage.cached_tokens, shared.stats.prefilled) == (39, 41)
    assert_faithful({"v0": decoder()}, second, found)


def test_a_row_whose_kv_is_of_older_weights_is_not_copied() -> None:
    first, second = (ask(prompt_of(1, 40), seed, max_tokens=30, ignore_eos=True) for seed in (1, 2))
    new = decoder(seed=1)

    async def main() -> Completion:
        shared = engine(decoder())
        running = asyncio.ensure_future(shared.complete(first))
        await until(lambda: shared.stats.sampled >= 5)
        await shared.sync_weights(dict(new.state_dict()), "v1", "stale_kv")
        found = await shared.complete(second)
        await running
        return found

    found = asyncio.run(main())
    assert found.usage.cached_tokens == 0
    assert_faithful({"v1": new}, second, found)


def test_the_number_of_slots_changes_no_token() -> None:
    requests = groups_of(100, 12)

    async def main(slots: int) -> list[Completion]:
        shared = engine(decoder(), slots=slots)
        return await asyncio.gather(*(shared.complete(request) for request in requests))

    alone, few, many = (asyncio.run(main(slots)) for slots in (1, 5, 32))
    assert [c.ids for c in alone] == [c.ids for c in few] == [c.ids for c in many]


@pytest.mark.parametrize("seed", range(8))
def test_the_row_that_shares_most_is_found_among_all_rows(seed: int) -> None:
    """Against a comparison of lists, with few ids, so that many rows begin alike."""
    rng = random.Random(seed)

    def generation() -> Generation:
        ids = [1, 2, 3, *rng.choices([4, 5], k=rng.randint(1, 12))]
        sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stops": frozenset(), "barred": ()}
        return Generation(prompt=array("i", ids), seed=rng.getrandbits(32), limit=20, min_tokens=0, key="", **sampling)

    def tokens(one: Generation) -> list[int]:
        return [*one.prompt, *one.ids]

    def alike(one: Generation, other: Sequence[int]) -> int:
        pairs = enumerate(zip(tokens(one), other, strict=False))
        return next((k for k, (a, b) in pairs if a != b), min(len(tokens(one)), len(other)))

    batch = Batch(SlotDecoder(decoder(), slots=12, capacity=64), 0, Stats())
    for _ in range(3):
        later = [generation() for _ in range(4)]
        while later:
            groups, later = batch.plan(later)
            for group in groups:
                batch.join(group)
        for _ in range(rng.randint(0, 4)):
            batch.step()
    for _ in range(20):
        new, joining = generation(), [generation() for _ in range(3)]
        kv = [tokens(row)[:-1] for row in batch.rows]  # the last sampled token has none yet
        most = len(new.prompt) - 1
        found, n = batch.shared(new)
        assert n == max(min(alike(new, row), most) for row in kv)
        assert isinstance(found, Generation)
        assert alike(new, tokens(found)) >= n
        together = max(n, *(alike(new, tokens(one)) for one in joining))
        assert batch.missing(new, joining) == len(new.prompt) - together
