"""An update that meets a number which isn't finite leaves everything as it was; bad input is named."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tapereel.finetune import OptimiserConfig, Stream, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.recipes import get_recipe

from ..build import batch, episode, row, tiny_model


@pytest.mark.ledger("P12", "F81", "T46")
@pytest.mark.parametrize("where", ["weights", "loss", "gradient"])
def test_a_number_that_is_not_finite_leaves_the_weights_and_the_next_update_is_fine(where):
    model = tiny_model()
    rows, episodes = batch(model=model)
    trainer = Trainer(model, get_recipe("reinforce"), OptimiserConfig(lr=1e-2))
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
    trainer = Trainer(model, get_recipe("reinforce"), OptimiserConfig(lr=1e-2, micro_tokens=1))
    before = copy.deepcopy(model.state_dict())
    prepared = trainer.prepare(rows, episodes)
    longest = max(range(6), key=lambda i: rows[i].own[-1])
    prepared.batch.advantage[int(prepared.batch.stream.rows[longest])] = math.inf
    assert trainer.step(prepared).skipped == "loss"
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


@pytest.mark.ledger("P12")
def test_every_kind_of_bad_input_is_named():
    with pytest.raises(BadBatch, match=r"'b'.*\b0\.5\b"):
        Stream.of([row("a"), row("b", old=[-1.0, 0.5, -1.0])], [episode("a"), episode("b")])
    with pytest.raises(BadBatch, match=r"\b0\.0015\b.*\b0\.001\b"):
        Stream.of([row(old=[-1.0, 1.5e-3, -1.0])], [episode()])
    assert Stream.of([row(old=[-1.0, 5e-4, -1.0])], [episode()]).old.tolist() == [-1.0, 0.0, -1.0]
    with pytest.raises(BadBatch, match="'b'"):
        Stream.of([row()], [episode(), episode("b"), episode("c"), episode("b")])
    with pytest.raises(BadBatch, match="'other'"):
        Stream.of([row("other")], [episode()])
    with pytest.raises(BadBatch, match="'h'"):
        Stream.of([row(group="h")], [episode()])
    with pytest.raises(BadBatch, match=r"'a'.*\b3\b.*\b1\b"):
        Stream.of([row(turns=(1, 1))], [episode(reward=1.0, turn_rewards=[1.0, 2.0])])
    with pytest.raises(BadBatch, match="reference="):
        Trainer(tiny_model(), get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.1}]}))
