"""New weights for servers that sample: one order of steps, each with a timeout that raises.

`sync_servers` takes the steps pause, start, update, finish and resume on all servers. A step
ends on every server before the next one begins. The weights of a server on which a step failed are unknown:
`sync_servers` raises, and the engine must not sample any more. Weights travel as a folder that the servers can read.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ....tapes.errors import TapereelError
from ..transport.http_channel import Channel, ServerFailed

if TYPE_CHECKING:
    from torch import Tensor

PublishMode = Literal["reprefill", "drain", "stale_kv", "abort"]
"""What becomes of completions in flight. `reprefill`: their KV is computed again under the new weights (exact).
`drain`: they are finished first (exact, slower). `abort`: they end with what they have, which is recorded. `stale_kv`:
they go on over the old KV, and their log-probs are those of no model; for experiments that want to show it."""


UNKNOWN = "unknown: "
"""What the name of weights begins with that nobody can name."""


class PublishFailed(TapereelError, RuntimeError):
    """A step of publishing failed on some server; nothing sampled there from then on can be trusted."""


class WeightSync(Protocol):
    """One server's control plane. Every method returns once the server has done it, and raises when it hasn't."""

    async def init(self) -> None:
        """Once, before anything else: see that the server takes weights at all."""
        ...

    async def pause(self, mode: PublishMode) -> None:
        """Stop sampling, in the way `mode` says."""
        ...

    async def start(self) -> None:
        """Weights will come."""
        ...

    async def update(self, folder: Path) -> None:
        """Take the weights in `folder` (Hugging Face format, safetensors)."""
        ...

    async def finish(self, version: str, mode: PublishMode) -> None:
        """Tokens from now on carry `version`; nothing computed by older weights is used again, except in `stale_kv`."""
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def abandon(self, version: str) -> None:
        """Publishing `version` failed: end what is under way, name the weights `version`, and sample again, so that
        nobody waits for a server that stays paused."""
        ...


class VLLMReload:
    """vLLM's routes of the development mode (VLLM_SERVER_DEV_MODE=1), with weights reloaded from a folder."""

    def __init__(self, server: Channel, *, seconds: float = 120.0) -> None:
        """Every step is bounded by `seconds`."""
        self.server = server
        self._seconds = seconds

    async def init(self) -> None:
        await self.server.get("/weight_info", seconds=self._seconds)

    async def pause(self, mode: PublishMode) -> None:
        way = {"reprefill": "keep", "stale_kv": "keep", "drain": "wait", "abort": "abort"}[mode]
        await self._post("/pause", params={"mode": way, "clear_cache": "false" if mode == "stale_kv" else "true"})

    async def start(self) -> None:
        """Reloading from a folder has no start."""

    async def update(self, folder: Path) -> None:
        await self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": self._seconds},
        )

    async def finish(self, version: str, mode: PublishMode) -> None:
        if mode != "stale_kv":
            # Reloading leaves the prefix cache as it was: later prompts would be read with the old weights' KV.
            await self._post("/reset_prefix_cache")
        await self._post("/update_weight_version", {"new_version": version})

    async def resume(self) -> None:
        await self._post("/resume")

    async def abandon(self, version: str) -> None:
        await self._drop()
        await self._call_weights(version)
        await self._post("/resume")

    async def _call_weights(self, version: str) -> None:
        """Name the weights, such as they are."""
        await self._post("/update_weight_version", {"new_version": version})

    async def free(self) -> bool:
        """Bring the server out of a pause or a sleep that nobody will end, as that of a trainer which died in
        mid-update. Its weights may be of two versions, so they are called unknown. Nothing where it isn't paused;
        False where it can't say so."""
        try:
            found = await self.server.get("/is_paused", seconds=self._seconds)
        except ServerFailed as error:
            if error.status in (403, 404, 405):
                return False
            raise
        if isinstance(found, dict) and found.get("is_paused"):
            await self._drop()
            await self._wake()
            await self.abandon(f"{UNKNOWN}the server was found paused")
        return True

    async def _drop(self) -> None:
        """Pause, and end what is under way."""
        await self._post("/pause", params={"mode": "abort", "clear_cache": "true"})

    async def _wake(self) -> None:
        """One that sleeps is paused too, and has no memory to go on with. One that doesn't sleep goes on by this, so
        nothing may be under way."""
        try:
            await self._post("/wake_up")
        except ServerFailed as error:
            if error.status not in (403, 404, 405):
                raise

    async def _post(self, route: str, body: Any = None, params: dict[str, str] | None = None) -> Any:
        return await self.server.post(route, body, params=params, seconds=self._seconds, fresh=True)


async def sync_servers(
    syncs: Sequence[WeightSync], folder: Path, version: str, mode: PublishMode, timers: dict[str, float] | None = None
) -> None:
    """Bring the weights in `folder` to every server as `version`. PublishFailed names the step and the server; what was
    under way is ended then, on all of them. The seconds of each step are added to `timers`."""
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
            left = await _on_all(syncs, lambda sync: sync.abandon(f"{UNKNOWN}publishing {version} failed"))
            told = f"; so did bringing {_where(left[0])} back: {left[1]}" if left is not None else ""
            raise PublishFailed(
                f"publishing {version!r} failed at `{name}` on {_where(sync)}: {type(error).__name__}: "
                f"{error}{told}. Nothing is sampled any more, since nobody could name the weights; see "
                "that the server is well, start it anew if it isn't, and connect to all of them again "
                "(a training run: --resume)"
            ) from error


async def _on_all(
    syncs: Sequence[WeightSync], step: Callable[[WeightSync], Awaitable[None]]
) -> tuple[WeightSync, Exception] | None:
    """The step on every server at once; the first that failed, and how."""
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
    """That `state` has the names and shapes of the weights in `model`, as far as those are safetensors: a server that
    was given others is lost. ValueError names the first difference."""
    from safetensors import safe_open

    expected: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            expected |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not expected:
        return
    wrong = next((name for name in expected if name not in state), None)
    if wrong is not None:
        raise ValueError(f"the weights lack {wrong!r}, which the model in {model} has")
    for name, tensor in state.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; in {model} it has {expected[name]}")


def write_weights(state: Mapping[str, Tensor], folder: Path, model: Path) -> None:
    """`state` as safetensors in `folder`, beside the configuration files of `model`; complete or not there at all."""
    from safetensors.torch import save_file

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in model.glob("*.json"):
        if not path.name.endswith(".safetensors.index.json"):
            shutil.copy2(path, partial / path.name)
    seen: set[int] = set()
    tensors = {}
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        # A tied weight is stored once, under the first of its names, which is the head's: vLLM's CPU build keeps a
        # packed copy of the head, and packs it anew only when the file names the head.
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
