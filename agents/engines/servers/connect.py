"""Connects to vLLM or SGLang servers and returns one `RemoteEngine` for all of them.

`probe` measures what the servers can do. This module chooses how they receive new weights, and raises an error with the
remedy if they can't receive them in the configured way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ....agents.engines.engine import EngineError
from ..transport.absence import Absence
from ..transport.http_channel import Server, ServerFailed
from ..weights.weight_config import AdapterConfig
from ..weights.weight_sync import UNKNOWN, VLLMReload, WeightSync, weight_version
from ..weights.weight_transfer import NCCLTransfer, VLLMTransfer, ports
from .lora_servers import AdapterEngine
from .server_config import NCCLConfig, ServerSettings
from .server_engine import HEALTH_SECONDS, RemoteEngine, is_away
from .server_probe import kind_of, probe
from .sglang import SGLangWeights

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

DIFFERENT = f"{UNKNOWN}the servers' weights differ"
"""Version of an engine whose servers have different weights, for example after one server was restarted. The first
weight sync replaces it."""

__all__ = ["connect", "probe"]


async def connect(
    config: ServerSettings,
    renderer: Renderer,
    *,
    weights: bool = False,
    adapters: AdapterConfig | None = None,
    servers: Sequence[Server] = (),
) -> RemoteEngine:
    """Return an engine that samples from the servers of `config`, or from `servers`, which it then owns.

    `weights` allows weight syncs. A server that was left paused is then resumed, and servers with different weights
    are accepted: the first weight sync makes their weights equal. `adapters` has the settings for `publish: lora`. The
    call waits, for at most `config.patience` seconds, until all servers answer.

    Raises EngineError if a server is unreachable or unsuitable, or if this process can't send weights to it. The
    servers are then closed."""
    servers = servers or [Server(url, key_variable=config.key_variable, seconds=config.seconds) for url in config.urls]
    if not servers:
        raise ValueError(f"engine.urls is {config.urls!r} and no servers are passed: name at least one address")
    try:
        with Absence(config.patience).request() as tries:
            while True:
                try:
                    return await _connected(config, renderer, weights, adapters, servers)
                except ServerFailed as error:
                    away = [
                        await is_away(server, error, HEALTH_SECONDS) for server in servers if server.url in str(error)
                    ]
                    if not any(away):
                        raise
                    await tries.failed(error)
    except BaseException:
        for server in servers:
            await server.close()
        raise


async def _connected(
    config: ServerSettings,
    renderer: Renderer,
    weights: bool,
    adapters: AdapterConfig | None,
    servers: Sequence[Server],
) -> RemoteEngine:
    """Like `connect`, without waiting for servers that don't answer."""
    adapted = weights and config.publish == "lora"
    syncs = await _syncs(config, servers, weights)
    if weights:
        # Paused servers are resumed before the probe. A trainer that died during a weight sync leaves its servers
        # paused, and a paused server can't answer the probe.
        for sync in syncs:
            await sync.free()
    found = [await probe(server, renderer) for server in servers]
    # Servers of one engine must agree in everything that a tape records or a check reads, such as the log-prob mode.
    kinds = {replace(capabilities, takes_weights=False) for _, capabilities in found}
    if len(kinds) > 1:
        raise EngineError(f"the servers differ: {sorted(map(str, kinds))}; one engine needs equal ones")
    dialect, capabilities = found[0]
    if weights and dialect.streams:
        raise EngineError(
            f"{list(servers)} answer by {dialect.route} alone, which takes no token ids, so the arrival of new "
            "weights can't be checked: start them with --enable-scale-out (`tapereel serve model` does)"
        )
    if weights and not adapted and not all(capability.takes_weights for _, capability in found):
        raise EngineError(
            f"{list(servers)} take no weights: start them with VLLM_SERVER_DEV_MODE=1, on loopback "
            "or a private network only, since those routes know no API key"
        )
    labels = {await weight_version(server) for server in servers} if capabilities.versions else {None}
    if len(labels) > 1:
        if not weights or adapted:
            raise EngineError(
                f"the servers have different weights, {sorted(map(str, labels))}: restart them with the same ones"
            )
        # The next weight sync writes the same weights to all servers, so a difference now isn't an error.
        labels = {DIFFERENT}
    version = labels.pop() or "default"
    if not adapted:
        if weights:
            for sync in syncs:
                await sync.init()
        return RemoteEngine(
            servers, dialect, renderer, capabilities, config, version=version, syncs=syncs, takes_weights=weights
        )
    # `lora` never replaces the base weights, so no later weight sync can make unknown base weights known.
    if version.startswith(UNKNOWN):
        raise EngineError(f"the weights under the adapters would be {version!r}: restart {list(servers)}")
    return AdapterEngine(
        servers, dialect, renderer, capabilities, config, version=version, syncs=syncs, adapters=adapters
    )


async def _syncs(config: ServerSettings, servers: Sequence[Server], weights: bool) -> list[WeightSync]:
    """Return the control routes of each server. Raises EngineError if this kind of server doesn't support the
    configured way to receive weights."""
    kinds = [await kind_of(server) for server in servers]
    seconds = config.control_seconds
    if weights and config.publish != "reload" and any(kind.startswith("SGLang") for kind in kinds):
        raise EngineError(f"{kinds[0]} takes weights by engine.publish=reload only, not by {config.publish!r}")
    if weights and config.publish == "nccl":
        nccl = config.nccl or NCCLConfig()
        return [
            NCCLTransfer(server, address=nccl.address, port=port, seconds=seconds)
            for server, port in zip(servers, ports(nccl.address, nccl.port, len(servers)), strict=True)
        ]
    vllm = VLLMTransfer if weights and config.publish == "transfer" else VLLMReload
    return [
        (SGLangWeights if kind.startswith("SGLang") else vllm)(server, seconds=seconds)
        for server, kind in zip(servers, kinds, strict=True)
    ]
