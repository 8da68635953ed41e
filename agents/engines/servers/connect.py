"""Connecting to servers, vLLM's or SGLang's, and to a vLLM inside this process: all become one kind of engine.

What they can do is found out by `probe`; how they get new weights is chosen here, and refused with the remedy where
they can't.
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
"""The version of an engine whose servers, one of them started anew, have different weights until the first publish."""

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
    """An engine of the servers at `urls`, which serve the model of `model_folder`.

    `version` names their weights (default: the servers' own label). With `weights`, new ones can be published to them,
    by that `way`, through folders in `weights_folder`; servers whose weights differ sample once that was done, and one
    that was left paused is freed. `adapters` describes those of the way `lora`, `nccl` says where the way `nccl` meets
    them. Raises NotTrainable, CannotSend, or EngineError when a server can't be reached."""
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
    """As `connect`, of servers that are asked by whatever channel. They close with the engine, or when this fails."""
    try:
        if weights:
            make = VLLMReload if way in ("reload", "lora") else VLLMTransfer
            for server in servers:
                if not await make(server, seconds=control_seconds).free():
                    await SGLangWeights(server, seconds=control_seconds).free()
        found = [await probe(server, renderer) for server in servers]
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
            labels = {DIFFERENT}
        label = labels.pop() or "default"
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
    if capabilities.server.startswith("SGLang"):
        return [SGLangRest(server, seconds=seconds) for server in servers]
    return [VLLMRest(server, seconds=seconds) for server in servers]
