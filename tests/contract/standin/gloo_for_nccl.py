"""Where there is no GPU: what vLLM's NCCL engine does, with its tensors carried by gloo.

Everything of vLLM's weight transfer runs as it is, on both sides: the meeting at a store, packing, the announcements,
loading layer by layer. Three things are replaced: the class that wraps the NCCL library, by one that broadcasts over
gloo in the same group; CUDA's streams, by nothing, since the CPU does one thing after the other; the number of the GPU
in use, by 0. So this shows that what we say and when we send fit each other, not that NCCL does.

A server loads it by `--worker-extension-cls gloo_for_nccl.Extension`, with this folder in its PYTHONPATH.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import pynccl


class GlooCommunicator:
    """As much of `PyNcclCommunicator` as weight transfer uses."""

    def __init__(self, group: Any, device: Any) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        gloo: Any = dist
        self._group = gloo.ProcessGroupGloo(gloo.PrefixStore("weights", group.store), self.rank, self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """All have the sender's tensor."""
        assert tensor.dtype == torch.uint8, "packed"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """Nobody meets here any more."""


class NoStream:
    """A stream of a machine that does one thing after the other."""

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        """All is done already."""


def put_in_place() -> None:
    """From now on, in this process."""
    replaced: Any = torch.cuda
    pynccl.PyNcclCommunicator = GlooCommunicator
    replaced.Stream, replaced.stream = NoStream, lambda stream: nullcontext()
    replaced.current_stream = NoStream
    torch.accelerator.current_device_index = lambda: 0


class Extension:
    """What vLLM's workers inherit from too; loading it is all that is wanted."""


put_in_place()
