"""What others got wrong, in closed form: each test holds the right number, and the wrong one where there is one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from tapereel.finetune import OptimiserConfig, Trainer
from tapereel.finetune.data import segments
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import score
from tapereel.finetune.trainer.updates import cut_episodes

from ..build import batch, doubles, episode, exact, ledger, row, simple, tiny_model
from ..trainer.test_trainer_modes import mixture

TRAPS = ledger("traps")


@pytest.mark.ledger("T01", "F40")
def test_advantages_over_the_batch_are_those_of_episodes_and_not_zero():
    case = TRAPS["T01"]
    stream = exact(*simple([float(r) for r in case["rewards"]], list("aabb"), tokens=1))
    got = objective.prepare(get_recipe("cpgd"), stream, Context()).advantage
    assert got.tolist() == pytest.approx([x / (1 + 2 * case["eps"]) for x in case["expected"]], rel=1e-9)


@pytest.mark.ledger("T03", "F55")
def test_in_a_ragged_batch_the_short_row_keeps_its_gradient():
    case = TRAPS["T03"]
    rows = [row(t, t, turns=(n,)) for t, n in zip("ab", case["lengths"], strict=True)]
    stream = exact(rows, [episode(r.tape, r.group) for r in rows])
    every = torch.ones(len(stream), dtype=torch.bool)
    made = objective.Batch(
        recipe=get_recipe("grpo"),
        stream=stream,
        entered=every,
        selected=every,
        target=None,
        advantage=doubles(case["advantages"])[stream.episode],
    )
    lp = stream.old.clone().requires_grad_()
    loss = made.part().loss(lp, None, torch.arange(len(stream)), Context(), (0.0,))
    assert loss.item() == pytest.approx(case["loss"], rel=1e-12)
    assert loss.item() != pytest.approx(case["wrong"])
    assert torch.autograd.grad(loss, lp)[0].tolist() == pytest.approx(case["gradient"], rel=1e-12)


@pytest.mark.ledger("T04", "F43")
def test_the_discount_holds_for_every_episode_and_every_micro_batch():
    case = TRAPS["T04"]
    rows = [row(f"t{i}", f"g{i}", turns=(case["tokens"],)) for i in range(case["episodes"])]
    episodes = [episode(r.tape, r.group, reward=1.0) for r in rows]
    recipe = get_recipe("reinforce_plain", {"credit": {"gamma": case["gamma"]}})
    for budget in (1, 100_000):
        stats = Trainer(tiny_model(), recipe, OptimiserConfig(micro_tokens=budget)).update(rows, episodes)
        assert stats.advantage.tolist() == pytest.approx(case["expected"] * case["episodes"])


@pytest.mark.ledger("T06", "F62", "F71", "F72")
def test_no_mean_is_over_padding():
    """A row beside a much longer one is padded; its tokens' statistics are over themselves."""
    case = TRAPS["T06"]
    model = tiny_model()
    short, long = row("short", "g", turns=(2,)), row("long", "g", turns=(2,), prompt=2 + case["pads"])
    recipe = get_recipe(
        "grpo", {"baseline": {"kind": "none"}, "regulariser": [{"kind": "kl", "beta": 0.1, "to": "sampler"}]}
    )
    trainer = Trainer(model, recipe, OptimiserConfig.model_construct(lr=0.0))
    episodes = [episode("short", "g"), episode("long", "g")]
    prepared = trainer.prepare([short, long], episodes)
    stream = prepared.batch.stream
    now = trainer._score(model, [short, long], None).logprob
    ratios = torch.tensor(case["clip_ratios"] * 2, dtype=torch.float64).log()
    sums = trainer.step(objective_with(prepared, old=(now - ratios).clamp(max=-1e-9))).sums
    assert sums.mean("clip") == pytest.approx(case["clipped"])
    assert sums.mean("clip") != pytest.approx(case["diluted"]["clipped"])
    sums = trainer.step(objective_with(prepared, old=now - case["d"])).sums
    assert sums.mean("kl/sampler/k3") == pytest.approx(case["k3"], abs=5e-7)
    assert sums.mean("kl/old") == pytest.approx(-case["d"])
    assert sums.counts["kl/sampler/k3"] == len(stream)


def objective_with(prepared, old):
    """A prepared batch whose log-probs at sampling are others."""
    stream = replace(prepared.batch.stream, old=old)
    return replace(prepared, batch=replace(prepared.batch, stream=stream))


@pytest.mark.ledger("T47", "F64", "F66", "F69")
def test_auxiliary_loss_entropy_and_a_running_average_go_together():
    rows, episodes = batch()
    recipe = get_recipe(
        "grpo", {"regulariser": [{"kind": "aux", "coefficient": 0.1}, {"kind": "entropy", "coefficient": 0.01}]}
    )
    model = mixture()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(model, recipe, OptimiserConfig(lr=1e-3, ema=0.5))
    stats = trainer.update(rows, episodes)
    assert stats.applied
    assert {"aux", "entropy"} <= set(stats.sums.sums)
    for name, p in model.named_parameters():
        torch.testing.assert_close(trainer.averaged[name], (before[name] + p) / 2)


@pytest.mark.ledger("T24")
def test_a_model_left_in_training_mode_is_scored_as_it_sampled_without_dropout():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).double().eval()
    rows, episodes = batch()
    lp = score(model, rows).logprob.float().numpy()
    at = np.cumsum([0, *(len(r.own) for r in rows)])
    rows = [replace(r, old=lp[at[k] : at[k + 1]]) for k, r in enumerate(rows)]
    stats = Trainer(model.train(), get_recipe("grpo"), OptimiserConfig.model_construct(lr=0.0)).update(rows, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch < 1e-6
    assert (score(model.train(), rows).logprob - torch.from_numpy(lp)).abs().max() > 1e-3, "dropout would show"


@pytest.mark.ledger("F67")
def test_a_coefficient_without_a_controller_stays():
    rows, episodes = batch()
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.3}]})
    trainer = Trainer(tiny_model(), recipe, OptimiserConfig(lr=1e-2), reference=tiny_model(seed=1))
    assert all(trainer.update(rows, episodes).applied for _ in range(3))
    assert trainer.betas == [0.3]


@pytest.mark.ledger("T50", "F79")
@settings(max_examples=40)
@given(st.integers(1, 17), st.data())
def test_cutting_a_batch_drops_no_episode_and_takes_none_twice(n, data):
    pieces = data.draw(st.integers(1, n))
    cuts = cut_episodes(n, pieces, data.draw(st.sampled_from([None, 3])), 0)
    assert len(cuts) == pieces
    if pieces > 1:
        masks = torch.stack([cut for cut in cuts if cut is not None])
        assert masks.sum(0).tolist() == [1] * n
        assert int(masks.sum(1).max() - masks.sum(1).min()) <= 1


@pytest.mark.ledger("T51")
def test_credit_takes_a_pass_per_power_of_two_whatever_the_number_of_episodes():
    case = TRAPS["T51"]

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.products += "mul" in str(func)
            return func(*args, **(kwargs or {}))

    decay = torch.ones(case["tokens"])
    decay[case["tokens"] // case["episodes"] - 1 :: case["tokens"] // case["episodes"]] = 0
    with Count():
        segments.recur(torch.ones(case["tokens"]), decay)
    assert Count.products == 2 * case["passes"]
    assert case["passes"] == math.log2(case["tokens"] / case["episodes"])
