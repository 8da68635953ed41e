"""score: exact whatever the padding, the micro-batch and the neighbours; nothing as large as tokens x vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.finetune.objective import Score
from tapereel.finetune.trainer import forward, plan, score
from tapereel.finetune.trainer import lm_head as head
from tapereel.finetune.trainer.logprobs import UnsupportedModel

from ..build import VOCABULARY, ledger, row, tiny_model

MODEL = tiny_model()
RNG = np.random.default_rng(5)
SHAPES = [((3, 2), 2, 1, 0, 1.0), ((1,), 1, 0, 5, 0.5), ((2, 2, 4), 6, 3, 2, 1.5), ((7,), 3, 0, 0, 1.0)]
ROWS = [
    row(f"t{i}", turns=t, prompt=p, between=b, after=a, temperature=temperature, rng=RNG)
    for i, (t, p, b, a, temperature) in enumerate(SHAPES)
]


def by_hand(a_row, model=MODEL):
    """One row alone, all logits, one softmax."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(a_row.input_ids.astype(np.int64))[None]).logits[0]
    at = torch.from_numpy(a_row.own.astype(np.int64))
    z = logits[at - 1] / torch.from_numpy(a_row.temperature).double()[:, None]
    lsm = z.log_softmax(-1)
    ids = torch.from_numpy(a_row.input_ids.astype(np.int64))[at]
    return lsm.gather(1, ids[:, None])[:, 0], -(lsm.exp() * lsm).sum(-1)


@pytest.mark.ledger("F19", "P1", "P4", "P8", "T24")
@pytest.mark.parametrize("micro_tokens", [1, 12, 30, 10_000])
def test_every_row_scores_as_it_does_alone(micro_tokens):
    got = score(MODEL, ROWS, entropy=True, micro_tokens=micro_tokens)
    lp, h = (torch.cat(x) for x in zip(*map(by_hand, ROWS), strict=True))
    assert got.entropy is not None
    torch.testing.assert_close(got.logprob, lp, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.entropy, h, rtol=1e-9, atol=1e-12)


@pytest.mark.ledger("P2")
def test_the_order_of_rows_only_orders_the_result():
    straight, back = score(MODEL, ROWS).logprob, score(MODEL, ROWS[::-1]).logprob
    sizes = [len(r.own) for r in ROWS]
    torch.testing.assert_close(torch.cat(list(reversed(back.split(sizes[::-1])))), straight, rtol=1e-9, atol=1e-12)


@pytest.mark.ledger("F03", "F04", "P3")
def test_padded_rows_score_as_packed_ones_with_restarting_positions():
    case = ledger("rows")["F03"]
    rows = [row(f"s{i}", turns=(n,), prompt=1, rng=RNG) for i, n in enumerate(case["segments"])]
    ids = torch.from_numpy(np.concatenate([r.input_ids for r in rows]).astype(np.int64))[None]
    positions = torch.cat([torch.arange(len(r)) for r in rows])
    with torch.no_grad():
        logits = MODEL(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0].log_softmax(-1)
    starts = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    lp = torch.cat(
        [
            logits[s + torch.from_numpy(r.own.astype(np.int64)) - 1].gather(
                1, torch.from_numpy(r.input_ids[r.own].astype(np.int64))[:, None]
            )[:, 0]
            for s, r in zip(starts, rows, strict=False)
        ]
    )
    torch.testing.assert_close(score(MODEL, rows).logprob, lp, rtol=1e-9, atol=1e-12)


@pytest.mark.ledger("P7")
def test_what_follows_the_last_own_token_is_not_even_forwarded():
    short, long = (row(turns=(2,), after=after, rng=np.random.default_rng(1)) for after in (0, 40))
    assert plan([long])[0].ids.shape == (1, 3)
    assert torch.equal(score(MODEL, [short]).logprob[:1], score(MODEL, [long]).logprob[:1])


@pytest.mark.ledger("F02", "P8")
def test_the_scored_tokens_are_the_rows_own_and_each_stands_where_its_prediction_is():
    case = ledger("rows")["F02"]
    base = row(turns=(3,), prompt=len(case["prompt"]))
    a_row = type(base)(
        **{
            **{f: getattr(base, f) for f in base.__dataclass_fields__},
            "input_ids": np.array(case["prompt"] + case["output"], np.int32),
            "own": np.array(case["own"], np.int32),
        }
    )
    long = row("other", turns=(case["padded_to"] - 2,), rng=RNG)
    (micro,) = plan([long, a_row])
    mine = micro.index >= len(long.own)
    assert micro.token[mine].tolist() == case["output"]
    width = micro.ids.shape[1]
    assert [int(i) % width for i in micro.at[mine]] == [i - 1 for i in case["own"]]


@pytest.mark.ledger("F19")
def test_uniform_logits_over_v_tokens_give_minus_log_v_and_entropy_log_v():
    case = ledger("regularisers")["F19"]
    model = tiny_model(vocab_size=case["vocabulary"])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    a_row = row(turns=(4,))
    a_row.input_ids[:] %= case["vocabulary"]
    got = score(model, [a_row], entropy=True)
    assert got.entropy is not None
    assert got.logprob.tolist() == pytest.approx([case["logprob"]] * 4, rel=1e-12)
    assert got.entropy.tolist() == pytest.approx([case["entropy"]] * 4, rel=1e-12)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    *[st.booleans()] * 3,
    st.sampled_from([0, 1, None]),
    st.integers(0, 2**31 - 1),
)
@pytest.mark.ledger("F19", "P4")
def test_the_chunked_head_and_its_backward_equal_autograd_of_the_plain_softmax(
    n, chunk, tempered, biased, entropic, frozen, seed
):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = [draw(n, 5), draw(11, 5)] + ([draw(11)] if biased else [])
    token = torch.randint(0, 11, (n,), generator=g)
    ones = torch.ones(n, dtype=torch.float64)
    temperature = torch.rand(n, generator=g, dtype=torch.float64) + 0.3 if tempered else ones
    pull = draw(2, n)
    grads = []
    for chunked in (True, False):
        leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate(inputs)]
        moving = [x for x in leaves if x.requires_grad]
        bias = leaves[2] if biased else None
        if chunked:
            old, head.CHUNK = head.CHUNK, chunk
            try:
                lp, h = head.log_probs(leaves[0], leaves[1], bias, token, temperature, entropy=entropic)
                h = torch.zeros_like(lp) if h is None else h
                value = (pull[0] * lp + pull[1] * h).sum()
                grads.append((lp, h, *torch.autograd.grad(value, moving)))
            finally:
                head.CHUNK = old
        else:
            z = (leaves[0] @ leaves[1].T + (0 if bias is None else bias)) / temperature[:, None]
            lsm = z.log_softmax(-1)
            lp, h = lsm.gather(1, token[:, None])[:, 0], -(lsm.exp() * lsm).sum(-1) * entropic
            value = (pull[0] * lp + pull[1] * h).sum()
            grads.append((lp, h, *torch.autograd.grad(value, moving)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("one_pass", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_ever_alive(one_pass, monkeypatch):
    """Counts the largest two-dimensional tensor that the head makes, forward and backward."""
    monkeypatch.setattr(head, "CHUNK", 16 * 101)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                if isinstance(t, torch.Tensor) and t.ndim == 2 and t.shape[1] == 101:
                    largest = max(largest, t.shape[0])
            return out

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(101, 8, requires_grad=True)
    with Watch():
        inputs = hidden, weight, None, torch.zeros(64, dtype=torch.int64), torch.ones(64)
        if one_pass:
            head.loss_in_one_pass(*inputs, lambda lp, at: lp.sum())[1].backward()
        else:
            head.log_probs(*inputs)[0].sum().backward()
    assert largest == 16


def test_a_token_sampled_greedily_has_no_distribution_to_score():
    with pytest.raises(ValueError, match="temperature 0"):
        score(MODEL, [row(temperature=0.0)])
    assert torch.isfinite(score(MODEL, [row(temperature=0.0)], Score(temperature="one")).logprob).all()


def test_a_head_that_does_more_than_multiply_is_refused_by_name():
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModel, match=r"final_logit_softcapping=30\.0"):
        forward(model, plan([row()])[0])


def test_live_tokens_alone_are_scored():
    live = torch.zeros(sum(len(r.own) for r in ROWS), dtype=torch.bool)
    live[[0, 6, 7]] = True
    whole, some = score(MODEL, ROWS).logprob, score(MODEL, ROWS, live=live).logprob
    assert some.isnan().tolist() == (~live).tolist()
    torch.testing.assert_close(some[live], whole[live], rtol=1e-9, atol=1e-12)
    assert sum(len(m.ids) for m in plan(ROWS, live=live)) == 2
    assert plan(ROWS, live=torch.zeros_like(live)) == []


def test_the_vocabulary_is_that_of_the_model():
    assert score(MODEL, ROWS).logprob.exp().max() <= 1
    assert math.isclose(by_hand(ROWS[0])[1].max().item(), math.log(VOCABULARY), rel_tol=0.5)
