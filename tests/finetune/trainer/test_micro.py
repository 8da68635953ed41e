"""Micro-batches and shared prefixes: every wanted token once, within the budget, and the same loss and gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.finetune import OptimiserConfig, Row, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import micro_batches as micro
from tapereel.finetune.trainer import plan, score
from tapereel.finetune.trainer.logprobs import packs, shares_prefixes

from ..build import episode, gradient, ledger, row, same, tiny_model


def group(name: str, n: int, prompt: int, rng: np.random.Generator, tokens: int = 3) -> list[Row]:
    """n rows that begin with the same prompt and go on differently."""
    rows = [row(f"{name}{i}", name, turns=(tokens, 1), prompt=prompt, rng=rng) for i in range(n)]
    for r in rows:
        r.input_ids[:prompt] = rows[0].input_ids[:prompt]
    return rows


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Prefixes of a tiny test count as long ones."""
    monkeypatch.setattr(micro, "SHARE_TOKENS", 6)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(1, 80),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
@pytest.mark.ledger("P4", "P8")
def test_every_wanted_token_is_in_one_micro_batch_at_the_place_that_predicts_it(groups, budget, share, pack, seed):
    rng = np.random.default_rng(seed)
    rows = [r for i, (n, prompt, tokens) in enumerate(groups) for r in group(f"g{i}", n, prompt, rng, tokens)]
    total = sum(len(r.own) for r in rows)
    live = torch.from_numpy(rng.random(total) < 0.6)
    micros = plan(rows, live=live, micro_tokens=budget, share=share, pack=pack)
    index = torch.cat([m.index for m in micros]) if micros else torch.zeros(0, dtype=torch.int64)
    assert sorted(index.tolist()) == live.nonzero()[:, 0].tolist()
    at = np.concatenate([[0], np.cumsum([len(r.own) for r in rows])])
    for m in micros:
        lead = 0 if m.prefix is None else len(m.prefix)
        alone = len(m.ids) == 1 if m.packed is None else int((m.packed == 0).sum()) == 1
        assert alone or m.ids.numel() + lead <= budget
        for t, place, token in zip(m.index.tolist(), m.at.tolist(), m.token.tolist(), strict=True):
            i = int(np.searchsorted(at, t, side="right")) - 1
            position = int(rows[i].own[t - at[i]])
            b, offset = divmod(place, m.ids.shape[1])
            first = 0 if m.packed is None else offset - int(m.packed[0, offset])
            assert lead + offset - first == position - 1
            assert token == rows[i].input_ids[position]
            seen = [*(m.prefix.tolist() if m.prefix is not None else []), *m.ids[b, first : offset + 1].tolist()]
            assert seen == rows[i].input_ids[:position].tolist()
            assert bool(m.there[b, offset])
    lengths = {i: int(rows[i].own[k]) for i in range(len(rows)) for k in range(len(rows[i].own)) if live[at[i] + k]}
    leads = sum(0 if m.prefix is None else len(m.prefix) * len(m.ids) for m in micros)
    assert sum(int(m.there.sum()) for m in micros) + leads == sum(lengths.values())


@pytest.mark.ledger("P1", "P3", "P4")
@pytest.mark.parametrize("name", ["grpo", "gspo", "sft"])
def test_a_prefix_forwarded_once_gives_the_same_loss_and_gradient(name, monkeypatch):
    rng = np.random.default_rng(2)
    rows = [*group("g", 4, 16, rng), *group("h", 3, 12, rng), row("alone", "k", turns=(5,), prompt=9, rng=rng)]
    rows += group("near", 2, 3, rng)
    rewards = [1.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.3, 1.0, 0.0, 1.0]
    episodes = [episode(r.tape, r.group, reward=x) for r, x in zip(rows, rewards, strict=True)]
    recipe = get_recipe(name)
    shared = gradient(tiny_model(), recipe, rows, episodes)
    assert sum(m.prefix is not None for m in plan(rows, share=True)) == 2
    small = gradient(tiny_model(), recipe, rows, episodes, micro_tokens=30)
    scores = score(tiny_model(), rows).logprob
    monkeypatch.setattr(micro, "SHARE_TOKENS", 10**9)
    assert all(m.prefix is None for m in plan(rows, share=True))
    plain = gradient(tiny_model(), recipe, rows, episodes)
    same(shared, plain)
    same(small, plain)
    torch.testing.assert_close(scores, score(tiny_model(), rows).logprob, rtol=1e-9, atol=1e-12)


def test_a_prefix_is_shared_only_where_it_saves_enough_and_never_past_the_first_wanted_token():
    rng = np.random.default_rng(3)
    rows = group("g", 3, 8, rng)
    (m,) = plan(rows, share=True)
    assert m.prefix is not None
    assert len(m.prefix) == 7
    for r in rows:
        r.input_ids[5] = rng.integers(0, 23)
    rows[0].input_ids[5], rows[1].input_ids[5] = 1, 2
    assert plan(rows, share=True)[0].prefix is None
    assert plan(group("g", 1, 20, rng), share=True)[0].prefix is None
    long = [dataclasses.replace(r, own=r.own) for r in group("g", 2, 8, rng, tokens=60)]
    assert plan(long, share=True)[0].prefix is None


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (7 + 3 * 6, [3, 1]),
        (7 + 3 * 6 - 1, [2, 2]),
        (7 + 4 * 6, [4]),
        (1, [1] * 4),
    ],
)
def test_a_micro_batch_behind_a_prefix_is_filled_to_its_budget(budget, sizes):
    rows = group("g", 4, 8, np.random.default_rng(3), tokens=4)
    micros = plan(rows, micro_tokens=budget, share=True)
    assert [m.ids.shape for m in micros] == [(n, 6) for n in sizes]
    assert all(m.prefix is not None and len(m.prefix) == 7 for m in micros)


@pytest.mark.ledger("F03", "P3", "T44")
def test_packed_rows_restart_their_positions_and_see_nothing_of_each_other():
    case = ledger("rows")["F03"]
    rng = np.random.default_rng(4)
    rows = [row(f"s{i}", turns=(n - 1,), prompt=1, rng=rng) for i, n in enumerate(case["segments"]) if n > 1]
    (m,) = plan(rows, pack=True)
    assert m.packed is not None
    assert m.packed.tolist() == [[p for n in sorted(case["segments"]) if n > 1 for p in range(n - 1)]]
    alone = torch.cat([score(tiny_model(), [r]).logprob for r in rows])
    torch.testing.assert_close(score(tiny_model(), rows, pack=True).logprob, alone, rtol=1e-9, atol=1e-12)
    other = [rows[0], row("other", turns=(4,), prompt=3, rng=rng), *rows[1:]]
    of_first = len(rows[0].own)
    one, two = (score(tiny_model(), some, pack=True).logprob[:of_first] for some in (rows, other))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_packing_wastes_no_token_and_is_for_attention_of_variable_length():
    rows = [row(f"t{i}", turns=(n,)) for i, n in enumerate((1, 9, 2, 5))]
    assert sum(m.ids.numel() for m in plan(rows, pack=True)) == sum(int(r.own[-1]) for r in rows)
    assert sum(m.ids.numel() for m in plan(rows)) > sum(int(r.own[-1]) for r in rows)
    model = tiny_model()
    assert not packs(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not packs(model), "on a CPU there is no such kernel"
    assert not Trainer(tiny_model(), get_recipe("sft")).pack


def test_a_model_that_cannot_share_does_not():
    assert shares_prefixes(tiny_model())
    sliding = tiny_model()
    sliding.config.sliding_window = 8
    assert not shares_prefixes(sliding)
    model = tiny_model()
    Trainer(model, get_recipe("sft"), OptimiserConfig(gradient_checkpointing=True))
    assert not shares_prefixes(model)
