"""The critic: value loss in closed form, nothing of it in the policy's gradient, and ppo end to end."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, Stream, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.objective import Context
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Division, Schedule, Value, plan

from ..build import batch, doubles, episode, ledger, row, tiny_model


@pytest.mark.ledger("F58")
def test_the_clipped_value_loss():
    for case in ledger("losses")["F58"]:
        context = Context()
        value = doubles([case["value"]]).requires_grad_()
        loss = Value(clip=case["clip"])(value, doubles([case["old"]]), doubles([case["target"]]), context)
        assert loss.item() == pytest.approx(case["loss"], rel=1e-9)
        assert torch.autograd.grad(loss.sum(), value)[0].item() == pytest.approx(case["grad"], abs=1e-12)
        if case["clip"] is not None:
            assert context.sums["value/clipped"] == (case["grad"] == 0)
    assert Value().clip == 0.2
    assert Value(clip=0.9).clip == 0.9
    with pytest.raises(ValidationError):
        Value(clip=0.0)


@pytest.mark.ledger("F59")
@pytest.mark.parametrize("make", [Critic.of, Critic.on])
def test_the_critics_loss_never_touches_the_policy(make):
    model = tiny_model()
    rows, episodes = batch(model=model)
    recipe = get_recipe("ppo")
    before = copy.deepcopy(model.state_dict())
    critic = CriticTrainer(make(model), OptimiserConfig(lr=0.1))
    trainer = Trainer(model, recipe, OptimiserConfig.model_construct(lr=0.0), critic=critic)
    weights = copy.deepcopy(critic.critic.state_dict())
    stats = trainer.update(rows, episodes)
    assert stats.applied
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert any(not torch.equal(weights[n], p) for n, p in critic.critic.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert stats.sums.mean("value/loss") is not None


def test_a_critic_steps_at_the_rate_of_its_schedule():
    rows, episodes = batch()
    critic = CriticTrainer(Critic.of(tiny_model()), OptimiserConfig(lr=0.2, schedule=Schedule(warmup=4)))
    found = []
    for _ in range(2):
        stream = critic.valued(rows, Stream.of(rows, episodes), ends=False)
        everywhere = torch.ones(len(stream), dtype=torch.bool)
        found += [critic.update(rows, stream, torch.ones(len(stream)), everywhere)["value/lr"] for _ in range(2)]
    assert found == pytest.approx([0.05, 0.05, 0.1, 0.1]), "both mini-batches of an update have its rate"
    assert critic.optimizer.defaults["eps"] == 1e-8


@pytest.mark.ledger("F59")
def test_a_value_head_saves_no_second_copy_of_the_body():
    model = tiny_model()
    assert set(Critic.on(model).state_dict()) == {"head.weight", "head.bias", "mean", "std"}
    assert len(Critic.of(model).state_dict()) > 10


@pytest.mark.ledger("F44")
def test_the_value_of_a_token_is_that_of_the_state_before_it():
    """A change of the token itself, or of anything after it, leaves its value alone."""
    model = tiny_model()
    critic = Critic.of(model)
    torch.nn.init.normal_(critic.head.weight)
    a_row = row(turns=(2, 2), prompt=2)
    with torch.no_grad():
        before = critic(plan([a_row])[0])
        a_row.input_ids[int(a_row.own[2])] += 1
        after = critic(plan([a_row])[0])
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])


@pytest.mark.ledger("F44", "F58")
def test_a_critic_learns_what_the_states_are_worth():
    model = tiny_model(torch.float32)
    rows, episodes = batch(model=None)
    critic = CriticTrainer(Critic.of(model), OptimiserConfig(lr=3e-3), loss=Value(clip=None))
    trainer = Trainer(
        model, get_recipe("ppo", {"credit": {"lam": 1.0}}), OptimiserConfig.model_construct(lr=0.0), critic=critic
    )
    first = trainer.update(rows, episodes).sums.mean("value/loss")
    for _ in range(60):
        last = trainer.update(rows, episodes).sums.mean("value/loss")
    assert first is not None
    assert last is not None
    assert last < 0.1 * first


@pytest.mark.ledger("F58")
def test_a_new_scale_leaves_every_value_as_it_was():
    model = tiny_model()
    critic = Critic.of(model, normalised=True)
    torch.nn.init.normal_(critic.head.weight)
    micro = plan([row()])[0]
    with torch.no_grad():
        before = critic(micro)
        critic.rescale(3.0, 0.5)
        torch.testing.assert_close(critic(micro), before, rtol=1e-12, atol=1e-12)
        critic.rescale(-1.0, 7.0)
        torch.testing.assert_close(critic(micro), before, rtol=1e-12, atol=1e-12)
    rows, episodes = batch(model=model)
    trained = CriticTrainer(critic, OptimiserConfig(lr=1e-3))
    Trainer(model, get_recipe("ppo"), OptimiserConfig.model_construct(lr=0.0), critic=trained).update(rows, episodes)
    assert trained.moments.std is not None
    assert float(critic.std) == pytest.approx(trained.moments.std)


@pytest.mark.ledger("F58")
def test_a_new_head_with_a_scale_begins_at_the_mean_of_the_targets_and_keeps_what_it_says():
    model = tiny_model()
    rows, episodes = batch(model=model)
    critic = CriticTrainer(Critic.of(model, normalised=True), OptimiserConfig.model_construct(lr=0.0))
    trainer = Trainer(model, get_recipe("ppo"), OptimiserConfig.model_construct(lr=0.0), critic=critic)
    prepared = trainer.prepare(rows, episodes)
    assert prepared.batch.target is not None
    wanted = prepared.batch.target[prepared.batch.entered].mean()
    assert abs(float(wanted)) > 0.01
    for _ in range(2):  # the second time the scale is another one, and the values are not
        assert prepared.batch.stream.value is not None
        target = prepared.batch.target * (1 + critic.moments.n)
        critic.update(rows, prepared.batch.stream, target, prepared.batch.entered)
        torch.testing.assert_close(critic.values(rows).double(), wanted.expand(len(prepared.batch.stream)))
    assert float(critic.critic.mean) != pytest.approx(float(wanted))


@pytest.mark.ledger("F58")
@pytest.mark.parametrize("rewards", [(10.0, 11.0), (0.5, 1.5)])
def test_a_normalised_critic_learns_from_the_first_pass_of_its_first_update(rewards: tuple[float, float]) -> None:
    """The clip bounds what the optimiser moved, and nothing has moved yet, in neither mini-batch."""
    model = tiny_model()
    rows, episodes = batch(model=model)
    episodes = [replace(one, reward=rewards[k % 2]) for k, one in enumerate(episodes)]
    clipped, free = (
        CriticTrainer(Critic.of(model, normalised=True), OptimiserConfig(lr=1e-4), loss=Value(clip=clip), passes=4)
        for clip in (0.2, None)
    )
    for critic in (clipped, free):
        trainer = Trainer(
            copy.deepcopy(model), get_recipe("ppo"), OptimiserConfig.model_construct(lr=0.0), critic=critic
        )
        for stats in trainer.train_on(Division.of(rows, episodes).shares[0], epochs=2):
            assert stats.sums["value/grad_norm"] > 0
            assert stats.sums.mean("value/clipped") in (None, 0.0)
    for a, b in zip(clipped.critic.state_dict().values(), free.critic.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_share_of_clipped_values_is_that_of_all_passes() -> None:
    """The first pass moves values beyond a narrow clip, so most are clipped from the second one on."""
    model = tiny_model()
    rows, episodes = batch(model=model)
    shares = []
    for passes in (1, 2, 4):
        critic = CriticTrainer(Critic.of(model), OptimiserConfig(lr=1e-2), loss=Value(clip=1e-4), passes=passes)
        trainer = Trainer(
            copy.deepcopy(model), get_recipe("ppo"), OptimiserConfig.model_construct(lr=0.0), critic=critic
        )
        (stats,) = trainer.train_on(Division.of(rows, episodes).shares[0])
        shares.append(stats.sums.mean("value/clipped"))
        assert stats.sums.counts["value/clipped"] == passes * stats.sums.counts["value/loss"]
    assert shares[0] == 0.0 < shares[1] < shares[2]


@pytest.mark.ledger("F70")
def test_the_policy_stays_as_it_is_while_the_critic_warms_up():
    model = tiny_model()
    rows, episodes = batch(model=model)
    critic = CriticTrainer(Critic.of(model), OptimiserConfig(lr=1e-2), first=2)
    trainer = Trainer(model, get_recipe("ppo"), OptimiserConfig(lr=1e-2), critic=critic)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        steps = list(trainer.train_on(Division.of(rows, episodes).shares[0], epochs=2))
        assert [(one.lr, one.skipped, one.applied) for one in steps] == [(None, "critic first", True)] * 2
        assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert trainer.update(rows, episodes).skipped is None
    assert any(not torch.equal(before[n], p) for n, p in model.state_dict().items())


@pytest.mark.ledger("P9", "P12")
def test_the_critic_is_saved_with_the_trainer_and_guarded_like_it():
    model = tiny_model()
    rows, episodes = batch(model=model)

    def trainer():
        torch.manual_seed(0)
        return Trainer(
            tiny_model(),
            get_recipe("ppo"),
            OptimiserConfig(lr=1e-2),
            critic=CriticTrainer(Critic.of(tiny_model()), OptimiserConfig(lr=1e-2)),
        )

    one = trainer()
    one.update(rows, episodes)
    disk = io.BytesIO()
    torch.save([one.state_dict(), one.model.state_dict()], disk)
    one.update(rows, episodes)
    two = trainer()
    disk.seek(0)
    state, weights = torch.load(disk, weights_only=True)
    two.model.load_state_dict(weights)
    two.load_state_dict(state)
    two.update(rows, episodes)
    assert one.critic is not None
    assert two.critic is not None
    for a, b in zip(one.critic.critic.state_dict().values(), two.critic.critic.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    weights = copy.deepcopy(one.critic.critic.state_dict())
    prepared = one.prepare(rows, episodes)
    assert prepared.batch.target is not None
    prepared.batch.target[0] = float("nan")
    assert one.step(prepared).sums["value/skipped"] == 1
    assert one.critic.skips == 1
    assert all(torch.equal(weights[n], p) for n, p in one.critic.critic.state_dict().items())


@pytest.mark.ledger("F59")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_three_passes_are_three_steps_on_the_same_targets(clip):
    model = tiny_model()
    rows, episodes = batch(model=model)
    three, one = (
        CriticTrainer(Critic.of(model), OptimiserConfig(lr=1e-2), loss=Value(clip=clip), passes=n) for n in (3, 1)
    )
    prepared = Trainer(model, get_recipe("ppo"), OptimiserConfig.model_construct(lr=0.0), critic=three).prepare(
        rows, episodes
    )
    stream, target = prepared.batch.stream, prepared.batch.target
    assert stream.value is not None
    assert target is not None
    entered = prepared.batch.entered
    first = three.update(rows, stream, target, entered)
    separate = [one.update(rows, stream, target, entered) for _ in range(3)]
    assert three.steps == one.steps == 3
    for a, b in zip(three.critic.state_dict().values(), one.critic.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert first.mean("value/loss") == separate[0].mean("value/loss")
    assert first.mean("value/loss") != separate[2].mean("value/loss")


def test_a_recipe_with_values_needs_a_critic():
    with pytest.raises(BadBatch, match=r"'ppo'.*critic="):
        Trainer(tiny_model(), get_recipe("ppo"))
    assert episode().trains
