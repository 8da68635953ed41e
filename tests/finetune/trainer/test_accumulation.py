"""The gradient of an update: exact accumulation, and the properties P1-P14 down to the gradient."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.finetune import OptimiserConfig, Stream, Trainer
from tapereel.finetune.objective import Context, Weigh
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import trainer
from tapereel.finetune.trainer.logprobs import score_ahead

from ..build import batch, choices, episode, exact, gradient, row, same, tiny_model

WEIGHS = choices(Weigh, "kind")
RECIPES = [
    get_recipe("grpo"),
    get_recipe("reinforce"),
    get_recipe("sft"),
    get_recipe("grpo", {"surrogate": {"per": "episode"}, "weigh": {"kind": "episode"}}),
    get_recipe(
        "grpo", {"regulariser": [{"kind": "entropy", "coefficient": 0.1}, {"kind": "kl", "to": "sampler", "beta": 0.2}]}
    ),
    get_recipe("grpo", {"anchor": {"to": "recomputed", "weight": "truncate", "per": "turn", "high": 1.05}}),
]
IDS = ["grpo", "reinforce", "sft", "episode ratio", "regularised", "importance per turn"]


@pytest.mark.ledger("P1", "P2", "P4", "F80", "T18", "T19")
@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_micro_batches_padding_and_row_order_change_neither_loss_nor_gradient(recipe):
    model = tiny_model()
    rows, episodes = batch(model=model)
    whole = gradient(model, recipe, rows, episodes, micro_tokens=100_000)
    assert any(g.abs().max() > 1e-4 for g in whole[1].values())
    for micro in (1, 9, 25):
        same(gradient(model, recipe, rows, episodes, micro_tokens=micro), whole)
    order = [4, 2, 0, 5, 3, 1]
    same(gradient(model, recipe, [rows[i] for i in order], episodes[::-1], micro_tokens=20), whole)


@pytest.mark.ledger("P3", "F03")
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=IDS[:2])
def test_a_loss_written_out_by_hand_has_the_same_gradient(recipe):
    """One row at a time through the model's own logits, the recipe's formula as in the ledger."""
    model = tiny_model()
    rows, episodes = batch(model=model)
    got = gradient(model, recipe, rows, episodes)
    total = sum(len(r.own) for r in rows)
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64).reshape(2, 3)
    eps = recipe.baseline.eps
    a = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)).flatten()
    loss = torch.zeros((), dtype=torch.float64)
    for r, adv in zip(rows, a, strict=True):
        ids, own = torch.from_numpy(r.input_ids.astype(np.int64)), torch.from_numpy(r.own.astype(np.int64))
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[own - 1].gather(1, ids[own, None])[:, 0]
        if recipe.name == "reinforce":
            loss = loss - (adv * lp).sum() / total
        else:
            ratio = (lp - torch.from_numpy(r.old).double()).exp()
            loss = loss - torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).sum() / total
    loss.backward()
    same(got, (loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))


@pytest.mark.ledger("P5", "F75")
@pytest.mark.parametrize("weigh", WEIGHS)
def test_ranks_that_add_up_their_totals_add_up_to_the_whole(weigh):
    model = tiny_model()
    rows, episodes = batch(model=model)
    recipe = get_recipe("grpo", {"weigh": {"kind": weigh}})
    whole = gradient(model, recipe, rows, episodes)
    halves = [(rows[:3], episodes[:3]), (rows[3:], episodes[3:])]
    streams = [Stream.of(r, e, dtype=torch.float64) for r, e in halves]
    n = 1.0 if weigh == "sum" else sum(recipe.weigh.totals(s, torch.ones(len(s), dtype=torch.bool)) for s in streams)
    loss, grads = 0.0, {}
    for half, stream in zip(halves, streams, strict=True):
        trainer = Trainer(model, recipe, OptimiserConfig.model_construct(lr=0.0))
        part = objective.prepare(recipe, stream, Context()).part(add_up=lambda t, n=n: torch.full_like(t, n))
        model.zero_grad()
        loss += trainer._accumulate(half[0], part).loss
        for name, p in model.named_parameters():
            grads[name] = grads.get(name, 0) + p.grad
    same((loss, grads), whole)


@pytest.mark.ledger("P13", "P14")
@pytest.mark.parametrize("weigh", WEIGHS)
def test_an_episode_split_into_rows_keeps_its_weight(weigh):
    one = row("a", turns=(2, 3), between=1)
    parts = [row("a", turns=(2,)), row("a", turns=(3,), first_turn=1)]
    other = row("b", turns=(4,))
    episodes = [episode("a", reward=1.0), episode("b", reward=0.0)]
    recipe = get_recipe("grpo", {"weigh": {"kind": weigh}})
    weights, advantages = [], []
    for rows in ([one, other], [*parts, other]):
        prepared = objective.prepare(recipe, exact(rows, episodes), Context())
        weights.append(prepared.part().weight)
        advantages.append(prepared.advantage)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(advantages[0], advantages[1])


@pytest.mark.ledger("P7")
@pytest.mark.parametrize("weigh", WEIGHS)
def test_another_environment_token_changes_no_weight_and_no_advantage(weigh):
    episodes = [episode("a", reward=1.0), episode("b", reward=0.0)]
    recipe = get_recipe("grpo", {"weigh": {"kind": weigh}})
    got = []
    for between in (1, 6):
        rows = [row("a", turns=(2, 1), between=between, prompt=between), row("b", turns=(3,), after=between)]
        prepared = objective.prepare(recipe, exact(rows, episodes), Context())
        got.append((prepared.part().weight, prepared.advantage))
    assert torch.equal(got[0][0], got[1][0])
    assert torch.equal(got[0][1], got[1][1])


@pytest.mark.ledger("P6", "T02")
def test_a_flat_group_moves_no_weight_and_is_still_counted():
    model = tiny_model()
    rows, episodes = batch(model=model)
    flat = [dataclasses.replace(e, reward=0.1) for e in episodes]
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, get_recipe("grpo"), OptimiserConfig(lr=0.1, weight_decay=0.1))
    stats = trainer.update(rows, flat)
    assert stats.skipped == "nothing to train on"
    assert trainer.skips == {"nothing to train on": 1}
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    half = [dataclasses.replace(e, reward=0.1) if i < 3 else e for i, e in enumerate(episodes)]
    alone = gradient(model, get_recipe("grpo"), rows[3:], episodes[3:])
    both = gradient(model, get_recipe("grpo"), rows, half)
    share = sum(len(r.own) for r in rows[3:]) / sum(len(r.own) for r in rows)
    same((both[0], both[1]), (alone[0] * share, {n: g * share for n, g in alone[1].items()}))


@pytest.mark.ledger("P6")
def test_a_flat_group_under_a_kl_loss_is_forwarded_for_the_kl_alone():
    model = tiny_model()
    rows, episodes = batch(model=model)
    flat = [dataclasses.replace(e, reward=1.0) for e in episodes]
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.1}]})
    stats = Trainer(model, recipe, OptimiserConfig.model_construct(lr=0.0), reference=tiny_model(seed=1)).update(
        rows, flat
    )
    assert stats.applied
    assert stats.loss == pytest.approx(0.1 * stats.sums.mean("kl/reference/k3"), rel=1e-6)


@pytest.mark.ledger("P10", "T07")
def test_a_log_prob_of_exactly_zero_still_trains():
    model = tiny_model()
    rows = [row("a", old=[0.0, 0.0, 0.0]), row("b", old=[-0.5] * 3)]
    recipe = get_recipe("reinforce")
    zero = gradient(model, recipe, rows, [episode("a", reward=1.0), episode("b", reward=0.0)])
    rows = [row("a", old=[-1.0] * 3), row("b", old=[-0.5] * 3)]
    same(zero, gradient(model, recipe, rows, [episode("a", reward=1.0), episode("b", reward=0.0)]))


@pytest.mark.ledger("P10", "T07")
def test_an_unknown_log_prob_is_nan_and_only_that_keeps_a_token_out():
    rows = [row("a", old=[-1.0, math.nan, 0.0]), row("b")]
    stream = exact(rows, [episode("a"), episode("b", reward=0.0)])
    context = Context()
    entered = objective.prepare(get_recipe("grpo"), stream, context).entered
    assert entered.tolist() == [True, False, True, True, True, True]
    assert context.sums["token/authored"] == 1
    assert objective.prepare(get_recipe("sft"), stream, Context()).entered.all()


@pytest.mark.ledger("P11")
@pytest.mark.parametrize(
    ("baseline", "n", "factor"),
    [
        ("none", 2, 1.0),
        ("loo", 2, 1.0),
        ("loo", 3, 1.0),
        ("mean", 2, 0.5),
        ("mean", 3, 2 / 3),
    ],
)
def test_the_expected_gradient_on_a_bandit_is_that_of_the_expected_reward(baseline, n, factor):
    """All outcomes of a group of n on three arms. Subtracting the group's own mean scales it by (n - 1) / n."""
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = [1.0, 0.25, -0.5]
    lp = logits.log_softmax(0)
    value = (lp.exp() * torch.tensor(rewards, dtype=torch.float64)).sum()
    want = torch.autograd.grad(value, logits, retain_graph=True)[0]
    for surrogate in ("reinforce", "ppo", "cispo"):
        recipe = get_recipe("reinforce", {"baseline": {"kind": baseline}, "surrogate": {"kind": surrogate}})
        got = torch.zeros(3, dtype=torch.float64)
        for arms in itertools.product(range(3), repeat=n):
            chance = math.prod(lp[a].exp().item() for a in arms)
            stream = exact(
                [row(f"t{i}", turns=(1,)) for i in range(n)],
                [episode(f"t{i}", reward=rewards[a]) for i, a in enumerate(arms)],
            )
            stream = dataclasses.replace(stream, old=lp[list(arms)].detach())
            part = objective.prepare(recipe, stream, Context()).part()
            loss = part.loss(lp[list(arms)], None, torch.arange(n), Context(), (0.0,))
            if loss.requires_grad:
                got -= chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert got.tolist() == pytest.approx((factor * want).tolist(), rel=1e-9, abs=1e-12)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(WEIGHS), st.sampled_from(["keep", "drop"]))
@pytest.mark.ledger("P13", "T18")
def test_weights_add_up_to_one_where_they_are_means(seed, weigh, flat):
    rows, episodes = batch(seed)
    recipe = get_recipe("grpo", {"weigh": {"kind": weigh}, "select": {"flat": flat}})
    part = objective.prepare(recipe, exact(rows, episodes), Context()).part()
    if weigh in ("token", "episode", "turn", "group"):
        assert float(part.weight.sum()) == pytest.approx(1.0, rel=1e-12)
    assert Weigh(kind=weigh).kind == weigh


@pytest.mark.parametrize("entropy", [False, True])
def test_a_loss_over_episodes_forwards_tokens_once_as_far_as_memory_allows(entropy, monkeypatch):
    """GSPO needs all log-probs before its gradient. What it computed for them is used again, with the same bits."""
    model = tiny_model()
    rows, episodes = batch(model=model)
    changes = {"regulariser": [{"kind": "entropy", "coefficient": 0.1}]} if entropy else {}
    recipe, forwards = get_recipe("gspo", changes), list[int]()
    model.model.register_forward_hook(lambda *_: forwards.append(1))

    def found(micro, **other):
        monkeypatch.setattr(trainer, "score_ahead", lambda *args, **named: score_ahead(*args, **(named | other)))
        forwards.clear()
        return gradient(model, recipe, rows, episodes, micro_tokens=micro), len(forwards)

    for micro in (9, 25, 40):
        (loss, grads), once = found(micro)
        (again, others), twice = found(micro, most=0)
        assert once < twice
        assert loss == again
        assert all(torch.equal(grads[name], others[name]) for name in grads.keys() | others.keys())
    assert found(40, most=10_000)[1] == found(40, most=0)[1] / 2
