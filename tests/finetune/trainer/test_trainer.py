"""The trainer over several updates: going on from a saved state, mini-batches, averages, schedules, reports."""

from __future__ import annotations

import copy
import dataclasses
import io

import numpy as np
import pytest
import torch

from tapereel.finetune import OptimiserConfig, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Division, Schedule, score

from ..build import batch, episode, exact, ledger, row, tiny_model


@pytest.mark.ledger("P9", "F83")
def test_going_on_from_a_saved_state_is_bit_equal():
    kl = {"kind": "kl", "beta": 0.1, "adaptive": {"target": 0.01, "horizon": 50}}
    recipe = get_recipe("grpo", {"shape": [{"kind": "running"}], "regulariser": [kl]})
    schedule = Schedule(kind="cosine", warmup=2, total=9)

    def trainer(model):
        return Trainer(
            model,
            recipe,
            OptimiserConfig(lr=1e-2, weight_decay=0.01, schedule=schedule, ema=0.9),
            reference=tiny_model(torch.float32, 1),
        )

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
    trainer = Trainer(model, get_recipe("grpo", {"anchor": {"to": "recomputed"}}), OptimiserConfig(lr=1e-2))
    first = score(model, rows).logprob
    stats = list(trainer.train_on(Division.of(rows, episodes, minibatches=3).shares[0], epochs=2, seed=4))
    assert [s.step for s in stats] == [1, 2, 3, 4, 5, 6]
    assert stats[0].stream.anchor is not None
    torch.testing.assert_close(stats[0].stream.anchor, first)
    for epoch in (stats[:3], stats[3:]):
        assert torch.equal(sum((s.weight > 0).int() for s in epoch), torch.ones(len(first), dtype=torch.int32))
        assert all(float(s.weight.sum()) == pytest.approx(1.0) for s in epoch)
    orders = [[int(s.weight.argmax()) for s in epoch] for epoch in (stats[:3], stats[3:])]
    assert all(torch.equal(s.advantage, stats[0].advantage) for s in stats)
    assert orders[0] != orders[1] or orders[0] != sorted(orders[0])
    with pytest.raises(BadBatch, match=r"\b7\b"):
        Division.of(rows, episodes, minibatches=7)


@pytest.mark.ledger("F72", "F73", "T12", "F71")
def test_diagnostics_are_sums_and_counts_over_own_tokens():
    table = ledger("regularisers")
    from tapereel.finetune.objective import Sums
    from tapereel.finetune.trainer.trainer import observe

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
    trainer = Trainer(
        model, get_recipe("sft"), OptimiserConfig.model_construct(lr=0.0, ema=case["decay"], micro_tokens=1)
    )
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
    stats = Trainer(model, get_recipe("grpo"), OptimiserConfig(micro_tokens=16)).update(rows, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch < 1e-5
    assert stats.ess == pytest.approx(1.0, abs=1e-5)
    shifted = [dataclasses.replace(r, old=np.roll(r.old, 1)) for r in rows]
    stats = Trainer(model, get_recipe("grpo")).update(shifted, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch > 1e-2


def test_only_tokens_of_the_present_weights_can_mismatch():
    model = tiny_model(torch.float32)
    rows = [row("a", turns=(3,)), row("b", turns=(3,)), row("c", turns=(1,))]
    lp = score(model, rows).logprob.numpy().reshape(-1)
    apart = np.array([0.25, 0.5, 0.0, 2.0, 1.0, 3.0, 1.5], np.float32)
    own = (slice(0, 3), slice(3, 6), slice(6, 7))
    stamps = (("run:4", [0, 0, 0]), ("run:3", [0, 0, 0]), ("run:4", [-1]))
    rows = [
        dataclasses.replace(one, old=(lp - apart)[at], versions=(name,), version=np.array(version, np.int32))
        for one, at, (name, version) in zip(rows, own, stamps, strict=True)
    ]
    episodes = [episode("a", reward=1.0), episode("b", reward=0.0), episode("c", reward=0.0)]

    def line(version: str | None) -> dict[str, object]:
        trainer = Trainer(model, get_recipe("grpo"), OptimiserConfig.model_construct(lr=0.0))
        trainer.version = version
        stats = trainer.update(rows, episodes)
        return {k: v for k, v in stats.line().items() if k.split("/")[0] in ("mismatch", "moved")}

    moved = {"moved/mean": apart.mean(), "moved/min": 0.0, "moved/max": 3.0}
    fresh = {"mismatch": 0.5, "mismatch/mean": 0.25, "mismatch/min": 0.0, "mismatch/max": 0.5}
    assert line("run:4") == pytest.approx({**moved, **fresh}, abs=1e-5), "b is a version older, c was not sampled"
    assert line("run:5") == pytest.approx({"mismatch": None, **moved}, abs=1e-5), "nothing was measured"
    every = {name.replace("moved", "mismatch"): value for name, value in moved.items()}
    assert line(None) == pytest.approx({"mismatch": 3.0, **moved, **every}, abs=1e-5), "no version is known"


def test_learning_rate_clipping_and_decay_do_what_they_say():
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(
        model, get_recipe("grpo"), OptimiserConfig(lr=0.5, schedule=Schedule(kind="linear", total=4), grad_clip=1e-3)
    )
    assert [trainer.update(rows, episodes).lr for _ in range(3)] == [0.5, 0.375, 0.25]
    state = trainer.state_dict()
    del state["updates"]  # as in a checkpoint of an earlier version
    trainer.load_state_dict(state)
    assert trainer.update(rows, episodes).lr == 0.125
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, get_recipe("sft"), OptimiserConfig(lr=1e-6, weight_decay=0.5))
    trainer.update(rows, episodes)
    gone = {n: float((p - before[n]).norm()) for n, p in model.state_dict().items()}
    assert all(g > 0 for g in gone.values())
    decay = {g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"] if p.ndim < 2}
    assert decay == {0.0}


@pytest.mark.ledger("F18")
def test_the_reference_scores_a_rollout_batch_once_however_many_updates_follow():
    rows, episodes = batch(model=tiny_model())
    reference = tiny_model(seed=1)
    forwards = []
    reference.model.register_forward_hook(lambda *_: forwards.append(1))
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.1}]})
    trainer = Trainer(tiny_model(), recipe, reference=reference)
    assert len(list(trainer.train_on(Division.of(rows, episodes, minibatches=2).shares[0], epochs=3))) == 6
    assert len(forwards) == 1


@pytest.mark.ledger("F33", "F77")
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
