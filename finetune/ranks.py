"""Processes that take one optimiser step together: what they add up, and nothing else.

Every rank holds whole groups and whole episodes. Denominators are added up before the first micro-batch, gradients
after the last, by sum: the loss was already divided by what all ranks hold, so that nothing is averaged and ranks with
different numbers of tokens, rows or micro-batches add up to the gradient of one process. No rank steps unless all
can.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .words import Sums


class Ranks:
    """One process: everything is added up already. `Group` is the same over several."""

    size = 1
    rank = 0

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        return x

    def any(self, flag: bool) -> bool:
        """True when it holds on any rank."""
        return flag

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the sum over all ranks; one that is missing counts as 0."""

    def gather(self, sums: Sums) -> Sums:
        """The metrics of all ranks as one."""
        return sums


class Group(Ranks):
    """The processes of an initialised `torch.distributed` group (as `accelerate` and `torchrun` start them)."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        if not torch.distributed.is_initialized():
            raise RuntimeError("torch.distributed isn't initialised: start with torchrun or accelerate launch, or call "
                               "torch.distributed.init_process_group")
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)

    def add_up(self, x: Tensor) -> Tensor:
        out = x.clone()
        torch.distributed.all_reduce(out, group=self.group)
        return out

    def any(self, flag: bool) -> bool:
        return bool(self.add_up(torch.tensor(float(flag))) > 0)

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            torch.distributed.all_reduce(p.grad, group=self.group)

    def gather(self, sums: Sums) -> Sums:
        everyone: list[Sums | None] = [None] * self.size
        torch.distributed.all_gather_object(everyone, sums, group=self.group)
        whole = Sums()
        for part in everyone:
            if part is not None:
                whole.merge(part)
        return whole
