"""Sends new weights to servers in a fixed order of steps, each with a timeout.

`sync_servers` runs the steps pause, start, update, finish and resume on all servers. Every server must finish a step
before the next step begins. Otherwise one server could sample with new weights while another still has the old ones. If
a step fails on a server, its weights are unknown, and the later steps leave it out. If all servers have failed,
`sync_servers` raises an error, and the engine must stop sampling.
Steps aren't retried, because after a timeout, a step may still be running on the server. Servers read the weights from
a folder, or receive them over NCCL (`NCCLGroup`, which repeats a failed broadcast).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ....tapes.errors import TapereelError
from ..engine import PublishMode
from ..transport.http_channel import NO_ROUTE, Server, ServerFailed
from .sleeping import Part, Rests

STARTED = "default"
"""The version that vLLM and SGLang report until they receive new weights."""
UNKNOWN = "unknown: "
"""Prefix of the version name if a server's weights are unknown."""


class PublishFailed(TapereelError, RuntimeError):
    """A step of a weight sync failed on a server. The server's weights are unknown from now on."""


class WeightSync(Rests, Protocol):
    """The control routes of one server. Each method returns after the server has finished, or raises an error."""

    async def free(self) -> None:
        """End a pause or sleep that was left behind, for example by a trainer that died during a weight sync."""
        ...

    async def init(self) -> None:
        """Check that the server accepts new weights. Called once, before all other methods."""
        ...

    async def pause(self, mode: PublishMode) -> None:
        """Make the server stop sampling. `mode` determines what happens to completions in flight."""
        ...

    async def start(self) -> None:
        """Announce new weights. If a server hangs in this step, no server has received weights yet, because all servers
        load them in a later step."""
        ...

    async def update(self, folder: Path) -> None:
        """Load the weights in `folder` (Hugging Face format, safetensors)."""
        ...

    async def finish(self, version: str, mode: PublishMode) -> None:
        """Set the version of later tokens. Also drop all KV from older weights, unless the mode is `stale_kv`."""
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...

    async def abandon(self, version: str) -> None:
        """Clean up after a failed sync. Ends completions in flight, names the weights `version`, and resumes sampling.

        If the server stayed paused, its other clients would be blocked."""
        ...

    async def close(self) -> None:
        """Free what this process holds for weight syncs."""
        ...


SyncT = TypeVar("SyncT", bound=WeightSync)


class VLLMReload:
    """Makes a vLLM server reload a folder, with routes that exist in development mode (VLLM_SERVER_DEV_MODE=1)."""

    def __init__(self, server: Server, *, seconds: float = 120.0) -> None:
        """`seconds` is the time limit for each step."""
        self.server = server
        self._seconds = seconds

    async def init(self) -> None:
        await self.server.get("/weight_info", seconds=self._seconds)

    async def pause(self, mode: PublishMode) -> None:
        way = {"reprefill": "keep", "stale_kv": "keep", "drain": "wait", "abort": "abort"}[mode]
        await self._post("/pause", params={"mode": way, "clear_cache": "false" if mode == "stale_kv" else "true"})

    async def start(self) -> None:
        """Do nothing, because reloading a folder has no start step."""

    async def update(self, folder: Path) -> None:
        await self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": self._seconds},
        )

    async def finish(self, version: str, mode: PublishMode) -> None:
        if mode != "stale_kv":
            # Reloading keeps the prefix cache. Without the reset, later prompts would use KV from the old weights.
            await self._post("/reset_prefix_cache")
        await self._post("/update_weight_version", {"new_version": version})

    async def resume(self) -> None:
        await self._post("/resume")

    async def abandon(self, version: str) -> None:
        await self._drop()
        await self._call_weights(version)
        await self._post("/resume")

    async def close(self) -> None:
        """Do nothing, because each step is a request of its own."""

    async def _call_weights(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version})

    async def free(self) -> None:
        """End a pause that was left behind, for example by a trainer that died. Does nothing if the server isn't paused
        or lacks the routes. A paused server's weights may be from two versions, so their version becomes unknown."""
        try:
            found = await self.server.get("/is_paused", seconds=self._seconds)
        except ServerFailed as error:
            if error.status not in NO_ROUTE:
                raise
            return
        if isinstance(found, dict) and found.get("is_paused"):
            await self._drop()
            # A sleeping server is paused too, and needs its GPU memory back. If the server isn't asleep, this call
            # resumes it, so all completions must have been ended before.
            try:
                await self._post("/wake_up")
            except ServerFailed as error:
                if error.status not in NO_ROUTE:
                    raise
            await self.abandon(f"{UNKNOWN}the server was found paused")

    # The sleep routes are vLLM's `/sleep` and `/wake_up`. Sleep level 1 keeps the weights in host memory.

    async def release(self) -> None:
        await self._post("/sleep", params={"level": "1"})

    async def clear(self) -> None:
        await self._post("/reset_prefix_cache")

    async def restore(self, part: Part) -> None:
        await self._post("/wake_up", params={"tags": part})

    async def _drop(self) -> None:
        """Pause the server and end its completions in flight."""
        await self._post("/pause", params={"mode": "abort", "clear_cache": "true"})

    async def _post(self, route: str, body: object = None, params: dict[str, str] | None = None) -> None:
        await self.server.post(route, body, params=params, seconds=self._seconds, fresh=True)


async def sync_servers(
    syncs: Sequence[WeightSync], folder: Path, version: str, mode: PublishMode, timers: dict[str, float] | None = None
) -> dict[WeightSync, PublishFailed]:
    """Send the weights in `folder` to every server as `version`. Returns the errors of the servers that failed, and may
    be paused now. All others have the weights.

    Adds the seconds of each step to `timers`. If all servers fail, ends the completions in flight on all of them and
    raises PublishFailed, which names the step and the server. A cancelled call doesn't do this cleanup, so servers may
    then stay paused (see `VLLMReload.free`)."""
    steps: list[tuple[str, Callable[[WeightSync], Awaitable[None]]]] = [
        ("pause", lambda sync: sync.pause(mode)),
        ("start", lambda sync: sync.start()),
        ("update", lambda sync: sync.update(folder)),
        ("finish", lambda sync: sync.finish(version, mode)),
        ("resume", lambda sync: sync.resume()),
    ]
    failed: dict[WeightSync, PublishFailed] = {}
    for name, step in steps:
        began = time.perf_counter()
        errors = await on_all([sync for sync in syncs if sync not in failed], step)
        if timers is not None:
            timers[name] = timers.get(name, 0.0) + time.perf_counter() - began
        for sync, error in errors.items():
            failed[sync] = PublishFailed(
                f"publishing {version!r} failed at `{name}` on {_where(sync)}: {type(error).__name__}: {error}"
            )
            failed[sync].__cause__ = error
        if errors and len(failed) == len(syncs):
            left = await on_all(syncs, lambda sync: sync.abandon(f"{UNKNOWN}publishing {version} failed"))
            cleanup = [f"; so did bringing {_where(sync)} back: {error}" for sync, error in left.items()][:1]
            first = next(iter(failed.values()))
            raise PublishFailed(
                f"{first}{''.join(cleanup)}. Nothing is sampled any more, since the weights are unknown; see "
                "that the server is well, restart it if it isn't, and connect to all of them again "
                "(a training run: `resume=True`)"
            ) from first.__cause__
    return failed


async def on_all(syncs: Sequence[SyncT], step: Callable[[SyncT], Awaitable[None]]) -> dict[SyncT, Exception]:
    """Run a step on all servers concurrently. Returns the errors of the servers on which it failed."""
    # `return_exceptions` makes gather wait for every server, so the step has ended on all servers when the next one
    # begins.
    results = await asyncio.gather(*(step(sync) for sync in syncs), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return {sync: error for sync, error in zip(syncs, results, strict=True) if isinstance(error, Exception)}


def _where(sync: WeightSync) -> str:
    return repr(getattr(sync, "server", sync))


async def weight_version(server: Server) -> str | None:
    """Return the version that the server reports for its weights, or None if it reports none."""
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
