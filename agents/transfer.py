"""New weights for vLLM by its weight-transfer routes: start, update and finish, with the version set by the last.

`VLLMTransfer` has the workers read files, by the backend of `vllm_worker`, which every server of `tapereel serve
--transfer` has; in /dev/shm those files are shared memory. `NCCLTransfer` makes vLLM's own trainer broadcast them over
NCCL; what it says to servers is built by pure functions and tested against vLLM's classes, but it needs GPUs and was
not run. Pausing, resuming and caches are as in `VLLMReload`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..tapes.errors import MissingExtra
from .http import Channel
from .publishing import PublishMode, VLLMReload

SHARED_MEMORY = Path("/dev/shm")
"""Where files are memory, on Linux."""


class VLLMTransfer(VLLMReload):
    """The workers load the files of a folder into the running model, layer by layer."""

    async def init(self) -> None:
        await super().init()
        await self._post("/init_weight_transfer_engine", {"init_info": {}})

    async def start(self) -> None:
        await self._post("/start_weight_update")

    async def update(self, folder: Path) -> None:
        await self._post("/update_weights", {"update_info": {"folder": str(folder)}})

    async def finish(self, version: str, mode: PublishMode) -> None:
        if mode != "stale_kv":
            await self._post("/reset_prefix_cache")
        await self._post("/finish_weight_update", {"weight_version": version})


# -- NCCL -------------------------------------------------------------------------------------------------------------


def worker_info(*, address: str, port: int, workers: int, packed: bool = True) -> dict[str, Any]:
    """What the workers of one server are told to join the trainer's group with: `NCCLWeightTransferInitInfo`. The
    trainer is rank 0, its only sender; the workers follow."""
    if workers < 1:
        raise ValueError(f"{workers} workers: a server has at least one")
    return {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 1 + workers,
            "packed": packed}  # fmt: skip


class Named(Protocol):
    """A tensor, as far as its announcement needs it."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


def update_info(state: Sequence[tuple[str, Named]]) -> dict[str, Any]:
    """What is announced ahead of a broadcast, in its order: `NCCLWeightTransferUpdateInfo`."""
    return {"names": [name for name, _ in state],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in state],
            "shapes": [list(tensor.shape) for _, tensor in state]}  # fmt: skip


class NCCLTransfer(VLLMTransfer):
    """One server that receives by NCCL from the trainer's GPU. Not run: it needs two GPUs and vLLM here and there."""

    def __init__(self, server: Channel, *, address: str, port: int, seconds: float = 120.0) -> None:
        """`address` and `port`: where this process waits for the workers."""
        super().__init__(server, seconds=seconds)
        self._address, self._port = address, port
        self._group: Any = None

    async def init(self) -> None:
        try:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "vllm", "vllm", "publishing weights over NCCL") from error
        await VLLMReload.init(self)
        size = (await self.server.get("/get_world_size", seconds=self._seconds))["world_size"]
        info = worker_info(address=self._address, port=self._port, workers=size)
        self._group, _ = await self._together(
            asyncio.to_thread(trainer_init, info), self._post("/init_weight_transfer_engine", {"init_info": info}))

    async def update(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
            packed_nccl_broadcast_producer,
        )

        pairs = [(name, tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items()]
        send = asyncio.to_thread(packed_nccl_broadcast_producer, iterator=iter(pairs), group=self._group, src=0,
                                 post_iter_func=lambda pair: pair[1])  # fmt: skip
        await self._together(send, self._post("/update_weights", {"update_info": update_info(pairs)}))

    async def _together(self, ours: Awaitable[Any], theirs: Awaitable[Any]) -> tuple[Any, Any]:
        """Both sides of a collective call, each of which waits for the other."""
        async with asyncio.timeout(self._seconds):
            return await asyncio.gather(ours, theirs)
