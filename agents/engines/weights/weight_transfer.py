"""Weight sync through vLLM's weight-transfer routes for start, update and finish. The last one also sets the version.

With `VLLMTransfer`, the workers read files through the backend in `vllm_worker`, which `LocalServer(transfer=True)`
adds to its servers. Files in /dev/shm are shared memory. With `NCCLTransfer`, vLLM's trainer code broadcasts the
weights over NCCL. NCCL needs GPUs, so this class was tested with vLLM's workers but with gloo in place of NCCL.
Pausing, resuming and resetting caches work as in `VLLMReload`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ....agents.engines.engine import EngineError
from ....envs.blocking import in_thread
from ....tapes.errors import MissingExtra, remedy
from ..engine import PublishMode
from ..transport.http_channel import NO_ROUTE, Server, ServerFailed, free_port
from ..transport.wire import field
from .weight_sync import UNKNOWN, VLLMReload, on_all

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
"""The folder in which files are shared memory on Linux."""
SETTLE = 10.0
"""Seconds in which the servers' part of a failed broadcast must end after this process has left the group."""


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


def worker_infos(*, address: str, port: int, workers: Sequence[int]) -> list[dict[str, object]]:
    """Return what each server's workers need to join the group (`NCCLWeightTransferInitInfo`).

    `workers` has each server's number of workers. This process is rank 0 and the only sender. The first server's
    workers have the ranks from 1 on, and each further server's workers have the ranks after those."""
    if min(workers) < 1:
        raise ValueError(f"{min(workers)} workers: a server has at least one")
    common: dict[str, object] = {
        "master_address": address,
        "master_port": port,
        "world_size": 1 + sum(workers),
        "packed": True,
    }
    return [common | {"rank_offset": offset} for offset in list(accumulate(workers, initial=1))[:-1]]


def update_info(state: Sequence[tuple[str, Tensor]]) -> dict[str, object]:
    """Return the names, dtypes and shapes of the tensors in a broadcast (`NCCLWeightTransferUpdateInfo`).

    `state` must be in sending order, because the workers match the tensors by position."""
    return {
        "names": [name for name, _ in state],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in state],
        "shapes": [list(tensor.shape) for _, tensor in state],
    }


class NCCLTransfer(VLLMTransfer):
    """Makes one server's workers receive weights by NCCL. `NCCLGroup` does this for all servers together.

    Trainer and workers need vLLM, and a GPU each."""

    workers = 0
    """The number of the server's workers at the last `init`."""

    def __init__(self, server: Server, group: NCCLGroup, *, seconds: float = 120.0) -> None:
        super().__init__(server, seconds=seconds)
        self._group = group

    async def init(self) -> None:
        await VLLMReload.init(self)
        size = field(await self.server.get("/get_world_size", seconds=self._seconds), "world_size")
        self.workers = cast(int, size)
        await self._group.leave()  # if this server was restarted, its workers aren't in the group any more

    async def start(self) -> None:
        """Do nothing, because the group starts the update when it is complete."""

    async def update(self, folder: Path) -> None:
        await self._group.send(self, folder)

    async def close(self) -> None:
        await self._group.leave()

    async def leave(self) -> None:
        """Let the workers free the memory of the group that they are in, if any. vLLM refuses this in an update."""
        try:
            await self._post("/shutdown_weight_transfer_engine")
        except ServerFailed as error:
            if error.status not in NO_ROUTE:
                raise

    async def end(self) -> None:
        """End an update that failed."""
        await self._call_weights(f"{UNKNOWN}an update failed")


Errors = dict[NCCLTransfer, Exception]


class NCCLGroup:
    """One NCCL group of this process and the workers of all servers in a weight sync. Each weight is broadcast once.

    The group is made again if another set of servers takes part. If something fails, no error tells reliably which
    server was the cause. So each server that still answers gets the weights once more, in a group of its own.

    vLLM's own sender (`NCCLTrainerWeightTransferEngine`) isn't used, because it gives the workers of all servers the
    same ranks, and its blocking `send_weights` has no time limit and fails for all servers if one fails."""

    def __init__(self, *, address: str, port: int | None, seconds: float = 120.0) -> None:
        """The workers connect to `address` and `port` of this process, by default to a free port. Raises EngineError if
        this machine doesn't have the address, and the errors of `sending_device`."""
        port_at(address, port)
        self._device = sending_device()
        self._address, self._port, self._seconds = address, port, seconds
        self._at = ""
        self._communicators: list[Any] = []
        self._joined: list[NCCLTransfer] = []
        self._coming: list[NCCLTransfer] = []
        self._sending: asyncio.Task[Errors] | None = None

    async def send(self, member: NCCLTransfer, folder: Path) -> None:
        """Send the weights in `folder` to `member`, together with all members for which `send` is called in the same
        turn of the event loop. Raises an error if this member doesn't have the weights afterwards."""
        if self._sending is None or self._sending.done():
            self._coming = []
            self._sending = asyncio.create_task(self._send(folder))  # begins after all calls of this turn
        self._coming.append(member)
        errors = await self._sending
        if member in errors:
            raise errors[member]

    async def leave(self) -> None:
        """Leave the group. A broadcast that is in progress fails."""
        communicators, self._communicators, self._joined = self._communicators, [], []
        await in_thread(_destroy, communicators)

    async def _send(self, folder: Path) -> Errors:
        from safetensors.torch import load_file

        members = self._coming
        pairs = list(load_file(folder / "model.safetensors").items())
        errors = await self._send_to(members, pairs)
        for member, error in list(errors.items()):
            if not isinstance(error, ServerFailed) or error.status is not None:
                del errors[member]
                errors |= await on_all([member], NCCLTransfer.end) or await self._send_to([member], pairs)
        return errors

    async def _send_to(self, members: list[NCCLTransfer], pairs: Sequence[tuple[str, Any]]) -> Errors:
        """Send the weights in one group. Returns an error for each member that doesn't have them afterwards."""
        errors = {} if members == self._joined else await self._join(members)
        errors = errors or await on_all(members, VLLMTransfer.start)
        if errors:
            await self.leave()
            return dict.fromkeys(members, EngineError(f"nothing was sent: {next(iter(errors.values()))}")) | errors
        info = {"update_info": update_info(pairs)}
        sending = in_thread(_attempt, _broadcast, pairs, self._communicators, self._device)
        return await self._together(sending, "/update_weights", dict.fromkeys(members, info))

    async def _join(self, members: list[NCCLTransfer]) -> Errors:
        """Make a group of these members. If there are errors, it can't be used."""
        await self.leave()
        errors = await on_all(members, NCCLTransfer.leave)
        if errors:
            return errors
        port, over = port_at(self._address, self._port), threading.Event()
        self._at = f"{self._address}:{port}"
        infos = worker_infos(address=self._address, port=port, workers=[member.workers for member in members])
        bodies = {member: {"init_info": info} for member, info in zip(members, infos, strict=True)}
        errors = await self._together(
            in_thread(_attempt, _join, self._communicators, infos[0], self._device, self._seconds, over),
            "/init_weight_transfer_engine",
            bodies,
            partial(in_thread, _end_join, infos[0], over),
        )
        self._joined = [] if errors else members
        for member, error in errors.items():
            if isinstance(error, ServerFailed) and error.status is not None:
                errors[member] = EngineError(
                    f"{member.server} doesn't take weights by NCCL ({error}): start it with "
                    f"{remedy('serve model', 'NCCL', flags=' --nccl')}, or "
                    'vLLM\'s --weight-transfer-config \'{"backend": "nccl"}\''
                )
        return errors

    async def _together(
        self,
        ours: Awaitable[Any],
        route: str,
        bodies: Mapping[NCCLTransfer, object],
        unblock: Callable[[], Awaitable[None]] | None = None,
    ) -> Errors:
        """Run all sides of a collective call concurrently, because each waits for the others. Returns the servers'
        errors.

        If a side fails, this process leaves the group, so that the calls of the other servers end too. `unblock` ends
        our side if there is no group to leave yet."""
        # `_seconds` is for all sides together. This function ends calls that hang, so their own timeout is far later.
        limit = self._seconds + 3600
        calls = {
            member: asyncio.create_task(member.server.post(route, body, seconds=limit, fresh=True))
            for member, body in bodies.items()
        }
        mine, end = asyncio.create_task(_raised(ours)), time.monotonic() + self._seconds
        every = [mine, *calls.values()]
        try:
            await asyncio.wait(every, timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
            left = end - time.monotonic()
            if not mine.done() or mine.exception() is not None:
                if unblock is not None and not mine.done():
                    await unblock()
                await self.leave()
                left = SETTLE
            await asyncio.wait(every, timeout=max(0.0, left))
            why = mine.exception() if mine.done() else None
            failures = {one: call.exception() if call.done() else self._late(one, why) for one, call in calls.items()}
            errors = {one: error for one, error in failures.items() if isinstance(error, Exception)}
            if unblock is not None and not (mine.done() and why is None):
                errors = dict.fromkeys(bodies, EngineError(f"joining the group failed: {why or 'too late'}")) | errors
            if errors:
                await self.leave()
            return errors
        finally:
            for one in every:
                one.cancel()

    def _late(self, member: NCCLTransfer, why: BaseException | None) -> ServerFailed:
        """Return the error for a server whose part of a collective call didn't end. `why` is our own error."""
        cause = "" if why is None else f" Sending failed: {why}"
        return ServerFailed(
            f"{member.server} and this process did not get done over NCCL at {self._at} within {self._seconds:g} s "
            "(engine.control_seconds): do its workers live, do they reach that address (engine.weights.address), and "
            f"has each a GPU of its own, other than ours?{cause}",
            retry=False,
        )


def sending_device() -> int:
    """Return the index of the GPU to send from. Raises MissingExtra without vLLM, and EngineError without CUDA."""
    import torch

    try:
        import vllm.distributed.weight_transfer.nccl_common  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "vllm", "vllm", "publishing weights over NCCL") from error
    if not torch.cuda.is_available():
        raise EngineError(
            "engine.weights=broadcast sends weights from a GPU of this process, and torch finds no CUDA "
            f"device here (torch {torch.__version__}): train where there is one that no server uses, or "
            "set engine.weights=reload, or =transfer on one machine"
        )
    return torch.cuda.current_device()


def _attempt(function: Callable[..., None], *args: object) -> EngineError | None:
    """Call the function, and return an EngineError if it raises. The traceback of an exception would refer to the
    group, and so keep its port in use."""
    try:
        function(*args)
    except Exception as error:
        return EngineError(f"{type(error).__name__}: {error}")


async def _raised(attempt: Awaitable[EngineError | None]) -> None:
    if (error := await attempt) is not None:
        raise error


# A group keeps its port in use while anything refers to its communicator. A thread's arguments and result can outlive
# the wait for it. So these functions get a list that holds the communicator, instead of the communicator itself.


def _destroy(communicators: list[Any]) -> None:
    """Leave the group, if there is one, and free its port."""
    while communicators:
        communicators.pop().destroy()


def _join(communicators: list[Any], info: dict[str, Any], device: int, seconds: float, over: threading.Event) -> None:
    """Join the group as rank 0, and append its communicator. Waits for the workers, but at most `seconds`. Sets the
    CUDA device of this thread only."""
    import torch
    from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
        PyNcclCommunicator,
    )
    from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore[reportMissingImports]
    from vllm.utils.nccl import unpinned_nccl_env  # pyright: ignore[reportMissingImports]

    torch.cuda.set_device(device)
    # As in vLLM's `trainer_init`, which has a time limit of its own.
    address, port, size = info["master_address"], info["master_port"], info["world_size"]
    group = StatelessProcessGroup.create(address, port, 0, size, store_timeout=max(1, round(seconds)))
    if over.is_set():
        raise EngineError("a server failed while the group was made")
    with unpinned_nccl_env():
        communicators.append(PyNcclCommunicator(group, device=device))


def _end_join(info: dict[str, Any], over: threading.Event) -> None:
    """End a call of `_join` that waits for workers. The store counts connections, so these take the workers' places."""
    from torch._C._distributed_c10d import TCPStore

    over.set()
    address, port, size = info["master_address"], info["master_port"], info["world_size"]
    with suppress(RuntimeError):  # enough workers came, or the time limit was reached
        for _ in range(size):
            TCPStore(address, port, size, False, timedelta(seconds=1), use_libuv=False)


def _broadcast(pairs: Sequence[tuple[str, Any]], communicators: list[Any], device: int) -> None:
    """Broadcast `pairs` in order. Each tensor is on the GPU only while it is packed and sent."""
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
        packed_nccl_broadcast_producer,
    )

    torch.cuda.set_device(device)
    packed_nccl_broadcast_producer(
        iterator=((name, tensor.cuda()) for name, tensor in pairs),
        group=communicators[0],
        src=0,
        post_iter_func=lambda pair: pair[1],
    )


def port_at(address: str, port: int | None) -> int:
    """Return `port`, or a free port if it is None. Raises EngineError if this machine doesn't have the address."""
    try:
        free = free_port(address)
    except OSError as error:
        raise EngineError(
            f"engine.weights.address={address!r}: this process can't wait for the servers' workers there "
            f"({error}): give an address of this machine that they reach"
        ) from error
    return free if port is None else port
