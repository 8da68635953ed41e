"""Processes that take one optimiser step together: what they add up and agree on, and nothing else.

Every rank holds whole groups and whole episodes; one may hold none. Denominators are added up before the first
micro-batch, gradients by sum: the loss was already divided by what all ranks hold, so that nothing is averaged and
ranks with different numbers of tokens, rows or micro-batches add up to the gradient of one process. No rank steps
unless all can.

`Ranks` is one process alone, `Group` several with a copy of the model each (data parallel), `Sharded` several with a
part of each weight (FSDP2). Who rolls out, and how the ranks come by their rows, is the business of `crew.py`.

1. Not through accelerate's or torch's DDP: both divide each rank's gradient by the number of ranks as it is made, which
   is right for means over equal parts only; and DDP, like FSDP, hangs where one rank has fewer micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ...tapes.errors import TapereelError
from ..objective import Sums
from .micro_batches import Micro

T = TypeVar("T")


class RankLost(TapereelError, RuntimeError):
    """Another process of the group has gone or doesn't answer in time; says what this one was waiting for."""


class Ranks:
    """One process: everything is added up already."""

    size = 1
    rank = 0
    sharded = False
    """True: each forward and each backward is joint, so that every rank must make as many as the others."""

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        return x

    def any(self, flag: bool) -> bool:
        """True when it holds on any rank."""
        return flag

    def halt(self, flag: bool) -> bool:
        """Whether this rank must not go on to its next backward: for one that would be joint, all halt together."""
        return flag

    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        """The micro-batches to forward: this rank's own, and idle ones where another rank has more."""
        return micros

    def shard(self, model: nn.Module) -> None:
        """Leave each rank its part of every weight, where that is how the ranks work. To be called ahead of any
        optimiser; a second call changes nothing."""

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        """`work()`, which uses the weights of `model` in any way it likes."""
        return work()

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the sum over all ranks; one that is missing counts as 0."""

    def clip(self, parameters: Iterable[nn.Parameter], bound: float | None) -> float:
        """Norm of the gradient of all weights, which is scaled down to `bound` where it is longer."""
        return _whole(nn.utils.clip_grad_norm_(parameters, bound or float("inf"))).item()

    def gather(self, sums: Sums) -> Sums:
        """The metrics of all ranks as one."""
        return sums

    def everyone(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        return [value]

    def hear(self, value: Any = None) -> Any:
        """What rank 0 says; `value` is what it says."""
        return value

    def copy(self, model: nn.Module) -> None:
        """Rank 0's weights and buffers into `model` on every rank."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Turns the loss of a process into a sentence that says what this one waited for."""
        return nullcontext()

    def whole(self, tree: T) -> T:
        """Tensors in dicts, lists and tuples, with those that lie about in parts put together on every rank."""
        return tree

    def part(self, tree: T, like: Any) -> T:
        """`whole` undone: tensors cut as those at the same place in `like` are."""
        return tree

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """The optimiser goes on from a state that `whole` put together."""
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {
            k: {name: self.part(value, owners[k]) if name != "step" else value for name, value in entry.items()}
            for k, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})


class Group(Ranks):
    """The processes of an initialised `torch.distributed` group (as `accelerate` and `torchrun` start them), each with
    a copy of the model."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        if not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed isn't initialised: start with torchrun or accelerate launch, or call "
                "torch.distributed.init_process_group"
            )
        self.group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        if "cpu:" not in distributed.get_backend_config(group):
            raise RuntimeError(
                f"the process group speaks {distributed.get_backend_config(group)} only, and counts are "
                "added up in main memory: initialise it with backend 'cpu:gloo,cuda:nccl'"
            )

    def add_up(self, x: Tensor) -> Tensor:
        out = x.clone()
        with self.waiting("a sum"):
            distributed.all_reduce(out, group=self.group)
        return out

    def any(self, flag: bool) -> bool:
        return bool(self.add_up(torch.tensor(float(flag))) > 0)

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if not isinstance(p, DTensor):
                p.grad = self.add_up(p.grad)

    def gather(self, sums: Sums) -> Sums:
        whole = Sums()
        for part in self.everyone(sums):
            whole.merge(part)
        return whole

    def everyone(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self.waiting("the others' results"):
            distributed.all_gather_object(found, value, group=self.group)
        return found

    def hear(self, value: Any = None) -> Any:
        box = [value]
        with self.waiting("rank 0" if self.rank else "the others to listen"):
            distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def copy(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            with self.waiting("rank 0's weights"):
                distributed.broadcast(tensor, src=0, group=self.group)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, distributed.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE)
            if isinstance(error, RankLost) or not lost:
                raise
            cause = re.split(r"\. This is typically|\n", str(error))[0]
            raise RankLost(
                f"rank {self.rank} of {self.size} waited for {what}: another process ended, or was silent "
                "for longer than the time limit. Mend what that one said last, and go on with --resume "
                f"({cause})"
            ) from error


class Sharded(Group):
    """As `Group`, but each weight, its gradient and its optimiser state lie in parts over the ranks (FSDP2)."""

    sharded = True

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._roots: dict[int, _Root] = {}

    def halt(self, flag: bool) -> bool:
        return self.any(flag)

    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(micros)
        most = int(self.add_up(counts).max())
        return [*micros, *(Micro.idle() for _ in range(most - len(micros)))]

    def shard(self, model: nn.Module) -> None:
        if id(model) in self._roots:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        kind = next(model.parameters()).device.type
        group = self.group or distributed.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, kind)
        root = _Root(model)
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        # Weights are whole inside a forward and a backward only: whoever reads or changes one between sees its part.
        fully_shard(root, mesh=mesh, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._roots[id(model)] = root

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        root = self._roots.get(id(model))
        if root is None:
            return work()
        with self.waiting("a joint forward pass"):
            return root(work)

    def whole(self, tree: T) -> T:
        return _mapped(tree, _whole)

    def part(self, tree: T, like: Any) -> T:
        return _mapped(tree, self._cut, like)

    def _cut(self, tensor: Tensor, like: Any) -> Tensor:
        if not isinstance(like, DTensor):
            return tensor
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class _Root(nn.Module):
    """A module whose forward is any work on the model inside, so that FSDP brings the weights together for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the model's body: the largest list of modules in it."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mapped(tree: Any, change: Callable[..., Any], *like: Any) -> Any:
    """`tree` with `change` made to its tensors, beside what stands at the same place of `like`."""
    if isinstance(tree, dict):
        return {k: _mapped(v, change, *(x[k] for x in like)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(v, change, *(x[i] for x in like)) for i, v in enumerate(tree))
    return change(tree, *like) if isinstance(tree, Tensor) else tree
