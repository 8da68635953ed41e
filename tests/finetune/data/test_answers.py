"""Repetitions and reflections of an answer, counted by hand, and as metrics of an update."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.finetune import Stream, Trainer
from tapereel.finetune.data.answers import reflections, repeated
from tapereel.finetune.objective import Context
from tapereel.finetune.objective.loss import prepare_batches
from tapereel.finetune.recipes import get_recipe

from ..build import batch, episode, row, tiny_model


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([], 0),
        ([5, 5, 5, 5], 0),
        ([5, 5, 5, 5, 5], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1),
        ([1, 2, 3, 9, 1, 2, 3], 0),
        ([1, 2, 1, 2, 1, 2, 1], 2),
        ([2**31 - 1, 0, 2**31 - 1, 0, 2**31 - 1, 0], 1),
    ],
)
def test_repeated_four_grams_by_hand(ids: list[int], want: int):
    assert repeated(ids) == want


@given(st.lists(st.integers(0, 2), max_size=30))
def test_repetitions_are_those_of_a_plain_loop(ids: list[int]):
    grams = [tuple(ids[k : k + 4]) for k in range(len(ids) - 3)]
    assert repeated(ids) == sum(gram in grams[:k] for k, gram in enumerate(grams))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", 0),
        ("The answer is 4.", 0),
        ("Wait, 2 + 2 is 4. However, let me check again: 4.", 3),
        ("WAIT wait", 2),
        ("The waiter awaits; I waited.", 0),
        ("Let me recheck, re-think and double-check. Alternatively, try again.", 5),
    ],
)
def test_reflections_by_hand(text: str, want: int):
    assert reflections(text) == want


def test_an_update_has_the_means_of_its_answers():
    rows, episodes = batch()
    rows = [row("t0", "g0", turns=(6, 2)), *rows[1:]]
    ids = rows[0].input_ids.copy()
    ids[rows[0].own] = [7, 7, 7, 7, 7, 7, 1, 2]
    # The second answer has no text, which is not a text without reflection.
    rows[0] = dataclasses.replace(rows[0], input_ids=ids, replies=("Hmm, wait.", None))
    stats = Trainer(tiny_model(), get_recipe("grpo")).update(rows, episodes)
    assert (stats.sums["answer/repeated"], stats.sums.counts["answer/repeated"]) == (2, sum(len(r.calls) for r in rows))
    assert (stats.sums["answer/reflections"], stats.sums.counts["answer/reflections"]) == (2, 1)
    half = rows[0].where(rows[0].turn == 1)
    stats = Trainer(tiny_model(), get_recipe("grpo")).update([half, *rows[1:]], episodes)
    assert stats.sums["answer/repeated"] == stats.sums["answer/reflections"] == 0


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum),
    seed=st.integers(0, 99),
    share=st.sampled_from([1.0, 0.5, 0.0]),
)
def test_each_answer_is_counted_alone(lengths: list[int], seed: int, share: float):
    rng = np.random.default_rng(seed)
    whole = dataclasses.replace(
        row("t", "g", turns=(sum(lengths),)),
        call=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        calls=tuple(map(str, range(len(lengths)))),
        agents=("",) * len(lengths),
    )
    tokens = np.zeros(len(whole.input_ids), np.int32)
    tokens[whole.own] = rng.integers(0, 2, len(whole.own))
    whole = dataclasses.replace(whole, input_ids=tokens)
    part = whole.where(rng.random(len(whole.own)) < share)
    other = row("u", "g", turns=(6,))
    context, episodes = Context(), [episode("t", "g", 1.0), episode("u", "g", 0.0)]
    prepare_batches(get_recipe("grpo"), [part, other], episodes, Stream.of([part, other], episodes), context)
    by_call = [r.input_ids[r.own][r.call == c].tolist() for r in (part, other) for c in range(len(r.calls))]
    answers = [ids for ids in by_call if ids]
    assert context.sums.sums["answer/repeated"] == sum(map(repeated, answers))
    assert context.sums.counts["answer/repeated"] == len(answers)
