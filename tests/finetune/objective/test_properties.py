"""P1 to P14 for random batches under random recipes: what must change nothing changes neither loss nor gradient."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, Recipe, Row, Stream, Trainer
from tapereel.finetune.objective import Context, GroupBaseline, TimeCredit
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.objective.term import kind_of
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import score

from ..build import doubles, episode, exact, gradient, row, same, tiny_model
from ..trainer.threads import together
from ..worlds import recipes, worlds

FEW = settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=30)
MODEL, REFERENCE = tiny_model(), tiny_model(seed=1)
BATCHES = worlds(scored_only=True)
BASELINES = [kind for kind in get_args(GroupBaseline.model_fields["kind"].annotation) if kind != "none"]


def needs(recipe: Recipe, model: Any = MODEL) -> dict[str, Any]:
    """The models beside the policy that the recipe asks for. The critic says something else of every state."""
    out: dict[str, Any] = {}
    if recipe.needs_reference:
        out["reference"] = REFERENCE
    if recipe.needs_value:
        critic = Critic.on(model)
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-0.3, 0.3, critic.head.weight.numel(), dtype=torch.float64))
        out["critic"] = CriticTrainer(critic, OptimiserConfig.model_construct(lr=0.0))
    return out


def made(changes: dict[str, Any]) -> Recipe:
    return get_recipe("grpo", {"both_kls": True, **changes})


def of(recipe: Recipe, rows: list[Row], episodes: list, **options: Any) -> Any:
    return gradient(MODEL, recipe, rows, episodes, **needs(recipe), **options)


@pytest.mark.ledger("P1", "P3", "P4", "T03", "T18", "T19", "T44")
@settings(FEW, max_examples=15)
@given(BATCHES, recipes(), st.integers(1, 40))
def test_padding_packing_and_micro_batches_change_nothing(batch, changes, budget):
    _, rows, episodes = batch
    recipe = made(changes)
    whole = of(recipe, rows, episodes, micro_tokens=100_000)
    same(of(recipe, rows, episodes, micro_tokens=budget), whole, rtol=1e-8)
    same(of(recipe, rows, episodes, micro_tokens=budget, pack=True), whole, rtol=1e-8)


@pytest.mark.ledger("P2")
@FEW
@given(BATCHES, recipes(), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_of_episodes_changes_nothing(batch, changes, random):
    """Ties apart: of two equal rewards or entropies the first is the one that is kept."""
    _, rows, episodes = batch
    recipe = made(changes | {"select": {}})
    before = of(recipe, rows, episodes)
    first: dict[str, list[Row]] = {}
    for r in rows:
        first.setdefault(r.tape, []).append(r)
    tapes = random.sample(list(first), len(first))
    shuffled = [r for tape in tapes for r in first[tape]]
    same(of(recipe, shuffled, random.sample(episodes, len(episodes))), before, rtol=1e-8)


@pytest.mark.ledger("P5", "F46", "F75", "T19")
@FEW
@given(worlds(scored_only=True, most=6), recipes(), st.integers(2, 3))
def test_ranks_that_share_out_the_groups_take_the_gradient_of_one(batch, changes, size):
    _, rows, episodes = batch
    changes["baseline"] = changes["baseline"] | {"by": "batch" if changes["baseline"]["by"] == "batch" else "group"}
    recipe = made(changes)
    whole = of(recipe, rows, episodes)

    def work(ranks):
        mine = [e for e in episodes if "gh".index(e.group) % size == ranks.rank]
        tapes = {e.tape for e in mine}
        model = copy.deepcopy(MODEL)
        trainer = Trainer(
            model, recipe, OptimiserConfig.model_construct(lr=0.0, grad_clip=None), ranks=ranks, **needs(recipe, model)
        )
        prepared = trainer.prepare([r for r in rows if r.tape in tapes], mine)
        trainer.optimizer.zero_grad()
        done = trainer._accumulate(prepared.rows, prepared.batch.part(add_up=ranks.add_up))
        ranks.add_up_gradients(trainer.parameters.values())
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return done.loss, grads

    parts = together(size, work)
    loss = sum(one[0] for one in parts)
    if not whole[1]:
        assert all(not g.any() for _, grads in parts for g in grads.values())
    for _, grads in parts:
        same((loss, grads), (whole[0], whole[1] or grads), rtol=1e-8)


@pytest.mark.ledger("P6", "T02", "T17")
@MANY
@given(
    st.sampled_from([0.1, 0.3, 0.9, 1e-9, -7.7, 1e6]),
    st.integers(1, 9),
    st.sampled_from(BASELINES),
    st.sampled_from([1e-9, 1e-6, 1e-4]),
    st.sampled_from(["keep", "drop"]),
)
def test_a_flat_group_gives_exactly_zero_beside_one_that_teaches(value, n, kind, eps, flat):
    rows = [row(f"f{i}", "flat", turns=(1 + i % 2,)) for i in range(n)] + [row("a", "h"), row("b", "h")]
    episodes = [episode(f"f{i}", "flat", reward=value) for i in range(n)]
    episodes += [episode("a", "h", reward=1.0), episode("b", "h", reward=0.0)]
    recipe = get_recipe("grpo", {"baseline": {"kind": kind, "eps": eps}, "select": {"flat": flat}})
    batch = objective.prepare(recipe, exact(rows, episodes), Context())
    mine = batch.stream.group == batch.stream.episodes.groups.index("flat")
    assert not batch.advantage[mine].any()
    assert not batch.part().live[mine].any()
    assert bool(batch.entered[mine].all()) == (flat == "keep")
    assert batch.advantage[~mine].all()
    assert float(batch.part().weight.sum()) == pytest.approx(1.0)


@pytest.mark.ledger("P7", "T13")
@FEW
@given(BATCHES, recipes(), st.integers(1, 9))
def test_tokens_of_the_environment_change_no_weight_and_behind_the_last_answer_nothing_at_all(batch, changes, more):
    _, rows, episodes = batch
    recipe = made(changes)

    def grown(r: Row, at: int) -> Row:
        ids = np.insert(r.input_ids, [at] * more, 7)
        return dataclasses.replace(r, input_ids=ids, own=np.where(r.own >= at, r.own + more, r.own).astype(np.int32))

    same(of(recipe, [grown(r, len(r)) for r in rows], episodes), of(recipe, rows, episodes), rtol=1e-8)
    between = [grown(r, int(r.own[-1])) for r in rows]
    column = np.linspace(-2, -0.1, sum(len(r.own) for r in rows))
    columns = dict.fromkeys(("ref", "teacher", "value", "entropy", "anchor"), column)
    one, two = (objective.prepare(recipe, exact(x, episodes, **columns), Context()) for x in (rows, between))
    assert torch.equal(one.advantage, two.advantage)
    assert torch.equal(one.part().weight, two.part().weight)
    assert torch.equal(one.part().live, two.part().live)


@pytest.mark.ledger("P8", "F02", "T24", "T31")
@FEW
@given(BATCHES, st.floats(0.3, 2))
def test_what_is_scored_is_the_sampled_id_at_its_own_temperature(batch, temperature):
    _, rows, episodes = batch
    rows = [
        dataclasses.replace(r, temperature=np.where(np.arange(len(r.own)) % 2, 1.0, temperature).astype(np.float32))
        for r in rows
    ]
    stream = Stream.of(rows, episodes, dtype=torch.float64)
    got = score(MODEL, rows).logprob
    assert stream.token.tolist() == [int(i) for r in rows for i in r.input_ids[r.own]]
    want = []
    for r in rows:
        with torch.no_grad():
            z = MODEL(input_ids=torch.from_numpy(r.input_ids).long()[None]).logits[0].numpy()
        for at, t in zip(r.own, r.temperature.astype(np.float64), strict=True):
            tempered = z[at - 1] / t
            want.append(tempered[r.input_ids[at]] - np.log(np.exp(tempered).sum()))
    assert got.tolist() == pytest.approx(want, rel=1e-9, abs=1e-10)


@pytest.mark.ledger("P9", "F83", "T48")
@settings(FEW, max_examples=3)
@given(st.lists(worlds(scored_only=True), min_size=3, max_size=3), recipes(), st.integers(0, 2))
def test_going_on_from_any_update_is_bit_equal(batches, changes, cut):
    recipe = made(changes | {"regulariser": [{"kind": "kl", "beta": 0.1, "adaptive": {"target": 0.1, "horizon": 9}}]})

    def trainer(seed: int) -> Trainer:
        model = tiny_model(torch.float32, seed)
        others = needs(recipe, model) | {"reference": tiny_model(torch.float32)}
        return Trainer(model, recipe, OptimiserConfig(lr=1e-2, ema=0.9), **others)

    straight = trainer(0)
    disk = io.BytesIO()
    for k, (_, rows, episodes) in enumerate(batches):
        if k == cut:
            torch.save([straight.state_dict(), straight.model.state_dict()], disk)
        straight.update(rows, episodes)
    disk.seek(0)
    state, weights = torch.load(disk, weights_only=True)
    second = trainer(5)
    second.model.load_state_dict(weights)
    second.load_state_dict(state)
    for _, rows, episodes in batches[cut:]:
        second.update(rows, episodes)
    assert all(torch.equal(p, second.model.state_dict()[n]) for n, p in straight.model.state_dict().items())
    assert all(torch.equal(p, second.averaged[n]) for n, p in straight.averaged.items())
    assert (straight.betas, straight.moments, straight.skips) == (second.betas, second.moments, second.skips)


@pytest.mark.ledger("P10", "T07")
@FEW
@given(BATCHES, st.randoms(use_true_random=False))
def test_a_log_prob_of_exactly_zero_is_one_like_any_other(batch, random):
    _, rows, episodes = batch
    recipe = get_recipe("reinforce", {"baseline": {"kind": "none"}})
    zeroed = [dataclasses.replace(r, old=np.array([random.choice([x, 0.0]) for x in r.old], np.float32)) for r in rows]
    same(of(recipe, zeroed, episodes), of(recipe, rows, episodes))
    ppo = get_recipe("grpo", {"baseline": {"kind": "none"}})
    every = objective.prepare(ppo, Stream.of(zeroed, episodes), Context())
    assert every.entered.all()
    earned = {e.tape: e.reward for e in episodes}
    assert every.part().live.tolist() == [earned[r.tape] != 0 for r in rows for _ in r.own]


@pytest.mark.ledger("P11")
@settings(MANY, max_examples=12)
@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=3),
    st.lists(st.sampled_from([1.0, 0.25, -0.5, 3.0]), min_size=3, max_size=3),
    st.sampled_from([("none", 1), ("none", 2), ("loo", 2), ("loo", 3), ("mean", 2), ("mean", 3)]),
    st.sampled_from(["reinforce", "ppo", "cispo"]),
)
def test_the_expected_gradient_on_any_bandit_is_that_of_the_expected_reward(logits, rewards, kind, surrogate):
    """Every outcome of a group, weighed by its chance; subtracting the group's own mean scales it by (n - 1) / n."""
    baseline, n = kind
    leaf = doubles(logits).requires_grad_()
    lp = leaf.log_softmax(0)
    rewards = rewards[: len(logits)]
    (want,) = torch.autograd.grad((lp.exp() * doubles(rewards)).sum(), leaf, retain_graph=True)
    want = want * (1 if baseline != "mean" else (n - 1) / n)
    recipe = get_recipe("reinforce", {"baseline": {"kind": baseline}, "surrogate": {"kind": surrogate}})
    got = torch.zeros_like(want)
    for arms in itertools.product(range(len(logits)), repeat=n):
        stream = exact(
            [row(f"t{i}", turns=(1,)) for i in range(n)],
            [episode(f"t{i}", reward=rewards[a]) for i, a in enumerate(arms)],
            old=lp[list(arms)].detach(),
        )
        loss = (
            objective.prepare(recipe, stream, Context())
            .part()
            .loss(lp[list(arms)], None, torch.arange(n), Context(), (0.0,))
        )
        if loss.requires_grad:
            got -= math.prod(lp[a].exp().item() for a in arms) * torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert got.tolist() == pytest.approx(want.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.ledger("P11", "F43", "F44")
@settings(MANY, max_examples=12)
@given(
    st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=6, max_size=6),
    st.sampled_from(get_args(TimeCredit.model_fields["kind"].annotation)),
    st.floats(-1, 1),
)
def test_the_expected_gradient_over_two_turns_is_that_of_the_expected_return(logits, rewards, credit, v):
    """A tree of two turns with two arms each; GAE with lambda 1 and any values is as unbiased as returns are."""
    leaf = doubles(logits).requires_grad_()
    lp = leaf.reshape(3, 2).log_softmax(1)
    value, got = torch.zeros((), dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    recipe = get_recipe(
        "reinforce_plain",
        {
            "credit": {"kind": credit, "lam": 1.0},
            "reward": {"per": "episode" if credit == "broadcast" else "turn"},
            "weigh": {"kind": "constant"},
        },
    )
    for a, b in itertools.product(range(2), repeat=2):
        chosen = torch.stack([lp[0, a], lp[1 + a, b]])
        earned = [rewards[a], rewards[2 + 2 * a + b]]
        value = value + chosen.sum().exp() * sum(earned)
        stream = exact(
            [row("t", turns=(1, 1))],
            [episode("t", reward=sum(earned), turn_rewards=earned)],
            old=chosen.detach(),
            value=[v, -2 * v],
        )
        loss = objective.prepare(recipe, stream, Context()).part().loss(chosen, None, torch.arange(2), Context(), ())
        if loss.requires_grad:
            got -= chosen.sum().exp().item() * torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    want = torch.autograd.grad(value, leaf)[0]
    assert got.tolist() == pytest.approx(want.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.ledger("P12", "F81")
@FEW
@given(
    BATCHES,
    st.sampled_from(["weight", "advantage", "reward"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 10**6),
    st.integers(1, 40),
)
def test_a_number_that_is_not_finite_anywhere_leaves_the_weights(batch, where, value, place, budget):
    _, rows, episodes = batch
    assume(where != "reward" or not math.isnan(value))
    model = tiny_model()
    trainer = Trainer(
        model, get_recipe("reinforce", {"baseline": {"kind": "none"}}), OptimiserConfig(lr=1e-2, micro_tokens=budget)
    )
    p = model.model.layers[0].mlp.up_proj.weight
    kept = p.detach().clone()
    if where == "reward":
        k = place % len(episodes)
        assume(episodes[k].tape in {row.tape for row in rows})
        episodes[k] = dataclasses.replace(episodes[k], reward=value, turn_rewards=None)
    prepared = trainer.prepare(rows, episodes)
    if where == "weight":
        assume(any(e.reward for e in episodes if e.tape in {row.tape for row in rows}))
        with torch.no_grad():
            p.view(-1)[place % p.numel()] = value
    elif where == "advantage":
        prepared.batch.advantage[place % len(prepared.batch.advantage)] = value
    stats = trainer.step(prepared)
    assert stats.skipped in ("log-prob", "loss", "gradient")
    with torch.no_grad():
        p.copy_(kept)
    before = tiny_model().state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not trainer.optimizer.state


@pytest.mark.ledger("P13", "F08", "T18")
@FEW
@given(BATCHES, recipes(), st.randoms(use_true_random=False))
def test_an_episode_split_into_rows_keeps_its_weight_and_its_gradient(batch, changes, random):
    """Each row becomes several, with the tokens of the others as context."""
    _, rows, episodes = batch
    recipe = made(changes | {"select": {}})
    split = []
    for r in rows:
        to = np.array([random.randrange(3) for _ in r.turn])
        split += [r.where(to == k) for k in range(3) if (to == k).any()]
    assume(len(split) > len(rows))
    # Two tokens of one turn in two rows would be out of their order in time: rows are cut between turns there.
    if kind_of(recipe.credit) != "broadcast":
        split = [r.where(r.turn == k) for r in rows for k in np.unique(r.turn)]
    same(of(recipe, split, episodes), of(recipe, rows, episodes), rtol=1e-8)


@pytest.mark.ledger("P14", "T09")
@MANY
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.integers(1, 4)), min_size=2, max_size=5),
    st.sampled_from(BASELINES),
    st.sampled_from(["group", "batch"]),
)
def test_a_tape_with_more_calls_is_one_episode_in_its_group(tapes, kind, by):
    recipe = get_recipe("grpo", {"baseline": {"kind": kind, "by": by}})
    found = []
    for calls in ([1] * len(tapes), [n for _, n in tapes]):
        rows = [row(f"t{i}", turns=(1,), first_turn=k) for i, n in enumerate(calls) for k in range(n)]
        episodes = [episode(f"t{i}", reward=r) for i, (r, _) in enumerate(tapes)]
        batch = objective.prepare(recipe, exact(rows, episodes), Context())
        per_tape = [batch.advantage[batch.stream.episode == i] for i in range(len(tapes))]
        assert all((a == a[0]).all() for a in per_tape)
        found.append([a[0].item() for a in per_tape])
    assert found[0] == found[1]
