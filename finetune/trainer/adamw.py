"""AdamW for the trainers of policy and critic, with its state on the weights' device or in main memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import nn

from .options import OptimiserConfig


def adamw(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, object]], options: OptimiserConfig, *, offload: bool
) -> torch.optim.AdamW:
    """Return a new optimiser for `parameters`, or for groups of them. With `offload`, its state is in main memory."""
    make = OffloadedAdamW if offload else torch.optim.AdamW
    return make(
        cast("Iterable[nn.Parameter]", parameters),
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


class LRScheduler:
    """Takes an optimiser's steps, all of an update at the same learning rate.

    An update counts from its first step on, so one that is skipped doesn't use up the schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: OptimiserConfig) -> None:
        self.optimizer, self.options = optimizer, options
        self.updates = 0
        """Number of updates with a step, including the present one."""
        self._counted = False

    def begin(self) -> None:
        """Begin an update."""
        self._counted = False

    @property
    def update(self) -> int:
        """The number of the present update, counted from 0."""
        return self.updates - self._counted

    @property
    def lr(self) -> float:
        """The learning rate of the present update."""
        return self.options.lr * self.options.schedule.factor(self.update)

    def step(self) -> bool:
        """Take one step of the optimiser. Return whether it is the update's first."""
        first = not self._counted
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self.updates, self._counted = self.updates + first, True
        return first


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state is in main memory. Each weight's state is copied to the weight's device for its step, and back.

    So a device holds the two moments of one weight at a time, instead of 8 bytes for every trained weight. AdamW treats
    each weight by itself, so the new weights are those of `torch.optim.AdamW`, bit for bit, and a checkpoint of one can
    be loaded into the other.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        try:
            for group in groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    kept = self.state.pop(p, {})
                    self.state[p] = {name: value.to(p.device, copy=True) for name, value in kept.items()}
                    self.param_groups = [{**group, "params": [p]}]
                    super().step()
                    # Writing to the same memory is faster than allocating new memory for each step.
                    self.state[p] = {
                        name: kept[name].copy_(value) if name in kept else value.to("cpu", copy=True)
                        for name, value in self.state[p].items()
                    }
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        # torch would move the whole state to the device.
        super().load_state_dict({**state_dict, "state": {}})
        owners = [p for group in self.param_groups for p in group["params"]]
        for k, entry in cast("dict[int, dict[str, torch.Tensor]]", state_dict["state"]).items():
            self.state[owners[k]] = {name: value.to("cpu", copy=True) for name, value in entry.items()}
