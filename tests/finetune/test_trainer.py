"""The trainer: exact accumulation, guards, determinism, and the properties P1-P14 down to the gradient."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.finetune import objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.schedule import Schedule
from tapereel.finetune.score import score
from tapereel.finetune.stream import BadBatch, Stream
from tapereel.finetune.trainer import Trainer
from tapereel.finetune.words import Context, Weigh

from .build import batch, episode, exact, ledger, row, tiny_model

WEIGHS = ["token", "episode", "turn", "group", "constant", "sum"]


def gradient(model, recipe, rows, episodes, **options):
    """(loss, gradients by name) of one update that isn't taken."""
    trainer = Trainer(model, recipe, lr=0.0, grad_clip=None, **options)
    prepared = trainer.prepare(rows, episodes)
    trainer.optimizer.zero_grad()
    done = trainer._accumulate(prepared.rows, prepared.batch.part())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return done.loss, grads


def same(one, other, rtol=1e-9):
    assert one[0] == pytest.approx(other[0], rel=rtol, abs=1e-13)
    assert one[1].keys() == other[1].keys()
    for name, g in one[1].items():
        torch.testing.assert_close(g, other[1][name], rtol=rtol, atol=1e-12)


RECIPES = [get_recipe("grpo"), get_recipe("reinforce"), get_recipe("sft"),
           get_recipe("grpo", {"surrogate": {"per": "episode"}, "weigh": {"kind": "episode"}}),
           get_recipe("grpo", {"regulariser": [{"kind": "entropy", "coefficient": 0.1}, {"kind": "kl", "to": "sampler",
                                                                                         "beta": 0.2}]}),
           get_recipe("grpo", {"anchor": {"to": "recomputed", "weight": "truncate", "per": "turn", "high": 1.05}})]
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
        trainer = Trainer(model, recipe, lr=0.0)
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
    trainer = Trainer(model, get_recipe("grpo"), lr=0.1, weight_decay=0.1)
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
    stats = Trainer(model, recipe, lr=0.0, reference=tiny_model(seed=1)).update(rows, flat)
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
@pytest.mark.parametrize(("baseline", "n", "factor"), [
    ("none", 2, 1.0), ("loo", 2, 1.0), ("loo", 3, 1.0), ("mean", 2, 0.5), ("mean", 3, 2 / 3),
])
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
            stream = exact([row(f"t{i}", turns=(1,)) for i in range(n)],
                           [episode(f"t{i}", reward=rewards[a]) for i, a in enumerate(arms)])
            stream = dataclasses.replace(stream, old=lp[list(arms)].detach())
            part = objective.prepare(recipe, stream, Context()).part()
            loss = part.loss(lp[list(arms)], None, torch.arange(n), Context(), (0.0,))
            if loss.requires_grad:
                got -= chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert got.tolist() == pytest.approx((factor * want).tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.ledger("P12", "F81", "T46")
@pytest.mark.parametrize("where", ["weights", "loss", "gradient"])
def test_a_number_that_is_not_finite_leaves_the_weights_and_the_next_update_is_fine(where):
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(model, get_recipe("reinforce"), lr=1e-2)
    assert trainer.update(rows, episodes).applied
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(trainer.state_dict())
    if where == "weights":
        with torch.no_grad():
            kept = model.model.layers[0].mlp.up_proj.weight[0, 0].clone()
            model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
        stats = trainer.update(rows, episodes)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = kept
        assert stats.skipped == "log-prob"
    elif where == "loss":
        prepared = trainer.prepare(rows, episodes)
        prepared.batch.advantage[3] = math.inf
        stats = trainer.step(prepared)
        assert stats.skipped == "loss"
    else:
        hook = model.model.norm.weight.register_hook(lambda g: g * math.nan)
        stats = trainer.update(rows, episodes)
        hook.remove()
        assert stats.skipped == "gradient"
    assert math.isnan(stats.grad_norm) or where == "gradient"
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert state["steps"] == trainer.steps == 1
    now = trainer.state_dict()["optimizer"]["state"]
    for old, new in zip(state["optimizer"]["state"].values(), now.values(), strict=True):
        assert all(torch.equal(old[k], new[k]) for k in old)
    assert sum(trainer.skips.values()) == 1
    assert trainer.update(rows, episodes).applied


@pytest.mark.ledger("T46")
def test_a_bad_micro_batch_late_in_the_update_takes_back_the_earlier_ones():
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(model, get_recipe("reinforce"), lr=1e-2, micro_tokens=1)
    before = copy.deepcopy(model.state_dict())
    prepared = trainer.prepare(rows, episodes)
    longest = max(range(6), key=lambda i: rows[i].own[-1])
    prepared.batch.advantage[int(prepared.batch.stream.rows[longest])] = math.inf
    assert trainer.step(prepared).skipped == "loss"
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


@pytest.mark.ledger("P12")
def test_every_kind_of_bad_input_is_named():
    with pytest.raises(BadBatch, match=r"tape 'b' has a log-prob of 0\.5"):
        Stream.of([row("a"), row("b", old=[-1.0, 0.5, -1.0])], [episode("a"), episode("b")])
    with pytest.raises(BadBatch, match=r"0\.0015, above 0 by more than 0\.001"):
        Stream.of([row(old=[-1.0, 1.5e-3, -1.0])], [episode()])
    assert Stream.of([row(old=[-1.0, 5e-4, -1.0])], [episode()]).old.tolist() == [-1.0, 0.0, -1.0]
    with pytest.raises(BadBatch, match="'b' is given twice"):
        Stream.of([row()], [episode(), episode("b"), episode("c"), episode("b")])
    with pytest.raises(BadBatch, match="isn't among"):
        Stream.of([row("other")], [episode()])
    with pytest.raises(BadBatch, match="group by one id"):
        Stream.of([row(group="h")], [episode()])
    with pytest.raises(BadBatch, match="add up to 3"):
        Stream.of([row(turns=(1, 1))], [episode(reward=1.0, turn_rewards=[1.0, 2.0])])
    with pytest.raises(BadBatch, match="reference model"):
        Trainer(tiny_model(), get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.1}]}))


@pytest.mark.ledger("F04")
def test_the_rows_of_a_stream_are_slices_of_it():
    case = ledger("rows")["F04"]
    rows = [row(f"t{i}", turns=(n,)) for i, n in enumerate(case["lens"])]
    stream = exact(rows, [episode(r.tape) for r in rows])
    values = torch.tensor(case["values"])
    assert [values[a:b].tolist() for a, b in itertools.pairwise(stream.rows.tolist())] == case["expected"]


def test_an_episode_without_tokens_has_its_turn_and_one_without_turn_rewards_earned_at_its_last():
    episodes = [episode("a", reward=2.0), episode("b", reward=3.0), episode("c", reward=4.0, turn_rewards=[])]
    stream = Stream.of([row("b", turns=(1, 1))], episodes)
    assert stream.turns.reward.tolist() == [2.0, 0.0, 3.0, 4.0]
    assert stream.turns.episode.tolist() == [0, 1, 1, 2]
    assert stream.tokens_of_episode.tolist() == [0, 2, 0]
    empty = Stream.of([], episodes)
    assert len(empty) == 0
    recipe = get_recipe("ppo", {"credit": {"kind": "returns"}})
    assert objective.prepare(recipe, empty, Context()).advantage.shape == (0,)
    assert Trainer(tiny_model(), get_recipe("grpo")).update([], episodes).skipped == "nothing to train on"


@pytest.mark.ledger("P9", "F83")
def test_going_on_from_a_saved_state_is_bit_equal():
    kl = {"kind": "kl", "beta": 0.1, "adaptive": {"target": 0.01, "horizon": 50}}
    recipe = get_recipe("grpo", {"shape": [{"kind": "running"}], "regulariser": [kl]})
    schedule = Schedule(kind="cosine", warmup=2, total=9)

    def trainer(model):
        return Trainer(model, recipe, lr=1e-2, weight_decay=0.01, schedule=schedule,
                       reference=tiny_model(torch.float32, 1), ema=0.9)

    straight = trainer(tiny_model(torch.float32))
    for i in range(6):
        assert straight.update(*batch(i)).applied
    first = trainer(tiny_model(torch.float32))
    for i in range(3):
        first.update(*batch(i))
    disk = io.BytesIO()
    torch.save({"trainer": first.state_dict(), "model": first.model.state_dict()}, disk)
    disk.seek(0)
    saved = torch.load(disk, weights_only=True)
    second = trainer(tiny_model(torch.float32, seed=9))
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["trainer"])
    for i in range(3, 6):
        second.update(*batch(i))
    assert all(torch.equal(p, second.model.state_dict()[n]) for n, p in straight.model.state_dict().items())
    assert all(torch.equal(p, second.averaged[n]) for n, p in straight.averaged.items())
    assert straight.betas == second.betas
    assert straight.betas != list(objective.betas(recipe))


@pytest.mark.ledger("F79")
def test_a_mini_batch_is_live_nowhere_else():
    rows, episodes = batch(model=tiny_model())
    prepared = objective.prepare(get_recipe("sft"), exact(rows, episodes), Context())
    mine = torch.tensor([True, False, True, False, False, True])
    part = prepared.part(mine)
    assert part.live.tolist() == mine[prepared.stream.episode].tolist()
    assert (part.weight > 0).tolist() == part.live.tolist()
    assert float(part.weight.sum()) == pytest.approx(1.0)


@pytest.mark.ledger("F79")
def test_several_updates_on_one_rollout_batch_share_its_advantages_and_anchor():
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(model, get_recipe("grpo", {"anchor": {"to": "recomputed"}}), lr=1e-2)
    first = score(model, rows).logprob
    stats = list(trainer.updates(rows, episodes, epochs=2, minibatches=3, seed=4))
    assert [s.step for s in stats] == [1, 2, 3, 4, 5, 6]
    assert stats[0].stream.anchor is not None
    torch.testing.assert_close(stats[0].stream.anchor, first)
    for epoch in (stats[:3], stats[3:]):
        assert torch.equal(sum((s.weight > 0).int() for s in epoch), torch.ones(len(first), dtype=torch.int32))
        assert all(float(s.weight.sum()) == pytest.approx(1.0) for s in epoch)
    orders = [[int(s.weight.argmax()) for s in epoch] for epoch in (stats[:3], stats[3:])]
    assert all(torch.equal(s.advantage, stats[0].advantage) for s in stats)
    assert orders[0] != orders[1] or orders[0] != sorted(orders[0])
    with pytest.raises(BadBatch, match="fewer mini-batches"):
        next(trainer.updates(rows, episodes, minibatches=7))


@pytest.mark.ledger("F72", "F73", "T12", "F71")
def test_diagnostics_are_sums_and_counts_over_own_tokens():
    table = ledger("regularisers")
    from tapereel.finetune.trainer import observe
    from tapereel.finetune.words import Sums

    for lp, old, want in ((table["F73"]["log_ratios"], [0.0, 0.0], table["F73"]["ess"]), ([0.3, 0.3], [0.0, 0.0], 1.0)):
        sums = Sums()
        observe(torch.tensor(lp, dtype=torch.float64), torch.tensor(old, dtype=torch.float64), sums)
        assert sums["ratio"] ** 2 / sums["ratio/square"] / sums.counts["ratio"] == pytest.approx(want)
    case, sums = table["F72"], Sums()
    observe(torch.tensor(case["lp"], dtype=torch.float64), torch.tensor(case["old"], dtype=torch.float64), sums)
    assert sums.mean("kl/old") == pytest.approx(case["expected"])
    assert sums.highs["mismatch"] == 1.0


@pytest.mark.ledger("F69")
def test_the_running_average_moves_once_per_update():
    case = ledger("regularisers")["F69"]
    model = tiny_model()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(case["average"])
    trainer = Trainer(model, get_recipe("sft"), lr=0.0, ema=case["decay"], micro_tokens=1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(case["weight"])
    assert trainer.update([row("a"), row("b")], [episode("a"), episode("b")]).applied
    assert all(float((p - case["expected"]).abs().max()) < 1e-12 for p in trainer.averaged.values())


@pytest.mark.ledger("P8")
def test_in_synchronous_mode_sampler_and_trainer_agree_on_every_token():
    model = tiny_model(torch.float32)
    rows, episodes = batch()
    lp = score(model, rows).logprob.numpy()
    at = np.concatenate([[0], np.cumsum([len(r.own) for r in rows])])
    rows = [dataclasses.replace(r, old=lp[a:b]) for r, a, b in zip(rows, at, at[1:], strict=False)]
    stats = Trainer(model, get_recipe("grpo"), micro_tokens=16).update(rows, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch < 1e-5
    assert stats.ess == pytest.approx(1.0, abs=1e-5)
    shifted = [dataclasses.replace(r, old=np.roll(r.old, 1)) for r in rows]
    stats = Trainer(model, get_recipe("grpo")).update(shifted, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch > 1e-2


def test_learning_rate_clipping_and_decay_do_what_they_say():
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(model, get_recipe("grpo"), lr=0.5, schedule=Schedule(kind="linear", total=4), grad_clip=1e-3)
    assert [trainer.update(rows, episodes).lr for _ in range(3)] == [0.5, 0.375, 0.25]
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, get_recipe("sft"), lr=1e-6, weight_decay=0.5)
    trainer.update(rows, episodes)
    gone = {n: float((p - before[n]).norm()) for n, p in model.state_dict().items()}
    assert all(g > 0 for g in gone.values())
    decay = {g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"] if p.ndim < 2}
    assert decay == {0.0}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(WEIGHS), st.sampled_from(["keep", "drop"]))
@pytest.mark.ledger("P13", "T18")
def test_weights_add_up_to_one_where_they_are_means(seed, weigh, flat):
    rows, episodes = batch(seed)
    recipe = get_recipe("grpo", {"weigh": {"kind": weigh}, "select": {"flat": flat}})
    part = objective.prepare(recipe, exact(rows, episodes), Context()).part()
    if weigh in ("token", "episode", "turn", "group"):
        assert float(part.weight.sum()) == pytest.approx(1.0, rel=1e-12)
    assert Weigh(kind=weigh).kind == weigh


@pytest.mark.ledger("F18")
def test_the_reference_scores_a_rollout_batch_once_however_many_updates_follow():
    rows, episodes = batch(model=tiny_model())
    reference = tiny_model(seed=1)
    forwards = []
    reference.model.register_forward_hook(lambda *_: forwards.append(1))
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.1}]})
    trainer = Trainer(tiny_model(), recipe, reference=reference)
    assert len(list(trainer.updates(rows, episodes, epochs=3, minibatches=2))) == 6
    assert len(forwards) == 1


@pytest.mark.ledger("F77", "F33", "F76")
def test_rewards_and_advantages_are_reported_as_sums_from_which_any_mean_follows():
    rows, episodes = batch(model=tiny_model())
    recipe = get_recipe("grpo", {"shape": [{"kind": "clip", "low": 0, "high": 0.5}]})
    stats = Trainer(tiny_model(), recipe).update(rows, episodes)
    rewards = [e.reward for e in episodes]
    assert stats.sums.mean("reward") == pytest.approx(np.mean(rewards)), "raw, not shaped"
    assert stats.sums.std("reward") == pytest.approx(np.std(rewards))
    advantage = stats.advantage.numpy()
    assert stats.sums.std("advantage") == pytest.approx(advantage.std())
    assert (stats.sums.lows["advantage"], stats.sums.highs["advantage"]) == (advantage.min(), advantage.max())
    twice = type(stats.sums)()
    twice.merge(stats.sums)
    twice.merge(stats.sums)
    assert twice["reward"] == 2 * stats.sums["reward"]
    assert twice.mean("reward") == stats.sums.mean("reward")
    assert twice.mean("nothing") is None
    assert set(stats.sums.flat()) >= {"reward", "reward/min", "advantage/max", "mismatch/max"}


@pytest.mark.ledger("X7", "F01")
def test_every_token_knows_its_policy_version_call_and_agent():
    rows = [dataclasses.replace(row("a", turns=(2, 1), calls=["c1", "c2"]), versions=("run:3", "run:4"),
                                version=np.array([0, 1, 1], np.int32), agents=("planner", "planner/searcher")),
            dataclasses.replace(row("b", turns=(1,), calls=["c1"]), version=np.array([-1], np.int32))]
    stream = Stream.of(rows, [episode("a"), episode("b", reward=None)])
    assert [stream.versions[v] if v >= 0 else None for v in stream.version] == ["run:3", "run:4", "run:4", None]
    assert [stream.calls[c] for c in stream.call] == [("a", "c1"), ("a", "c1"), ("a", "c2"), ("b", "c1")]
    assert [stream.agents[a] for a in stream.agent] == ["planner", "planner", "planner/searcher", "player"]
    assert stream.token.tolist() == [int(t) for r in rows for t in r.input_ids[r.own]]
    assert stream.episodes.reward.isnan().tolist() == [False, True]
