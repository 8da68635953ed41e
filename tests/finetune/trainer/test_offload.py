"""The optimiser's state in main memory: the same weights, one weight's state at a time, and the same checkpoints."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer.adamw import OffloadedAdamW

from ..build import batch, tiny_model, trainer_of


class Live(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, torch.Tensor) else ():
            storage = tensor.untyped_storage()
            if storage._cdata not in known | self.held:
                self.held.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size


def made(offload: bool, **more: Any) -> Trainer:
    model = tiny_model(torch.float32)
    critic = CriticTrainer(Critic.of(model), OptimiserConfig(lr=0.01), passes=2, offload=offload)
    how: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "offload": offload, "critic": critic, **more}
    return trainer_of(model, get_recipe("ppo"), **how)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.critic is not None
    return {**trainer.model.state_dict(), **{f"critic.{k}": t for k, t in trainer.critic.critic.state_dict().items()}}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.ledger("F91")
def test_offloaded_training_gives_the_same_weights_and_checkpoints_fit_either_way():
    rows, episodes = batch()
    plain, away = made(False), made(True)
    assert isinstance(away.optimizer, OffloadedAdamW)
    assert isinstance(away.critic and away.critic.optimizer, OffloadedAdamW)
    start = {name: tensor.clone() for name, tensor in weights(plain).items()}
    for _ in range(2):
        for trainer in (plain, away):
            assert trainer.update(rows, episodes).applied
    assert not equal(start, weights(plain))
    assert equal(weights(plain), weights(away))
    assert equal(plain.state_dict(), away.state_dict())
    # Each continues from the other's checkpoint.
    crossed = [made(False), made(True)]
    for new, old in zip(crossed, (away, plain), strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.load_state_dict(old.state_dict())
    for trainer in (plain, *crossed):
        assert trainer.update(rows, episodes).applied
    assert all(equal(weights(plain), weights(new)) for new in crossed)
    assert all(equal(plain.state_dict(), new.state_dict()) for new in crossed)


@pytest.mark.ledger("F91")
def test_a_step_copies_the_state_of_one_weight_at_a_time():
    """The parameters are as large as each other, so two at a time would be twice as many bytes."""
    parameters = [torch.nn.Parameter(torch.randn(50, 40)) for _ in range(8)]
    one, state = 50 * 40 * 4, 2 * 50 * 40 * 4 + 4
    optimizer = OffloadedAdamW(parameters, lr=0.1, fused=True)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    places = {t.data_ptr() for entry in optimizer.state.values() for t in entry.values()}
    with Live() as live:
        optimizer.step()
    assert state <= live.most < state + one
    assert live.now == 0
    assert places == {t.data_ptr() for entry in optimizer.state.values() for t in entry.values()}
    with Live() as plain:
        torch.optim.AdamW(parameters, lr=0.1, fused=True).step()
    assert plain.most >= len(parameters) * 2 * one, "without offload, the state is where the weights are"


@pytest.mark.ledger("F91")
def test_a_weight_without_a_gradient_keeps_its_state_and_value():
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    optimizer = OffloadedAdamW(parameters, lr=0.1, fused=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    parameters[1].grad = None
    before = parameters[1].detach().clone(), {k: t.clone() for k, t in optimizer.state[parameters[1]].items()}
    optimizer.step()
    assert torch.equal(before[0], parameters[1])
    assert equal(before[1], dict(optimizer.state[parameters[1]]))
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [2, 1]
