"""Connects to vLLM or SGLang servers, or to a vLLM in this process, and returns one `RemoteEngine` for all of them.

`probe` measures what the servers can do. This module chooses how they receive new weights, and raises an error with
the remedy when they can't receive them in the configured way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..transport.http_channel import Channel, Server
from ..weights.sleeping import Rests, SGLangRest, VLLMRest
from ..weights.weight_config import AdapterConfig, NCCLConfig, PublishWay
from ..weights.weight_sync import UNKNOWN, VLLMReload, WeightSync
from ..weights.weight_transfer import SHARED_MEMORY, NCCLTransfer, VLLMTransfer, ports
from .lora_servers import AdapterEngine
from .server_engine import Capabilities, RemoteEngine, weight_version
from .server_probe import NotTrainable, probe
from .sglang import SGLangWeights

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

DIFFERENT = f"{UNKNOWN}the servers' weights differ"
"""Version of an engine whose servers have different weights, as after a restart of one server. The first weight sync
replaces it."""

__all__ = ["NotTrainable", "connect", "connect_channels", "probe"]


async def connect(
    urls: Sequence[str],
    renderer: Renderer,
    *,
    model_folder: Path,
    version: str = "",
    weights: bool = False,
    weights_folder: Path | None = None,
    key_variable: str | None = None,
    seconds: float = 600.0,
    patience: float = 300.0,
    control_seconds: float = 120.0,
    way: PublishWay = "reload",
    adapters: AdapterConfig | None = None,
    nccl: NCCLConfig | None = None,
) -> RemoteEngine:
    """Return an engine that samples from the servers at `urls`, which serve the model in `model_folder`.

    `version` names their weights (default: the servers' own label). `weights` allows weight syncs, by the method `way`,
    through folders in `weights_folder`. A server that was left paused is then resumed, and servers with different
    weights are accepted: the first weight sync makes their weights equal. `adapters` configures the way `lora`; `nccl`
    has the address of the way `nccl`. `seconds` bounds a request, `control_seconds` a control request; `patience` is
    the time in seconds for which requests to a busy server are repeated.

    Raises NotTrainable, CannotSend, or EngineError when a server is unreachable."""
    if not urls:
        raise ValueError("no server addresses")
    servers = [Server(url, key_variable=key_variable, seconds=seconds) for url in urls]
    return await connect_channels(
        servers,
        renderer,
        model_folder=model_folder,
        version=version,
        weights=weights,
        weights_folder=weights_folder,
        patience=patience,
        control_seconds=control_seconds,
        way=way,
        adapters=adapters,
        nccl=nccl,
    )


async def connect_channels(
    servers: Sequence[Channel],
    renderer: Renderer,
    *,
    model_folder: Path,
    version: str = "",
    weights: bool = False,
    weights_folder: Path | None = None,
    patience: float = 300.0,
    control_seconds: float = 120.0,
    way: PublishWay = "reload",
    adapters: AdapterConfig | None = None,
    nccl: NCCLConfig | None = None,
) -> RemoteEngine:
    """Like `connect`, for servers behind any `Channel`. The engine closes the channels; this function closes them when
    it fails."""
    try:
        if weights:
            # Resume paused servers before the probe: a trainer that died during a weight sync leaves its servers
            # paused, and a paused server can't answer the probe.
            make = VLLMReload if way in ("reload", "lora") else VLLMTransfer
            for server in servers:
                if not await make(server, seconds=control_seconds).free():
                    await SGLangWeights(server, seconds=control_seconds).free()
        found = [await probe(server, renderer) for server in servers]
        # Servers of one engine must agree in everything that a tape records or a check reads, as the log-prob mode.
        kinds = {replace(capabilities, takes_weights=False) for _, capabilities in found}
        if len(kinds) > 1:
            raise NotTrainable(f"the servers differ: {sorted(map(str, kinds))}; one engine needs equal ones")
        dialect, capabilities = found[0]
        if weights and way != "lora" and not all(capability.takes_weights for _, capability in found):
            raise NotTrainable(
                f"{list(servers)} take no weights: start them with VLLM_SERVER_DEV_MODE=1, on loopback "
                "or a private network only, since those routes know no API key"
            )
        labels = {await weight_version(server) for server in servers} if capabilities.versions else {None}
        if len(labels) > 1 and not version:
            if not weights or way == "lora":
                raise NotTrainable(
                    f"the servers have different weights, {sorted(map(str, labels))}: start them anew "
                    "with the same ones"
                )
            # The next weight sync writes the same weights to all servers, so a difference now is no error.
            labels = {DIFFERENT}
        label = labels.pop() or "default"
        # The way `lora` never replaces the base weights, so no later weight sync can make unknown base weights known.
        if weights and way == "lora" and label.startswith(UNKNOWN):
            raise NotTrainable(f"the weights under the adapters would be {label!r}: start {list(servers)} anew")
        given: dict[str, Any] = {
            "model_folder": model_folder,
            "version": version or label,
            "patience": patience,
            "weights_folder": weights_folder,
            "rests": _rests(servers, capabilities, control_seconds),
        }
        if weights and way == "lora":
            return AdapterEngine(
                servers,
                dialect,
                renderer,
                capabilities,
                adapters=adapters or AdapterConfig(),
                base_label=label,
                control_seconds=control_seconds,
                **given,
            )
        syncs = _syncs(servers, capabilities, way, control_seconds, nccl or NCCLConfig()) if weights else []
        for sync in syncs:
            await sync.init()
        if way in ("transfer", "nccl") and weights_folder is None and SHARED_MEMORY.is_dir():
            given["temporary_in"] = SHARED_MEMORY
        return RemoteEngine(servers, dialect, renderer, capabilities, syncs=syncs, **given)
    except BaseException:
        for server in servers:
            await server.close()
        raise


def _syncs(
    servers: Sequence[Channel], capabilities: Capabilities, way: PublishWay, seconds: float, nccl: NCCLConfig
) -> list[WeightSync]:
    """Return the weight sync of each server. Raises NotTrainable for a way that this kind of server doesn't support."""
    if capabilities.server.startswith("SGLang"):
        if way != "reload":
            raise NotTrainable(f"{capabilities.server} takes weights by engine.publish=reload only, not by {way!r}")
        return [SGLangWeights(server, seconds=seconds) for server in servers]
    if way == "nccl":
        return [
            NCCLTransfer(server, address=nccl.address, port=port, seconds=seconds)
            for server, port in zip(servers, ports(nccl.address, nccl.port, len(servers)), strict=True)
        ]
    make = VLLMTransfer if way == "transfer" else VLLMReload
    return [make(server, seconds=seconds) for server in servers]


def _rests(servers: Sequence[Channel], capabilities: Capabilities, seconds: float) -> list[Rests]:
    """Return the sleep and wake routes of each server."""
    if capabilities.server.startswith("SGLang"):
        return [SGLangRest(server, seconds=seconds) for server in servers]
    return [VLLMRest(server, seconds=seconds) for server in servers]
