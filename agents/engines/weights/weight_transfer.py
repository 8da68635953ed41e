"""New weights for vLLM by its weight-transfer routes: start, update and finish, with the version set by the last.

`VLLMTransfer` has the workers read files, by the backend of `vllm_worker`, which every server of `tapereel serve model
--transfer` has; in /dev/shm those files are shared memory. `NCCLTransfer` makes vLLM's own trainer broadcast them over
NCCL; it was run with vLLM's own workers and gloo in the place of NCCL's library, which needs GPUs. Pausing, resuming
and caches are as in `VLLMReload`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ....envs.blocking import EnvironmentThread
from ....tapes.errors import MissingExtra, TapereelError
from ..transport.http_channel import Channel, ServerFailed
from .weight_sync import PublishMode, VLLMReload

SHARED_MEMORY = Path("/dev/shm")
"""Where files are memory, on Linux."""


class CannotSend(TapereelError, RuntimeError):
    """This process can't send weights in the way that was asked for."""


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

    async def _call_weights(self, version: str) -> None:
        # An update that was begun keeps every later one from beginning, and its layers from running, until it is
        # finished with what came: the layers without new weights get back their own.
        try:
            await self._post("/finish_weight_update", {"weight_version": version})
        except ServerFailed as error:
            if error.status != 500:
                raise
            # None is at work: there was none, or loading ended it and left the layers open.
            await self._post("/start_weight_update")
            await self._post("/finish_weight_update", {"weight_version": version})


# -- NCCL -------------------------------------------------------------------------------------------------------------


def worker_info(*, address: str, port: int, workers: int, packed: bool = True) -> dict[str, Any]:
    """What the workers of one server are told to join the trainer's group with: `NCCLWeightTransferInitInfo`. The
    trainer is rank 0, its only sender; the workers follow."""
    if workers < 1:
        raise ValueError(f"{workers} workers: a server has at least one")
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + workers,
        "packed": packed,
    }


class Named(Protocol):
    """A tensor, as far as its announcement needs it."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


def update_info(state: Sequence[tuple[str, Named]]) -> dict[str, Any]:
    """What is announced ahead of a broadcast, in its order: `NCCLWeightTransferUpdateInfo`."""
    return {
        "names": [name for name, _ in state],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in state],
        "shapes": [list(tensor.shape) for _, tensor in state],
    }


class NCCLTransfer(VLLMTransfer):
    """One server that receives by NCCL from the trainer's GPU, in a group of their own. It needs two GPUs, and vLLM
    here and there."""

    def __init__(self, server: Channel, *, address: str, port: int, seconds: float = 120.0) -> None:
        """`address` and `port`: where this process waits for the workers."""
        super().__init__(server, seconds=seconds)
        self._address, self._port = address, port
        self._group: Any = None
        # Python can't end a thread that waits in NCCL for a worker that died, so nobody may have to wait for it.
        self._thread = EnvironmentThread("nccl")

    async def init(self) -> None:
        device = sending_device()
        await VLLMReload.init(self)
        size = (await self.server.get("/get_world_size", seconds=self._seconds))["world_size"]
        info = worker_info(address=self._address, port=self._port, workers=size)
        try:
            self._group, _ = await self._together(
                self._thread.run(_join(info, device)), self._post("/init_weight_transfer_engine", {"init_info": info})
            )
        except ServerFailed as error:
            raise CannotSend(
                f"{self.server} doesn't take weights by NCCL ({error}): start it with tapereel serve "
                '--nccl, or vLLM\'s --weight-transfer-config \'{"backend": "nccl"}\''
            ) from error

    async def update(self, folder: Path) -> None:
        from safetensors.torch import load_file

        pairs = list(load_file(folder / "model.safetensors").items())
        await self._together(
            self._thread.run(_broadcast(pairs, self._group)),
            self._post("/update_weights", {"update_info": update_info(pairs)}),
        )

    async def _together(self, ours: Awaitable[Any], theirs: Awaitable[Any]) -> tuple[Any, Any]:
        """Both sides of a collective call, each of which waits for the other."""
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.gather(ours, theirs)
        except TimeoutError as error:
            raise CannotSend(
                f"{self.server} and this process did not get done over NCCL at {self._address}:"
                f"{self._port} within {self._seconds:g} s (engine.control_seconds): do its workers live, "
                "do they reach that address (engine.nccl.address), and has each a GPU of its own, other "
                "than ours?"
            ) from error


def sending_device() -> int:
    """The GPU of this process that sends. MissingExtra without vLLM, CannotSend without CUDA."""
    import torch

    try:
        import vllm.distributed.weight_transfer.nccl_common  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "vllm", "vllm", "publishing weights over NCCL") from error
    if not torch.cuda.is_available():
        raise CannotSend(
            "engine.publish=nccl broadcasts weights from a GPU of this process, and torch finds no CUDA "
            f"device here (torch {torch.__version__}): train where there is one that no server uses, or "
            "publish by engine.publish=reload, or =transfer on one machine"
        )
    return torch.cuda.current_device()


async def _join(info: dict[str, Any], device: int) -> Any:
    """Wait for the workers, as rank 0 of the group with them."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # pyright: ignore[reportMissingImports]

    torch.cuda.set_device(device)
    return trainer_init(info)


async def _broadcast(pairs: Sequence[tuple[str, Any]], group: Any) -> None:
    """Send them, in that order. Each is on the GPU from when it is packed until it is sent."""
    from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
        packed_nccl_broadcast_producer,
    )

    packed_nccl_broadcast_producer(
        iterator=((name, tensor.cuda()) for name, tensor in pairs),
        group=group,
        src=0,
        post_iter_func=lambda pair: pair[1],
    )


def ports(address: str, first: int | None, count: int) -> list[int]:
    """Where this process waits for the workers of each of so many servers: `first` and those after it, or free ones."""
    return [free_port(address) if first is None else first + k for k in range(count)]


def free_port(address: str) -> int:
    """A port that was free at that address a moment ago. CannotSend where this machine doesn't have the address."""
    try:
        with socket.create_server((address, 0)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise CannotSend(
            f"engine.nccl.address={address!r}: this process can't wait for the servers' workers there "
            f"({error}): give an address of this machine that they reach"
        ) from error
