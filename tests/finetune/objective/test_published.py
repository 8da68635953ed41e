"""What other libraries publish of their losses, number for number: TRL, verl, AReaL and prime-rl on one small batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tapereel.finetune import Recipe
from tapereel.finetune.objective import Anchor, Context, GroupBaseline, Select, kl
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe

from ..build import doubles, episode, exact, ledger, row, simple

CASE = ledger("published")
TRL = CASE["trl"]
N = sum(CASE["lengths"])


def computed(recipe: Recipe) -> tuple[float, torch.Tensor, Context]:
    """(loss, gradient by log-prob, what was counted) of the batch with the advantages given."""
    rows = [row(f"t{i}", f"g{i}", turns=(n,)) for i, n in enumerate(CASE["lengths"])]
    columns = {"old": CASE["old"], "ref": CASE["ref"], "anchor": CASE["prox"]}
    stream = exact(rows, [episode(r.tape, r.group) for r in rows], **columns)
    every = torch.ones(N, dtype=torch.bool)
    batch = objective.Batch(
        recipe=recipe,
        stream=stream,
        advantage=doubles(CASE["advantages"])[stream.episode],
        entered=every,
        selected=every,
        target=None,
    )
    lp, context = doubles(CASE["lp"]).requires_grad_(), Context()
    loss = batch.part().loss(lp, None, torch.arange(N), context, objective.betas(recipe))
    return loss.item(), torch.autograd.grad(loss, lp)[0], context


def changed(**terms: Any) -> float:
    return computed(get_recipe("grpo", terms))[0]


@pytest.mark.ledger("F37", "F38")
def test_trls_group_advantage():
    stream = exact(*simple(TRL["rewards"]))
    got = GroupBaseline(kind="std", eps=1e-4)(
        stream.episodes.reward, torch.ones(4, dtype=torch.bool), stream, Context()
    )
    assert got.tolist() == pytest.approx(TRL["advantage"], rel=1e-12)


@pytest.mark.ledger("F60")
def test_trls_k3():
    assert kl.estimate("k3", doubles(CASE["lp"]), doubles(CASE["ref"])).tolist() == pytest.approx(TRL["k3"], rel=1e-12)


@pytest.mark.ledger("F52", "F53", "T18", "X4")
@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("grpo", {"kind": "episode"}),
        ("bnpo", {"kind": "token"}),
        ("dapo", {"kind": "token"}),
        ("luspo", {"kind": "constant"}),
        ("dr_grpo", {"kind": "constant", "limit": TRL["max_completion_length"]}),
    ],
)
def test_trls_ways_of_adding_up(name, weigh):
    assert changed(weigh=weigh) == pytest.approx(TRL["aggregation"][name], rel=1e-12)


@pytest.mark.ledger("X2", "T23")
def test_trls_cispo():
    case = TRL["cispo"]
    loss, grad, _ = computed(get_recipe("cispo", {"surrogate": {"cap": case["cap"]}}))
    assert loss == pytest.approx(sum(case["loss"]) / N, rel=1e-12)
    assert grad.tolist() == pytest.approx([g / N for g in case["gradient"]], rel=1e-12)


def test_trls_sapo_and_gspo():
    case = TRL["sapo"]
    constants = {"tau": case["tau"], "tau_negative": case["tau_negative"]}
    one = computed(get_recipe("sapo", {"surrogate": constants, "weigh": {"kind": "token"}}))[0]
    assert one == pytest.approx(sum(case["loss"]) / N, rel=1e-12)
    assert computed(get_recipe("gspo"))[0] == pytest.approx(TRL["gspo"], rel=1e-12)


@pytest.mark.ledger("T18", "X4")
def test_verls_norm_is_not_divided_by_the_batch():
    got = changed(weigh={"kind": "sum", "limit": TRL["max_completion_length"]})
    assert got == pytest.approx(CASE["verl"]["seq-mean-token-sum-norm"], rel=1e-12)
    assert got == pytest.approx(CASE["verl"]["factor"] * TRL["aggregation"]["dr_grpo"], rel=1e-12)


@pytest.mark.parametrize(("how", "name"), [("truncate", "capped"), ("mask", "masked")])
def test_areals_decoupled_loss_keeps_the_count_of_tokens_below_the_line(how, name):
    case = CASE["areal"]
    anchor = {"to": "recomputed", "weight": how, "low": case["low"], "high": case["high"]}
    loss, _, context = computed(get_recipe("grpo", {"anchor": anchor}))
    assert loss == pytest.approx(case[name], rel=1e-12)
    if how == "mask":
        assert context.sums["importance/masked"] == case["rejected"]


@pytest.mark.ledger("F36", "F42", "X3")
def test_prime_rls_centred_advantages_and_its_mask_on_the_change_of_probability():
    case = CASE["prime_rl"]
    groups = [str(i) for i, group in enumerate(case["rewards"]) for _ in group]
    stream = exact(*simple([float(r) for group in case["rewards"] for r in group], groups, tokens=1))
    context = Context()
    recipe = get_recipe("dr_grpo", {"select": {"flat": "drop"}})
    batch = objective.prepare(recipe, stream, context)
    assert batch.advantage.tolist() == pytest.approx([a for group in case["advantage"] for a in group])
    assert context.sums["episode/flat"] == len(case["rewards"][1])
    rows = [row(f"t{i}", turns=(n,)) for i, n in enumerate(CASE["lengths"])]
    stream = exact(rows, [episode(r.tape) for r in rows], old=CASE["old"])
    a = doubles(CASE["advantages"])[stream.episode]
    keep = Select(shift_mask=case["threshold"]).tokens(doubles(CASE["lp"]), a, torch.arange(N), stream, Context())
    assert keep is not None
    assert keep.int().tolist() == case["kept"]
    assert 0 in case["kept"]


def test_a_mask_over_sums_zeroes_a_long_episode_that_one_over_means_keeps_and_each_says_how_much():
    case = CASE["sequence_mask"]
    rows = [row(f"t{i}", turns=(n,)) for i, n in enumerate(case["lengths"])]
    n = sum(case["lengths"])
    stream = exact(rows, [episode(r.tape) for r in rows], old=[-2.0] * n, anchor=[-2.0 + case["per_token"]] * n)
    for combine in ("sum", "mean"):
        term = Anchor(to="recomputed", weight="mask", per="episode", combine=combine, high=case["cap"])
        context = Context()
        _, weight = term(doubles([-1.0] * n), torch.arange(n), stream, context)
        assert weight is not None
        dropped, lengths = case[f"dropped_by_{combine}"], case["lengths"]
        want = [0.0 if gone else i for i, gone in zip(case[combine], dropped, strict=True)]
        assert weight.tolist() == pytest.approx([want[int(e)] for e in stream.episode], rel=1e-12)
        assert context.sums["importance/masked"] == sum(k * gone for k, gone in zip(lengths, dropped, strict=True))
