"""Weight sync through vLLM's weight-transfer routes for start, update and finish. The last one also sets the version.

With `VLLMTransfer`, the workers read files through the backend in `vllm_worker`, which `tapereel serve model
--transfer` adds to its servers. Files in /dev/shm are shared memory. With `NCCLTransfer`, vLLM's trainer code
broadcasts the weights over NCCL. NCCL needs GPUs, so this class was tested with vLLM's workers but with gloo in place
of NCCL. Pausing, resuming and resetting caches work as in `VLLMReload`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ....agents.engines.engine import EngineError
from ....envs.blocking import EnvironmentThread
from ....tapes.errors import MissingExtra
from ..engine import PublishMode
from ..transport.http_channel import Server, ServerFailed, free_port
from ..transport.wire import field
from .weight_sync import VLLMReload

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
"""The folder in which files are shared memory on Linux."""


class VLLMTransfer(VLLMReload):
    """Makes the workers load a folder's files into the running model, layer by layer."""

    # A sync consists of pause, start, update, prefix cache reset, finish and resume. Because the server stays paused,
    # no request can fill the prefix cache between the reset and the new version.

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
        # A failed sync may leave an update open, which blocks later updates and the update's layers. The finish call
        # ends this update with the weights received so far. Layers that received none get their old weights back.
        try:
            await self._post("/finish_weight_update", {"weight_version": version})
        except ServerFailed as error:
            if error.status != 500:
                raise
            # Status 500 means that no update is open: there was none, or a failed load ended it but left layers open.
            # An update without any weights closes these layers.
            await self._post("/start_weight_update")
            await self._post("/finish_weight_update", {"weight_version": version})


# -- NCCL -------------------------------------------------------------------------------------------------------------


def worker_info(*, address: str, port: int, workers: int) -> dict[str, object]:
    """Return what one server's workers need to join the trainer's group (`NCCLWeightTransferInitInfo`).

    The trainer is rank 0 and the only sender. The workers have ranks 1 to `workers`."""
    if workers < 1:
        raise ValueError(f"{workers} workers: a server has at least one")
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + workers,
        "packed": True,
    }


def update_info(state: Sequence[tuple[str, Tensor]]) -> dict[str, object]:
    """Return the names, dtypes and shapes of the tensors in a broadcast (`NCCLWeightTransferUpdateInfo`).

    `state` must be in sending order, because the workers match the tensors by position."""
    return {
        "names": [name for name, _ in state],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in state],
        "shapes": [list(tensor.shape) for _, tensor in state],
    }


class NCCLTransfer(VLLMTransfer):
    """Sends weights by NCCL from the trainer's GPU to one server. Each server has its own NCCL group.

    This needs two GPUs, and vLLM in both processes."""

    def __init__(self, server: Server, *, address: str, port: int, seconds: float = 120.0) -> None:
        """This process waits for the workers at `address` and `port`."""
        super().__init__(server, seconds=seconds)
        self._address, self._port = address, port
        self._group: Any = None
        # If a worker dies, a thread that waits for it in NCCL can't be stopped from Python. As a daemon thread, it at
        # least doesn't keep this process from exiting.
        self._thread = EnvironmentThread("nccl")

    async def init(self) -> None:
        device = sending_device()
        await VLLMReload.init(self)
        size = field(await self.server.get("/get_world_size", seconds=self._seconds), "world_size")
        info = worker_info(address=self._address, port=self._port, workers=cast(int, size))
        try:
            self._group, _ = await self._together(
                self._thread.run(_join(info, device)), self._post("/init_weight_transfer_engine", {"init_info": info})
            )
        except ServerFailed as error:
            raise EngineError(
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
        """Run both sides of a collective call concurrently. Each side waits for the other, so running one first would
        hang."""
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.gather(ours, theirs)
        except TimeoutError as error:
            raise EngineError(
                f"{self.server} and this process did not get done over NCCL at {self._address}:"
                f"{self._port} within {self._seconds:g} s (engine.control_seconds): do its workers live, "
                "do they reach that address (engine.nccl.address), and has each a GPU of its own, other "
                "than ours?"
            ) from error


def sending_device() -> int:
    """Return the index of the GPU to send from. Raises MissingExtra without vLLM, and EngineError without CUDA."""
    import torch

    try:
        import vllm.distributed.weight_transfer.nccl_common  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "vllm", "vllm", "publishing weights over NCCL") from error
    if not torch.cuda.is_available():
        raise EngineError(
            "engine.publish=nccl broadcasts weights from a GPU of this process, and torch finds no CUDA "
            f"device here (torch {torch.__version__}): train where there is one that no server uses, or "
            "publish by engine.publish=reload, or =transfer on one machine"
        )
    return torch.cuda.current_device()


async def _join(info: dict[str, Any], device: int) -> Any:
    """Join the group as rank 0 and wait for the workers. Sets the CUDA device of this thread only."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # pyright: ignore[reportMissingImports]

    torch.cuda.set_device(device)
    return trainer_init(info)


async def _broadcast(pairs: Sequence[tuple[str, Any]], group: Any) -> None:
    """Broadcast `pairs` in order. Each tensor is on the GPU only while it is packed and sent."""
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
    """Return `count` ports. On each port, this process waits for one server's workers. The ports begin with `first`, or
    are any free ports if `first` is None. Raises EngineError if this machine doesn't have the address."""
    try:
        return [free_port(address) if first is None else first + k for k in range(count)]
    except OSError as error:
        raise EngineError(
            f"engine.nccl.address={address!r}: this process can't wait for the servers' workers there "
            f"({error}): give an address of this machine that they reach"
        ) from error
