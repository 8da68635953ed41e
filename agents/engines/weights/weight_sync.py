"""Weight sync to servers in a fixed order of steps, each of which raises an error after a timeout.

`sync_servers` runs the steps pause, start, update, finish and resume on all servers. A step ends on every server before
the next one begins, because one server could otherwise sample with new weights while another still has the old ones.
After a failed step, the weights of the server are unknown. `sync_servers` then raises, and the engine must stop
sampling. No step is retried here, since a step that timed out may still be running on the server. The servers read the
weights from a folder.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ....tapes.errors import TapereelError
from ..engine import PublishMode
from ..transport.http_channel import NO_ROUTE, Server, ServerFailed
from .sleeping import Part, Rests

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = "unknown: "
"""Prefix of the version name for weights whose true version is unknown."""


class PublishFailed(TapereelError, RuntimeError):
    """A step of a weight sync failed on a server. Later samples from that server have unknown weights."""


class WeightSync(Rests, Protocol):
    """The control routes of one server. Each method returns after the server has finished, or raises an error."""

    async def free(self) -> None:
        """End a pause or a sleep that no process will end, for example because a trainer died during a weight sync."""
        ...

    async def init(self) -> None:
        """Check that the server accepts weights. The caller runs it once, before all other methods."""
        ...

    async def pause(self, mode: PublishMode) -> None:
        """Stop sampling. `mode` determines what happens to completions in flight."""
        ...

    async def start(self) -> None:
        """Announce new weights. This is a separate step, so that a server that hangs here is found before weights are
        sent to any server."""
        ...

    async def update(self, folder: Path) -> None:
        """Load the weights in `folder` (Hugging Face format, safetensors)."""
        ...

    async def finish(self, version: str, mode: PublishMode) -> None:
        """Set the version of later tokens, and drop all KV of older weights except in the mode `stale_kv`."""
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...

    async def abandon(self, version: str) -> None:
        """Clean up after a failed sync: end completions in flight, name the weights `version`, and resume sampling.

        A server that stays paused would block its other clients."""
        ...


class VLLMReload:
    """Uses the routes of vLLM's development mode (VLLM_SERVER_DEV_MODE=1) to make the server reload a folder."""

    def __init__(self, server: Server, *, seconds: float = 120.0) -> None:
        """`seconds` is the time limit of each step."""
        self.server = server
        self._seconds = seconds

    async def init(self) -> None:
        await self.server.get("/weight_info", seconds=self._seconds)

    async def pause(self, mode: PublishMode) -> None:
        way = {"reprefill": "keep", "stale_kv": "keep", "drain": "wait", "abort": "abort"}[mode]
        await self._post("/pause", params={"mode": way, "clear_cache": "false" if mode == "stale_kv" else "true"})

    async def start(self) -> None:
        """Do nothing, because a reload from a folder has no separate start."""

    async def update(self, folder: Path) -> None:
        await self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": self._seconds},
        )

    async def finish(self, version: str, mode: PublishMode) -> None:
        if mode != "stale_kv":
            # A reload keeps the prefix cache. Without the reset, later prompts would use KV of the old weights.
            await self._post("/reset_prefix_cache")
        await self._post("/update_weight_version", {"new_version": version})

    async def resume(self) -> None:
        await self._post("/resume")

    async def abandon(self, version: str) -> None:
        await self._drop()
        await self._call_weights(version)
        await self._post("/resume")

    async def _call_weights(self, version: str) -> None:
        """Set the version of the current weights."""
        await self._post("/update_weight_version", {"new_version": version})

    async def free(self) -> None:
        """End a pause or a sleep that no process will end. Does nothing if the server isn't paused or has no such
        route. The weights may mix two versions, so their version becomes unknown."""
        try:
            found = await self.server.get("/is_paused", seconds=self._seconds)
        except ServerFailed as error:
            if error.status not in NO_ROUTE:
                raise
            return
        if isinstance(found, dict) and found.get("is_paused"):
            await self._drop()
            # A sleeping server is paused as well, and has no GPU memory to sample with. This call resumes a server that
            # doesn't sleep, so all completions must have ended before.
            try:
                await self._post("/wake_up")
            except ServerFailed as error:
                if error.status not in NO_ROUTE:
                    raise
            await self.abandon(f"{UNKNOWN}the server was found paused")

    # Sleep uses vLLM's `/sleep` and `/wake_up`. Level 1 keeps the weights in host memory.

    async def release(self) -> None:
        await self._post("/sleep", params={"level": "1"})

    async def clear(self) -> None:
        await self._post("/reset_prefix_cache")

    async def restore(self, part: Part) -> None:
        await self._post("/wake_up", params={"tags": part})

    async def _drop(self) -> None:
        """Pause the server and end the completions in flight."""
        await self._post("/pause", params={"mode": "abort", "clear_cache": "true"})

    async def _post(self, route: str, body: object = None, params: dict[str, str] | None = None) -> None:
        await self.server.post(route, body, params=params, seconds=self._seconds, fresh=True)


async def sync_servers(
    syncs: Sequence[WeightSync], folder: Path, version: str, mode: PublishMode, timers: dict[str, float] | None = None
) -> None:
    """Send the weights in `folder` to every server as `version`.

    Raises PublishFailed with the failed step and its server. Completions in flight then end on all servers. Adds the
    seconds of each step to `timers`. A cancellation skips the cleanup and can leave servers paused (see
    `VLLMReload.free`)."""
    steps: list[tuple[str, Callable[[WeightSync], Awaitable[None]]]] = [
        ("pause", lambda sync: sync.pause(mode)),
        ("start", lambda sync: sync.start()),
        ("update", lambda sync: sync.update(folder)),
        ("finish", lambda sync: sync.finish(version, mode)),
        ("resume", lambda sync: sync.resume()),
    ]
    for name, step in steps:
        began = time.perf_counter()
        failed = await _on_all(syncs, step)
        if timers is not None:
            timers[name] = timers.get(name, 0.0) + time.perf_counter() - began
        if failed is not None:
            sync, error = failed
            # The cleanup includes all servers, because those that didn't fail may be paused or already have the new
            # weights.
            left = await _on_all(syncs, lambda sync: sync.abandon(f"{UNKNOWN}publishing {version} failed"))
            cleanup = f"; so did bringing {_where(left[0])} back: {left[1]}" if left is not None else ""
            raise PublishFailed(
                f"publishing {version!r} failed at `{name}` on {_where(sync)}: {type(error).__name__}: "
                f"{error}{cleanup}. Nothing is sampled any more, since the weights are unknown; see "
                "that the server is well, restart it if it isn't, and connect to all of them again "
                "(a training run: `resume=True`)"
            ) from error


async def _on_all(
    syncs: Sequence[WeightSync], step: Callable[[WeightSync], Awaitable[None]]
) -> tuple[WeightSync, Exception] | None:
    """Run a step on all servers concurrently. Returns the first failed server and its error."""
    # `return_exceptions` waits for every server, so that no step is still running when the cleanup begins.
    results = await asyncio.gather(*(step(sync) for sync in syncs), return_exceptions=True)
    for sync, result in zip(syncs, results, strict=True):
        if isinstance(result, Exception):
            return sync, result
        if isinstance(result, BaseException):
            raise result
    return None


def _where(sync: WeightSync) -> str:
    return repr(getattr(sync, "server", sync))


def check_weights(state: Mapping[str, Tensor], model: Path) -> None:
    """Check the names and shapes in `state` against the safetensors in `model`, if it has such files.

    A server can't recover from weights that don't fit. Raises ValueError with the first difference."""
    from safetensors import safe_open

    expected: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            expected |= {_own(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not expected:
        return
    names = {_own(name) for name in state}
    wrong = next((name for name in expected if name not in names), None)
    if wrong is not None:
        raise ValueError(f"the weights lack {wrong!r}, which the model in {model} has")
    for name, tensor in state.items():
        if tuple(tensor.shape) != (shape := expected.get(_own(name), tensor.shape)):
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; in {model} it has {shape}")


def _own(name: str) -> str:
    """Return the name without its parts `model` and `language_model`, because vision models have them at different
    places in files and in state dicts."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def write_weights(state: Mapping[str, Tensor], folder: Path, model: Path) -> None:
    """Write `state` to `folder` as safetensors, with the configuration files from `model`.

    The function writes to a hidden folder and renames it at the end, so `folder` is never incomplete. After a crash
    between the removal of the old folder and the rename, `folder` doesn't exist."""
    from safetensors.torch import save_file

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in model.glob("*.json"):
        # An index is skipped, since it names the weight files of `model`, which this folder doesn't have.
        if not path.name.endswith(".safetensors.index.json"):
            shutil.copy2(path, partial / path.name)
    seen: set[int] = set()
    tensors = {}
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        # A tied weight is stored once, under its first name in sorted order, which is the head's name. vLLM's CPU build
        # keeps a packed copy of the head, and packs it again only when the file names the head.
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


async def weight_version(server: Server) -> str | None:
    """Return the server's name for its weights, or None if no route returns one."""
    for route in ("/weight_info", "/model_info"):
        try:
            found = await server.get(route, seconds=30.0)
        except ServerFailed as error:
            if error.status in NO_ROUTE:
                continue
            raise
        if isinstance(found, dict) and found.get("weight_version") is not None:
            return str(found["weight_version"])
    return None
