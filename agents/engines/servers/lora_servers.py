"""Uses LoRA adapters on vLLM servers. Each version is an adapter with its own name, and the base weights never change.

Contract. A completion is sampled entirely with the adapter that is current when its request is sent, so all its tokens
have one version. A weight sync therefore pauses no server and makes no KV cache stale. An old adapter is unloaded after
its last request has ended. A failed weight sync raises an error, and the current version stays in use.

The servers must run with `--enable-lora` (`LocalServer(lora_rank=...)`). This module doesn't import peft, because
an adapter is just a folder in peft's format.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ....tapes.errors import remedy
from ..engine import EngineError, PublishMode, Request
from ..transport.http_channel import Server, ServerFailed
from ..transport.wire import Dialect, Sampled
from ..weights.weight_config import AdapterConfig
from ..weights.weight_sync import PublishFailed, weight_version
from .fleet import ForeignWeights, Member
from .server_config import ServerSettings
from .server_engine import Capabilities, Flight, RemoteEngine

if TYPE_CHECKING:
    from torch import Tensor

    from ...rendering.renderer import Renderer

_OWN = ("lora_A", "lora_B")


def adapters_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter weights in a peft model's state dict, with the names that they have in a peft adapter file.
    Raises ValueError if `state` has no adapters."""
    found = {
        name.replace(".default.", "."): tensor
        for name, tensor in state.items()
        if any(f".{own}." in name for own in _OWN)
    }
    if not found:
        raise ValueError(
            f"none of the {len(state)} weights is an adapter's (`...lora_A.weight`): train a model with "
            f"adapters{remedy('adapters', '')}, or publish whole weights (engine.weights=reload)"
        )
    return found


def write_adapter(state: Mapping[str, Tensor], folder: Path, config: AdapterConfig, base: Path) -> None:
    """Write the adapters in `state` to `folder` in peft's format.

    The files are written to a temporary folder that is renamed at the end, so after a crash `folder` is either
    complete or missing."""
    from safetensors.torch import save_file

    found = adapters_in(state)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()},
        partial / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    layers = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in found})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        "inference_mode": True,
    }
    (partial / "adapter_config.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


class AdapterEngine(RemoteEngine):
    """Samples from vLLM servers with one LoRA adapter per version. Created by `connect` for adapters."""

    def __init__(
        self,
        members: Sequence[Member],
        dialect: Dialect,
        renderer: Renderer,
        capabilities: Capabilities,
        config: ServerSettings,
        *,
        version: str,
        adapters: AdapterConfig | None = None,
    ) -> None:
        """The arguments are the same as in `RemoteEngine`, except for the LoRA settings `adapters`. `version` is the
        version that the servers report for the base weights."""
        super().__init__(members, dialect, renderer, capabilities, config, version=version, takes_weights=True)
        self._adapters = adapters or AdapterConfig()
        self._base_label = version
        self._current: str | None = None
        """Name of the adapter for new requests, or None before the first publish, while requests use the base
        weights."""
        self._uses: Counter[str] = Counter()
        """Number of requests in flight by adapter. An adapter with requests in flight must not be unloaded."""
        self._loaded: dict[str, Path] = {}
        """Folders of the adapters that the servers have loaded, by version."""

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "drain") -> None:
        """Use the adapters in `state` for new requests. Requests in flight keep the adapter that they began with.

        Raises ValueError, and changes nothing, if an argument can't be used. Raises PublishFailed if a server can't
        load the adapter. The previous version then stays current, and the engine continues to sample."""
        self.fleet.check_version(version)
        if mode not in ("drain", "abort"):
            raise ValueError(
                f"publish mode {mode!r}: a completion keeps the adapter that it began with, so adapters "
                "are published with drain (it ends with it) or abort (it ends now)"
            )
        await self.fleet.wait_until_healthy()
        async with self.fleet.publishing, self.fleet.stopping():
            folder = self.fleet.folder_of(version)
            await asyncio.to_thread(write_adapter, state, folder, self._adapters, Path(self._config.model))
            with self.stats.timed("publish"):
                await self._load(version, folder)
            # The adapter becomes current only when all servers have it, because a request could otherwise reach a
            # server that doesn't have it yet.
            self.fleet.versions[version] = len(self.fleet.versions)
            self._loaded[version] = folder
            self.fleet.version = self._current = version
            self.stats.publishes += 1
            if mode == "abort":
                await self._end_older()
            await self._unload_idle()

    async def close(self) -> None:
        """Unload the adapters and close the connections. Requests in flight fail."""
        try:
            for version in self._loaded:
                for member in self.fleet.ready:
                    await self._unload(member.server, version)
        except ServerFailed as error:
            if error.status is not None:  # None: the server is unreachable, so nothing is left to unload
                raise
        finally:
            await super().close()

    async def _send_newest(self, member: Member) -> bool:
        """Load the current adapter on one server. The base weights must be the right ones already."""
        base = await weight_version(member.server)
        if base != self._base_label:
            raise EngineError(f"its base weights are {base!r}, and the run's are {self._base_label!r}")
        if self._current is not None:
            await self._unload(member.server, self._current)
            await self._control(member.server, "/v1/load_lora_adapter", self._adapter(self._current))
        return True

    def _adapter(self, version: str) -> dict[str, str]:
        return {"lora_name": version, "lora_path": str(self._loaded[version])}

    async def _load(self, version: str, folder: Path) -> None:
        """Load the adapter on all servers. A server that is away is left out. If a server refuses the adapter, unloads
        it from the others, so that they accept a later attempt with the same version. Then raises PublishFailed."""
        body = {"lora_name": version, "lora_path": str(folder)}
        members = self.fleet.ready
        results = await asyncio.gather(
            *(self._control(member.server, "/v1/load_lora_adapter", body) for member in members), return_exceptions=True
        )
        for k, (member, result) in enumerate(zip(members, results, strict=True)):
            if isinstance(result, ServerFailed):
                await self.fleet.leave_out_if_away(member.server, result)
                if not member.ready:
                    results[k] = None
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is None:
            return
        if not isinstance(failed, Exception):
            raise failed
        for member, result in zip(members, results, strict=True):
            if member.ready and not isinstance(result, BaseException):
                await self._unload(member.server, version)
        await asyncio.to_thread(shutil.rmtree, folder, True)
        rank = self._adapters.rank
        raise PublishFailed(
            f"publishing {version!r} failed at loading the adapter: {failed}; {self.version!r} goes "
            "on. The servers need `--enable-lora` with a max_lora_rank of at least "
            f"{rank}: {remedy('serve model', f'`LocalServer(lora_rank={rank})`', flags=f' --lora {rank}')}"
        ) from failed

    async def _end_older(self) -> None:
        """Abort requests that use older adapters. Their answers have finish `abort` and the tokens sampled so far."""
        for flight in [flight for flight in self._flights.values() if flight.version != self.version]:
            await flight.server.post(*self._dialect.abort(flight.id), seconds=self._config.control_seconds)

    async def _unload_idle(self) -> None:
        """Unload old adapters that no request uses. A later publish unloads those that are still in use now."""
        for version in [v for v in self._loaded if v != self._current and not self._uses[v]]:
            for member in self.fleet.ready:
                await self._unload(member.server, version)
            await asyncio.to_thread(shutil.rmtree, self._loaded.pop(version), True)

    async def _unload(self, server: Server, version: str) -> None:
        try:
            await self._control(server, "/v1/unload_lora_adapter", {"lora_name": version})
        except ServerFailed as error:
            if error.status != 404:  # 404: the server doesn't have the adapter, as after a restart
                raise

    async def _control(self, server: Server, route: str, body: dict[str, str]) -> None:
        # `fresh`, because completions may occupy the whole connection pool. `plain`, because these routes answer with
        # text.
        await server.post(route, body, seconds=self._config.control_seconds, fresh=True, plain=True)

    @contextmanager
    def _sampling_with(self) -> Iterator[tuple[str, str]]:
        # `_current` is read only once, because a publish may change it while the request is in flight. The same
        # adapter's count must increase now and decrease at the end. Otherwise the adapter would never be unloaded.
        name = self._current
        if name is None:
            yield self.capabilities.model, self.version
            return
        self._uses[name] += 1
        try:
            yield name, name
        finally:
            self._uses[name] -= 1

    async def _answer(self, flight: Flight, request: Request, model: str) -> object:
        try:
            return await super()._answer(flight, request, model)
        except ServerFailed as error:
            if error.status == 404 and model in self._loaded:
                problem = f"{flight.server} doesn't have the adapter {model!r}; was it restarted?"
                raise ForeignWeights(problem, retry=True) from error
            raise

    def _versioned(self, found: Sampled, flight: Flight) -> Sampled:
        # Servers report the base weights' version, not the adapter's. If this version has changed since the connection,
        # the base weights were replaced.
        labels = {version for version, _, _ in found.spans or ()}
        if labels - {self._base_label}:
            raise EngineError(
                f"the base weights under the adapters are {sorted(labels)} now, they were "
                f"{self._base_label!r}; does someone else publish to the server?"
            )
        return replace(found, spans=((flight.version, 0, len(found.ids)),) if found.ids else ())
