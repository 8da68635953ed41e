"""surrogate, anchor, weigh and the masks of select: losses and gradients of single tokens in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tapereel.finetune.objective import Anchor, Context, Select, Sums, Weigh
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.objective.surrogate import AnySurrogate
from tapereel.finetune.recipes import get_recipe

from ...oracles import objective as oracle
from ..build import choices, doubles, episode, exact, ledger, row

LOSSES = ledger("losses")
READ: TypeAdapter = TypeAdapter(AnySurrogate)


def one_row(n, **columns):
    return exact([row("a", turns=(n,))], [episode()], **columns)


def losses(word, lp, old, advantage, **columns):
    """(losses, gradient of their sum, what was counted)."""
    lp = doubles(lp).requires_grad_()
    stream = one_row(len(lp), **columns)
    context = Context()
    got = READ.validate_python(word)(lp, doubles(old), doubles(advantage), torch.arange(len(lp)), stream, context)
    (grad,) = torch.autograd.grad(got.sum(), lp)
    return got.detach(), grad, context.sums


@pytest.mark.ledger("F52", "F71", "X1", "X2", "T23")
@pytest.mark.parametrize("name", ["F52", "X1", "X2", "X2_low", "sapo", "dual"])
def test_loss_and_gradient_of_one_token(name):
    block, counted = LOSSES[name], Sums()
    for case in block["cases"]:
        loss, grad, sums = losses(block["word"], [math.log(case["ratio"]) - 1], [-1.0], [case["advantage"]])
        counted.merge(sums)
        if "loss" in case:
            assert loss.item() == pytest.approx(case["loss"], rel=1e-9)
        if "grad" in case:
            assert grad.item() == pytest.approx(case["grad"], rel=1e-9, abs=1e-12)
    if "clipped" in block:
        assert counted.mean("clip") == pytest.approx(block["clipped"])


@pytest.mark.ledger("F71")
def test_the_dual_clip_is_for_what_went_worse_only():
    loss, _, sums = losses({"kind": "ppo", "high": 9.0, "dual": 3.0}, [math.log(5.0)], [0.0], [0.5])
    assert loss.item() == pytest.approx(-2.5)
    assert sums["clip"] == 0


@pytest.mark.parametrize(
    ("word", "constants"),
    [
        ({"kind": "ppo"}, {"low": 0.2, "high": 0.2, "dual": None, "per": "token"}),
        ({"kind": "cispo"}, {"low": None, "cap": 5.0}),
        ({"kind": "cpg"}, {"low": 0.2, "high": 0.2}),
        ({"kind": "sapo"}, {"tau": 1.0, "tau_negative": 1.05}),
        ({"kind": "minor_nll"}, {"beta": 0.1, "per": "episode"}),
    ],
)
def test_what_is_not_said_is_the_papers(word, constants):
    assert READ.validate_python(word).model_dump() == word | constants


@pytest.mark.parametrize(
    "word",
    [
        {"kind": "ppo", "low": -0.1},
        {"kind": "ppo", "low": 1.1},
        {"kind": "ppo", "high": -0.1},
        {"kind": "ppo", "dual": 1.0},
        {"kind": "cispo", "low": -0.1},
        {"kind": "cispo", "low": 1.5},
        {"kind": "cispo", "cap": 0.0},
        {"kind": "cpg", "low": 1.0},
        {"kind": "cpg", "low": -0.1},
        {"kind": "cpg", "high": -0.1},
        {"kind": "sapo", "tau": 0.0},
        {"kind": "sapo", "tau_negative": 0.0},
        {"kind": "minor_nll", "beta": 0.0},
    ],
    ids=str,
)
def test_a_constant_that_makes_no_sense_is_refused(word):
    with pytest.raises(ValidationError):
        READ.validate_python(word)


@pytest.mark.parametrize(
    "word",
    [
        {"kind": "cispo", "cap": 0.5, "low": 1.0},
        {"kind": "sapo", "tau": 0.5, "tau_negative": 0.5},
        {"kind": "ppo", "low": 1.0},
        {"kind": "ppo", "high": 0.0, "low": 0.0, "dual": 1.1},
        {"kind": "cpg", "low": 0.9},
        {"kind": "minor_nll", "beta": 0.5},
    ],
    ids=str,
)
def test_a_constant_at_the_edge_of_sense_is_allowed(word):
    assert READ.validate_python(word).model_dump() | word == READ.validate_python(word).model_dump()


@pytest.mark.parametrize(
    ("word", "local", "advantages"),
    [
        ({"kind": "ppo"}, True, True),
        ({"kind": "ppo", "per": "turn"}, False, True),
        ({"kind": "reinforce"}, True, True),
        ({"kind": "nll"}, True, False),
        ({"kind": "minor_nll"}, False, False),
        ({"kind": "none"}, True, False),
        ({"kind": "minor_nll", "per": "token"}, True, False),
        ({"kind": "cispo"}, True, True),
    ],
)
def test_what_a_surrogate_needs_is_what_it_says(word, local, advantages):
    read = READ.validate_python(word)
    assert (read.local, read.advantages) == (local, advantages)


@pytest.mark.ledger("F55")
def test_the_ratio_clipped_in_log_space_is_the_same():
    case = LOSSES["F55"]
    loss, _, _ = losses(case["word"], case["lp"], case["old"], case["advantage"])
    low, high = case["log_bounds"]
    for got, lp, old, a in zip(loss.tolist(), case["lp"], case["old"], case["advantage"], strict=True):
        clipped = math.exp(min(max(lp - old, low), high))
        assert got == pytest.approx(-min(math.exp(lp - old) * a, clipped * a), rel=1e-9)


@pytest.mark.ledger("F53", "T18", "F52")
def test_how_tokens_are_averaged_is_said_not_implied():
    case = LOSSES["F53"]
    rows = [row(t, turns=(n,)) for t, n in zip("ab", case["lengths"], strict=True)]
    stream = exact(rows, [episode("a"), episode("b")])
    every = torch.ones(len(stream), dtype=torch.bool)
    l = doubles(case["token_losses"])

    def mean(**word):
        weigh = Weigh(**word)
        return float((weigh(stream, every, weigh.totals(stream, every)) * l).sum())

    assert mean(kind="token") == pytest.approx(case["token"], rel=1e-12)
    assert mean(kind="episode") == pytest.approx(case["episode"], rel=1e-12)
    assert mean(kind="group") == pytest.approx(case["group"]["expected"], rel=1e-12)
    assert mean(kind="constant", limit=case["constant"]["limit"]) == pytest.approx(case["constant"]["expected"])
    assert mean(kind="constant", limit=1) == pytest.approx(case["luspo"])
    assert mean(kind="sum") == pytest.approx(case["sum"])


@pytest.mark.ledger("X4")
def test_the_published_aggregations_are_all_sayable():
    case = LOSSES["aggregation"]
    rows = [row(t, g, turns=(n,)) for t, g, n in zip("ab", case["groups"], case["lengths"], strict=True)]
    stream = exact(rows, [episode(t, g) for t, g in zip("ab", case["groups"], strict=True)])
    every = torch.ones(len(stream), dtype=torch.bool)

    def mean(kind, limit=1.0):
        weigh = Weigh(kind=kind, limit=limit)
        return float((weigh(stream, every, weigh.totals(stream, every)) * doubles(case["losses"])).sum())

    trl = case["trl"]
    got = {
        "grpo": mean("episode"),
        "bnpo": mean("token"),
        "dr_grpo": mean("constant", case["limit"]),
        "dapo": mean("token"),
        "luspo": mean("constant"),
    }
    assert got == pytest.approx(trl, rel=1e-12)
    assert mean("sum", case["limit"]) == pytest.approx(case["verl_seq_mean_token_sum_norm"], rel=1e-12)


@pytest.mark.ledger("F54")
def test_reinforce_has_no_ratio_and_its_gradient_is_the_advantage_over_t():
    case = LOSSES["F54"]
    lp = doubles(case["lp"]).requires_grad_()
    stream = one_row(len(lp))
    every = torch.ones(len(lp), dtype=torch.bool)
    batch = objective.Batch(
        recipe=get_recipe("reinforce"),
        stream=stream,
        advantage=doubles(case["advantage"]),
        entered=every,
        selected=every,
        target=None,
    )
    loss = batch.part().loss(lp, None, torch.arange(len(lp)), Context(), (0.0,))
    assert loss.item() == pytest.approx(case["loss"], rel=1e-9)
    assert torch.autograd.grad(loss, lp)[0].tolist() == pytest.approx(case["grad"], rel=1e-9)


@pytest.mark.ledger("F71")
@pytest.mark.parametrize(
    ("word", "advantage", "low", "high"),
    [
        ({"kind": "ppo"}, [-0.5, 0.5, 0.5, -0.5], [True, False, False, False], [False, False, True, False]),
        ({"kind": "cispo", "low": 0.2, "cap": 1.2}, [0.5] * 4, [True, True, False, False], [False, False, True, True]),
    ],
)
def test_each_side_counts_the_tokens_at_which_its_bound_took_effect(word, advantage, low, high):
    _, _, sums = losses(word, [math.log(r) for r in (0.5, 0.6, 2.0, 3.0)], [0.0] * 4, advantage)
    assert (sums["clip/low"], sums["clip/high"]) == (sum(low), sum(high))
    assert sums["clip"] == sum(low) + sum(high)


@pytest.mark.ledger("F56")
def test_the_clipped_policy_gradient_bounds_the_log_prob():
    case = LOSSES["F56"]
    loss, grad, sums = losses(case["word"], case["lp"], case["old"], case["advantage"])
    assert loss.mean().item() == pytest.approx(case["loss"], rel=1e-9)
    assert loss.mean().item() == pytest.approx(case["stated"], abs=5e-6)
    assert grad.tolist() == case["grad"]
    assert sums.mean("clip") == 1.0
    _, grad, sums = losses(case["word"], [-1.0, -1.0, -2.0], [-1.0, -1.05, -1.0], [1.0, 0.0, 0.0])
    assert grad.tolist() == [-1.0, 0.0, 0.0]
    assert sums.mean("clip") == 0.0


def test_a_ratio_over_an_episode_is_the_geometric_mean_and_its_gradient_reaches_every_token():
    case = LOSSES["gspo"]
    n = len(case["lp"])
    loss, grad, _ = losses(case["word"], case["lp"], case["old"], [case["advantage"]] * n)
    assert loss.tolist() == pytest.approx([case["loss"]] * n, rel=1e-9)
    assert (grad / n).tolist() == pytest.approx([case["grad"]] * n, rel=1e-9)


@pytest.mark.ledger("X13")
def test_minor_nll_fades_where_the_model_outgrew_the_reference():
    case = LOSSES["minor_nll"]
    n = len(case["lp"])
    loss, grad, _ = losses(case["word"], case["lp"], [0.0] * n, [0.0] * n, ref=case["ref"])
    assert loss.tolist() == pytest.approx(case["loss"], rel=1e-9)
    assert grad.tolist() == pytest.approx(case["grad"], rel=1e-9)


@pytest.mark.ledger("F71", "T15")
def test_the_share_of_clipped_tokens_is_that_of_changed_ones():
    case = ledger("regularisers")["F71"]
    n = len(case["ratios"])
    _, _, sums = losses({"kind": "ppo"}, [math.log(r) for r in case["ratios"]], [0.0] * n, case["advantages"])
    assert sums.mean("clip") == pytest.approx(case["clipped"])
    assert sums.counts["clip"] == n


def test_decoupled_ppo_weighs_by_what_the_sampler_did_differently():
    case = LOSSES["decoupled"]
    stream = one_row(2, old=case["old"], anchor=case["prox"])
    lp, index = doubles(case["lp"]), torch.arange(2)
    context = Context()
    prox, weight = Anchor(**case["anchor"])(lp, index, stream, context)
    assert weight is not None
    assert weight.tolist() == pytest.approx(case["importance"], rel=1e-9)
    assert context.sums["importance/truncated"] == 1
    loss = -(lp - prox).exp() * case["advantage"] * weight
    assert loss.tolist() == pytest.approx(case["loss"], rel=1e-9)
    every = torch.ones(2, dtype=torch.bool)
    recipe = get_recipe("grpo", {"anchor": case["anchor"]})
    batch = objective.Batch(
        recipe=recipe,
        stream=stream,
        advantage=doubles([case["advantage"]] * 2),
        entered=every,
        selected=every,
        target=None,
    )
    loss = batch.part().loss(lp, None, index, Context(), (0.0,))
    assert loss.item() == pytest.approx(sum(case["loss"]) / 2, rel=1e-9)


def test_masked_importance_weights_per_token_geometric_mean_or_product():
    case = LOSSES["decoupled"]
    stream = one_row(2, old=case["old"], anchor=case["prox"])
    lp, index, context = doubles(case["lp"]), torch.arange(2), Context()
    _, weight = Anchor(to="recomputed", weight="mask", low=case["mask"]["low"], high=case["mask"]["high"])(
        lp, index, stream, context
    )
    assert weight is not None
    assert weight.tolist() == pytest.approx(case["mask"]["importance"], rel=1e-9)
    assert context.sums["importance/masked"] == 1
    for combine, want in (("mean", case["geometric"]), ("sum", case["product"])):
        word = Anchor(to="recomputed", weight="truncate", high=9, per="episode", combine=combine)
        _, weight = word(lp, index, stream, Context())
        assert weight is not None
        assert weight.tolist() == pytest.approx([want] * 2, rel=1e-9)


def test_what_an_importance_weight_changes_is_counted():
    ratios = [0.25, 0.5, 1.0, 1.5, 3.0, 4.0]
    stream = one_row(6, old=[-5.0] * 6, anchor=[math.log(r) - 5 for r in ratios])
    lp, index, context = doubles([-5.0] * 6), torch.arange(6), Context()
    for how in ("truncate", "mask"):
        Anchor(to="recomputed", weight=how, low=0.6, high=2.0)(lp, index, stream, context)
    assert context.sums.mean("importance/truncated") == pytest.approx(2 / 6)
    assert context.sums.mean("importance/masked") == pytest.approx(4 / 6)


def test_an_anchor_is_the_samplers_own_log_prob_and_local_unless_it_is_told_otherwise():
    assert Anchor().model_dump() == {
        "to": "sampler",
        "weight": "none",
        "per": "token",
        "combine": "mean",
        "low": 0.0,
        "high": 2.0,
    }
    assert Anchor(high=0.5).high == 0.5
    assert Anchor(per="turn").local
    assert Anchor(to="recomputed", weight="mask").local
    assert not Anchor(to="recomputed", weight="mask", per="turn").local
    for wrong in ({"low": -0.1}, {"high": 0.0}):
        with pytest.raises(ValidationError):
            Anchor(**wrong)


def test_an_importance_weight_against_the_sampler_itself_is_refused():
    with pytest.raises(ValidationError, match=r"anchor\.to\b.*'recomputed'"):
        Anchor(weight="truncate")


@pytest.mark.ledger("F57", "T22")
def test_the_highest_entropies_keep_their_loss():
    case = LOSSES["F57"]
    for part in (case, case["one"]):
        stream = one_row(len(part["entropy"]), entropy=part["entropy"])
        kept = Select(entropy_top=part["share"]).top_entropy(torch.ones(len(stream), dtype=torch.bool), stream)
        assert kept.int().tolist() == part["expected"]
    tied = one_row(3, entropy=[1.0, 1.0 + 1e-12, 0.5])
    kept = Select(entropy_top=0.4).top_entropy(torch.ones(3, dtype=torch.bool), tied)
    assert kept.tolist() == [True, False, False], "rounding breaks no tie"
    n = case["exact"]["length"]
    stream = one_row(n, entropy=list(range(n)))
    kept = Select(entropy_top=case["exact"]["share"]).top_entropy(torch.ones(n, dtype=torch.bool), stream)
    assert int(kept.sum()) == case["exact"]["kept"]


@pytest.mark.ledger("T22")
def test_the_entropy_filter_never_selects_a_token_that_did_not_enter():
    stream = one_row(4, entropy=[0.0, 0.0, 0.0, 9.0])
    entered = torch.tensor([True, True, True, False])
    assert Select(entropy_top=0.5).top_entropy(entered, stream).tolist() == [True, False, False, False]


@pytest.mark.ledger("F57")
def test_the_entropy_filter_ranks_within_each_episode():
    rows = [row("a", turns=(3,)), row("b", turns=(2,)), row("c", turns=(4,))]
    stream = exact(rows, [episode(t) for t in "abc"], entropy=[9, 8, 7, 1, 2, 5, 3, 4, 6])
    kept = Select(entropy_top=0.5).top_entropy(torch.ones(9, dtype=torch.bool), stream)
    assert kept.int().tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 1]


@pytest.mark.ledger("X3")
def test_two_masks_drop_what_either_drops_and_count_each_of_their_own():
    old, lp, context = [-1.0, -1.0, -1.0, -2.0, -1.0], [-1.0, -1.6, -1.3, -0.5, -1.1], Context()
    select, a = Select(kl_mask=0.1, shift_mask=0.15), doubles([1.0, 1.0, -1.0, 1.0, 1.0])
    keep = select.tokens(doubles(lp), a, torch.arange(5), one_row(5, old=old), context)
    assert keep is not None
    assert keep.int().tolist() == [1, 0, 1, 0, 1]
    assert (context.sums["token/kl_masked"], context.sums["token/shift_masked"]) == (2, 1)
    near = Select(kl_mask=9.0, shift_mask=0.05).tokens(
        doubles([-1.0, -1.6]), doubles([1.0, -1.0]), torch.arange(2), one_row(2, old=[-1.0, -1.0]), Context()
    )
    assert near is not None
    assert near.int().tolist() == [1, 0]


@pytest.mark.ledger("X3")
def test_tokens_far_from_the_sampler_are_dropped_and_still_counted_below_the_line():
    case = LOSSES["X3"]
    n = len(case["lp"])
    stream = one_row(n, old=case["old"])
    recipe = get_recipe("reinforce", {"select": {"kl_mask": case["threshold"]}})
    every = torch.ones(n, dtype=torch.bool)
    batch = objective.Batch(
        recipe=recipe, stream=stream, advantage=doubles([1.0] * n), entered=every, selected=every, target=None
    )
    lp = doubles(case["lp"]).requires_grad_()
    loss = batch.part().loss(lp, None, torch.arange(n), Context(), (0.0,))
    grad = torch.autograd.grad(loss, lp)[0]
    assert grad.tolist() == pytest.approx([-k / n for k in case["kept"]])


def test_tokens_whose_probability_already_moved_the_right_way_are_dropped():
    case = LOSSES["shift"]
    n = len(case["lp"])
    keep = Select(shift_mask=case["threshold"]).tokens(
        doubles(case["lp"]), doubles(case["advantage"]), torch.arange(n), one_row(n, old=case["old"]), Context()
    )
    assert keep is not None
    assert keep.int().tolist() == case["kept"]


floats = st.floats(-4, -0.01)
tokens_ = st.tuples(floats, floats, floats, st.floats(-2, 2), st.sampled_from("abc"), st.integers(0, 2))


@settings(max_examples=60)
@given(st.lists(tokens_, min_size=1, max_size=10), st.sampled_from(["ppo", "reinforce", "nll"]), st.floats(0, 0.5))
def test_the_oracle_agrees_on_random_batches(tokens, surrogate, beta):
    """Losses and gradients (by central differences of the oracle) of whole batches, for every way of weighing."""
    tokens = sorted(tokens, key=lambda t: (t[4], t[5]))
    lp, old, ref, a = ([t[k] for t in tokens] for k in range(4))
    names = [t[4] for t in tokens]
    rows = [
        row(e, f"g{e}", turns=[sum(t[4] == e and t[5] == k for t in tokens) for k in range(3)])
        for e in dict.fromkeys(names)
    ]
    stream = exact(rows, [episode(r.tape, r.group) for r in rows], old=old, ref=ref)
    ids = [(f"g{t[4]}", t[4], t[5]) for t in tokens]
    every = torch.ones(len(lp), dtype=torch.bool)
    for weigh in choices(Weigh, "kind"):
        recipe = get_recipe(
            "grpo",
            {"surrogate": {"kind": surrogate}, "weigh": {"kind": weigh}, "regulariser": [{"kind": "kl", "beta": beta}]},
        )
        batch = objective.Batch(
            recipe=recipe, stream=stream, advantage=doubles(a), entered=every, selected=every, target=None
        )
        x = doubles(lp).requires_grad_()
        loss = batch.part().loss(x, None, torch.arange(len(lp)), Context(), (beta,))
        want = oracle.loss(surrogate, weigh, lp, old, ref, beta, a, ids)
        assert loss.item() == pytest.approx(want, rel=1e-9, abs=1e-12)
        grad = torch.autograd.grad(loss, x)[0] if loss.requires_grad else torch.zeros(len(lp))
        for t in range(len(lp)):
            if any(abs(math.exp(lp[t] - old[t]) - edge) < 1e-4 for edge in (0.8, 1.2)):
                continue
            up, down = ([*lp[:t], lp[t] + e, *lp[t + 1 :]] for e in (1e-6, -1e-6))
            slope = (
                oracle.loss(surrogate, weigh, up, old, ref, beta, a, ids)
                - oracle.loss(surrogate, weigh, down, old, ref, beta, a, ids)
            ) / 2e-6
            assert grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
