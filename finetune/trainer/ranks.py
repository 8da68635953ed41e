"""Collective operations of the processes (ranks) that take one optimiser step together.

Each rank holds whole groups and whole episodes, and may hold none. Before the first micro-batch, denominators (such as
numbers of tokens) are added up over the ranks, and each rank divides its loss by the total. So gradients are summed,
not averaged. The sum equals the gradient that a single process would compute over all the data, however unevenly
tokens, rows or micro-batches are split.

Either all ranks step or none does. A rank that stepped alone would have other weights than the rest.

Three classes have the same methods. `Ranks` is for a single process. `DataParallelRanks` is for processes that each
have a copy of the model. `ShardedRanks` is for processes that each have a part of every weight (FSDP2).
`distributed.py` explains which rank rolls out and how the ranks get their rows.

With `sequence_parallel`, several ranks forward the same rows together (`sequence_parallel.py`). They have the same
share of the rows and compute the same numbers. So sums over rows count each share once, and gradients are summed over
all ranks.

1. accelerate's DDP and torch's DDP are not used. Both divide each rank's gradient by the number of ranks, which is
   right only for means over equal parts. DDP, like FSDP, also hangs if one rank has fewer micro-batches than another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...agents.engines.embedded.pretrained import DIGEST_BYTES, fill, in_rows, piece_digests, weights_digest
from ...tapes.errors import TapereelError
from .micro_batches import Micro
from .sequence_parallel import SequenceRanks, register

T = TypeVar("T")


class RankLost(TapereelError, RuntimeError):
    """Raised if another process of the group ended or didn't answer in time. The message says what this process was
    waiting for."""


class Ranks:
    """The collective operations for a single process. A sum over all ranks is then just the process's own value."""

    size = 1
    rank = 0
    shares = 1
    share = 0
    """The rows are split into `shares` shares, and this rank has share number `share`. Ranks that forward the same rows
    together have the same share."""
    group: distributed.ProcessGroup | None = None
    """The group of these ranks, or None for a single process or the default group."""
    sequence: SequenceRanks | None = None
    """The ranks that forward rows together with this rank. None if each rank forwards its own rows."""
    sharded = False
    """Whether weights are sharded. Each forward and backward pass is then collective, so every rank must make the same
    number of passes."""

    @property
    def joint(self) -> bool:
        """Whether other ranks take part in a forward pass."""
        return self.sharded or self.sequence is not None

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all shares of the rows."""
        return x

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is True on any rank."""
        return flag

    def halt(self, flag: bool) -> bool:
        """Return True if this rank must not run its next backward pass. `flag` is this rank's own reason to stop.

        If backward passes are collective, a flag on any rank stops all ranks. Otherwise the other ranks would wait in
        their backward pass until the time limit.
        """
        return flag

    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        """Return the micro-batches to forward. If weights are sharded, idle micro-batches are added until all ranks
        have the same number."""
        return micros

    def shard(
        self, model: nn.Module, weights: Mapping[str, Tensor] | None = None, device: torch.device | None = None
    ) -> None:
        """Replace each weight with this rank's part of it, if the ranks shard weights. A second call changes nothing.

        An empty model gets its `weights` on `device`, one layer at a time, so no rank holds the whole model. Without
        `weights`, rank 0's own weights are distributed.

        Call this before making an optimiser. Sharding replaces the parameters, and an optimiser that was made before
        would change the old ones, which the model no longer uses.
        """

    def run(self, model: nn.Module, work: Callable[[], T]) -> T:
        """Call `work()` and return its result. Inside, the weights of `model` are whole, even if they are sharded
        otherwise."""
        return work()

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient with its sum over all ranks. A missing gradient counts as 0."""

    def clip(self, parameters: Iterable[nn.Parameter], bound: float | None) -> float:
        """Return the norm of the gradient over all weights. If it is larger than `bound`, scale the gradient down to
        this norm."""
        return _whole(nn.utils.clip_grad_norm_(parameters, bound or float("inf"))).item()

    def gather(self, value: T) -> list[T]:
        """Return one value for each share of the rows, in order, on the ranks that have share 0. On the other ranks,
        the list is empty. With `sequence_parallel`, a value comes from the rank with the same place as this one among
        those that have the share."""
        return [value]

    def scatter(self, values: Sequence[T] | None = None) -> T:
        """Return this rank's value. Rank 0 passes one value for each share of the rows, and the other ranks pass
        None."""
        assert values is not None, "a single process is rank 0"
        return values[0]

    def broadcast(self, value: object = None) -> object:
        """Return rank 0's `value` on every rank."""
        return value

    def copy(self, model: nn.Module) -> None:
        """Copy rank 0's weights and buffers into `model` on every rank. A sharded model isn't changed."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context that raises RankLost if a connection is lost inside it. The error's message names `what`
        this process waited for."""
        return nullcontext()

    def whole(self, tree: T) -> T:
        """Return `tree`, which consists of tensors in dicts, lists and tuples, with each sharded tensor gathered in
        full on every rank."""
        return tree

    def part(self, tree: T, like: object) -> T:
        """Undo `whole`: return `tree` with its tensors sharded like the tensors at the same place in `like`."""
        return tree

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, object]) -> None:
        """Load an optimiser state that `whole` gathered."""
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {
            # In main memory, from which an optimiser moves one tensor at a time to its device, or none.
            k: {name: self.part(value, owners[k]).cpu() if name != "step" else value for name, value in entry.items()}
            for k, entry in cast("dict[int, dict[str, Tensor]]", state["state"]).items()
        }
        optimizer.load_state_dict({**state, "state": parts})


class DataParallelRanks(Ranks):
    """The ranks of an initialised `torch.distributed` group (started by `accelerate launch` or `torchrun`). Each has a
    copy of the model."""

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        sequence_parallel: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        """Each `sequence_parallel` consecutive ranks forward the same rows together. The number must divide the number
        of ranks. `timeout` is the time limit of their groups."""
        if not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed isn't initialised: start this program with torchrun or accelerate launch, or call "
                "torch.distributed.init_process_group first"
            )
        self.group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self.shares, self.share, self._across = self.size // sequence_parallel, self.rank // sequence_parallel, group
        if "cpu:" not in distributed.get_backend_config(group):
            raise RuntimeError(
                f"the process group's backend is {distributed.get_backend_config(group)}, which has no CPU part, and "
                "counts are added up in main memory: initialise it with backend 'cpu:gloo,cuda:nccl'"
            )
        if sequence_parallel > 1:
            register()
            table = torch.tensor(distributed.get_process_group_ranks(group)).view(self.shares, sequence_parallel)
            # Every process makes every group, and keeps its own.
            within, self._across = (
                cast(distributed.ProcessGroup, distributed.new_subgroups_by_enumeration(ranks, timeout=timeout)[0])
                for ranks in (table.tolist(), table.T.tolist())
            )
            self.sequence = SequenceRanks(within, sequence_parallel, self.rank % sequence_parallel)

    def add_up(self, x: Tensor) -> Tensor:
        return self._sum(x, self._across)

    def _sum(self, x: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
        out = x.clone()
        with self.waiting("a sum"):
            distributed.all_reduce(out, group=group)
        return out

    def any(self, flag: bool) -> bool:
        return bool(self._sum(torch.tensor(float(flag)), self.group) > 0)

    def halt(self, flag: bool) -> bool:
        return flag if self.sequence is None else bool(self._sum(torch.tensor(float(flag)), self.sequence.group) > 0)

    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        return [replace(micro, sequence=self.sequence) for micro in micros]

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:  # without a live token, this rank must still join the sum: all_reduce waits for all
                p.grad = torch.zeros_like(p)
            if not isinstance(p, DTensor):
                p.grad = self._sum(p.grad, self.group)

    def gather(self, value: T) -> list[T]:
        found: list[Any] | None = None if self.share else [None] * self.shares
        with self.waiting("the results of the other ranks"):
            distributed.gather_object(value, found, group_dst=0, group=self._across)
        return found or []

    def scatter(self, values: Sequence[T] | None = None) -> T:
        box: list[Any] = [None]
        with self.waiting("its share from rank 0" if values is None else "the other ranks to listen"):
            if values is None:
                distributed.recv_object_list(box, group_src=0, group=self.group)
                return box[0]
            # One by one, so that rank 0 holds the bytes of one share at a time, and sends each rank only its own.
            for rank in range(1, self.size):
                own = values[rank * self.shares // self.size]
                distributed.send_object_list([own], group_dst=rank, group=self.group)
            return values[0]

    def broadcast(self, value: object = None) -> object:
        box = [value]
        with self.waiting("rank 0" if self.rank else "the other ranks to listen"):
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
            # gloo raises a plain RuntimeError for a lost peer. Only its text distinguishes it from the program's own
            # errors.
            lost = isinstance(error, distributed.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE)
            if isinstance(error, RankLost) or not lost:
                raise
            cause = re.split(r"\. This is typically|\n", str(error))[0]
            raise RankLost(
                f"rank {self.rank} of {self.size} waited for {what}: another process ended, or didn't answer "
                "within the time limit. Correct the error that the other process printed, then continue the run with "
                f"`resume=True` ({cause})"
            ) from error


class ShardedRanks(DataParallelRanks):
    """Like `DataParallelRanks`, except that each weight, its gradient and its optimiser state are sharded (FSDP2)."""

    sharded = True

    @cached_property
    def _roots(self) -> dict[int, _Root]:
        return {}

    def halt(self, flag: bool) -> bool:
        return self.any(flag)

    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        counts = torch.zeros(self.shares, dtype=torch.int64)
        counts[self.share] = len(micros)
        most = int(self.add_up(counts).max())
        return super().rounds([*micros, *(Micro.idle() for _ in range(most - len(micros)))])

    def copy(self, model: nn.Module) -> None:
        if id(model) not in self._roots:
            super().copy(model)

    def shard(
        self, model: nn.Module, weights: Mapping[str, Tensor] | None = None, device: torch.device | None = None
    ) -> None:
        if id(model) in self._roots:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if weights is None:
            self.copy(model)
        device = device or next(model.parameters()).device
        kind = device.type
        group = self.group or distributed.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, kind)
        root = _Root(model)
        for block in _blocks(model):
            if weights is not None:
                fill(model, weights, device, block)
            fully_shard(block, mesh=mesh)
        if weights is not None:
            fill(model, weights, device)
            model.to(device)  # buffers
        # Weights are whole only during a forward or backward pass. Between two passes, a weight is this rank's part of
        # it.
        fully_shard(root, mesh=mesh, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # FSDP would divide by the number of ranks, but each loss is already divided by the total over all
                # ranks.
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

    def part(self, tree: T, like: object) -> T:
        return _mapped(tree, self._cut, like)

    def _cut(self, tensor: Tensor, like: Any) -> Tensor:
        if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
            return tensor
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class Whole(Mapping[str, Tensor]):
    """A state dict whose sharded tensors are gathered when they are read. All ranks must read the same names in the
    same order."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return _whole(self._state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def shared_digest(state: Mapping[str, Tensor], recorded: str | None = None) -> str:
    """Return `weights_digest(state, recorded)`. If weights are sharded, each rank hashes its own rows, and only the
    digests of the rows are gathered. All ranks must call this together."""
    return weights_digest(state, recorded, pieces=_pieces, whole=_whole)


def _pieces(tensor: Tensor) -> bytes:
    """Return `piece_digests` of a tensor that may be sharded. It is gathered if it is a single piece, or if a rank has
    parts of rows."""
    if not isinstance(tensor, DTensor):
        return piece_digests(tensor)
    by_rows = all(one.is_replicate() or (type(one) is Shard and one.dim == 0) for one in tensor.placements)
    if not (by_rows and in_rows(tensor)):
        return piece_digests(tensor.full_tensor())
    own = np.frombuffer(bytearray(piece_digests(tensor.to_local())), np.uint8).reshape(-1, DIGEST_BYTES)
    digests = DTensor.from_local(
        torch.from_numpy(own).to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        shape=torch.Size((len(tensor), DIGEST_BYTES)),
        stride=(DIGEST_BYTES, 1),
    )
    return digests.full_tensor().cpu().numpy().tobytes()


class _Root(nn.Module):
    """A module whose `forward` runs a given function. FSDP gathers weights only around a forward pass, so
    `ShardedRanks.run` runs functions that use the model in here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model's body, which are its longest ModuleList. FSDP shards and gathers them one by one.

    The layers of a vision tower aren't included. A rank without a picture wouldn't gather them, and the other ranks
    would wait for it."""
    body: nn.Module = getattr(model, "get_decoder", lambda: model)()
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mapped(tree: Any, change: Callable[..., Any], *like: Any) -> Any:
    """Return `tree` with each tensor replaced by `change(tensor, *others)`. `others` are the values at the same place
    in the trees `like`, which must have the same structure."""
    if isinstance(tree, dict):
        return {k: _mapped(v, change, *(x[k] for x in like)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(v, change, *(x[i] for x in like)) for i, v in enumerate(tree))
    return change(tree, *like) if isinstance(tree, Tensor) else tree
