"""Connects to vLLM or SGLang servers and returns one `RemoteEngine` for all of them.

    each address                 all servers together              the engine

    Server                       Can all do the same?              RemoteEngine, or AdapterEngine for LoRA
      _syncs: its WeightSync ->    No: an error. But if a file ->    Fleet
      free: end a pause            has the addresses, servers          Member: a Server and its WeightSync
      probe: what it can do        that differ are left out.           Member ...
           ^                                                           watch: a server is new, or was away
           '---------------------------- _member <----------------------'

`_syncs` chooses how a server receives new weights. If the server doesn't support this way, an error says what to
change. `_member` connects to one more server while the engine samples.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from ....tapes.common.hub import local_folder
from ....tapes.errors import remedy
from ..engine import EngineError, error_text
from ..transport.absence import Absence
from ..transport.http_channel import Server, ServerFailed
from ..transport.wire import field
from ..weights.weight_sync import STARTED, UNKNOWN, VLLMReload, WeightSync, weight_version
from ..weights.weight_transfer import NCCLGroup, NCCLTransfer, VLLMTransfer
from .fleet import HEALTH_SECONDS, Member, is_away, log
from .lora_servers import AdapterEngine
from .server_config import Adapters, Broadcast, Reload, ServerSettings, Transfer, addresses
from .server_engine import RemoteEngine
from .server_probe import kind_of, probe
from .sglang import SGLangWeights

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

DIFFERENT = f"{UNKNOWN}the servers' weights differ"
"""The engine's version name before the first weight sync if its servers have different weights, for example because one
of them was restarted."""

__all__ = ["connect", "probe"]


async def connect(
    config: ServerSettings,
    renderer: Renderer,
    *,
    weights: bool = False,
    servers: Sequence[Server] = (),
) -> RemoteEngine:
    """Return an engine that samples from the servers in `config`. If `servers` are given, the engine uses these
    connections instead, and owns them.

    If `weights` is true, weight syncs are possible. Servers that were left paused are then resumed. Servers may have
    different weights at first, because the first weight sync makes them equal. The call waits until all servers answer,
    but at most `config.patience` seconds. If the addresses are in a file, one server is enough. The others are named in
    a warning, and join when they answer as they should.

    Raises EngineError if a server is unreachable or unsuitable, or if this process can't send weights to it. All
    servers are closed in this case."""
    servers = servers or [
        Server(url, key_variable=config.key_variable, seconds=config.seconds) for url in addresses(config.urls)
    ]
    if not servers:
        raise ValueError(f"engine.urls is {config.urls!r} and no servers are passed: name at least one address")
    away: list[Server] = []
    unfit: list[Server] = []
    group: NCCLGroup | None = None
    try:
        if weights and isinstance(way := config.weights, Broadcast):
            group = NCCLGroup(address=way.address, port=way.port, seconds=config.control_seconds)
        with Absence(config.patience).request() as tries:
            while True:
                if isinstance(config.urls, str):
                    answers = await asyncio.gather(*(server.healthy(HEALTH_SECONDS) for server in servers))
                    away = [server for server, well in zip(servers, answers, strict=True) if not well and any(answers)]
                    away += [server for server in unfit if server not in away]
                there = [server for server in servers if server not in away]
                try:
                    engine = await _connected(config, renderer, weights, group, there)
                    break
                except Exception as error:  # an answer may cause any error, and a server that isn't needed ends no run
                    found = await _unfit(config, renderer, weights, there) if isinstance(config.urls, str) else []
                    if 0 < len(found) < len(there):
                        unfit += found
                        continue
                    if not isinstance(error, ServerFailed):
                        raise
                    gone = [
                        await is_away(server, error, HEALTH_SECONDS) for server in there if server.url in str(error)
                    ]
                    if not any(gone):
                        raise
                    await tries.failed(error)
    except BaseException:
        for server in servers:
            await server.close()
        raise
    for server in away:
        await server.close()
    if isinstance(config.urls, str) or (weights and len(servers) > 1):
        engine.fleet.watch(partial(_member, engine, config, renderer, weights, group), [server.url for server in away])
    return engine


async def _unfit(config: ServerSettings, renderer: Renderer, weights: bool, servers: Sequence[Server]) -> list[Server]:
    """Return the servers that can't take part beside the first one that can, each of them named in a warning. A server
    that doesn't answer isn't one of them."""
    found, first = list[Server](), None
    for server in servers:
        try:
            _, able = await probe(server, renderer, config.model)
            if weights and not isinstance(config.weights, Adapters):
                _check_takes_weights([server], able.takes_weights)
            able = replace(able, takes_weights=False)
            if first is not None and able != first:
                raise EngineError(f"the servers differ: it is {able}, and the others are {first}")
            first = able
        except Exception as error:
            if isinstance(error, ServerFailed) and error.away is not False:
                continue
            log.warning("%s is left out: %s", server, error if isinstance(error, EngineError) else error_text(error))
            found.append(server)
    return found


async def _member(
    engine: RemoteEngine, config: ServerSettings, renderer: Renderer, weights: bool, group: NCCLGroup | None, url: str
) -> Member:
    """Connect to one more server of the engine. Raises EngineError if it differs from the others."""
    server = Server(url, key_variable=config.key_variable, seconds=config.seconds)
    try:
        (sync,) = await _syncs(config, [server], weights, group)
        if weights:
            await sync.free()
        _, capabilities = await probe(server, renderer, config.model)
        if replace(capabilities, takes_weights=engine.capabilities.takes_weights) != engine.capabilities:
            raise EngineError(f"the servers differ: {server} is {capabilities}, and the others {engine.capabilities}")
        if weights and not isinstance(config.weights, Adapters):
            _check_takes_weights([server], capabilities.takes_weights)
    except BaseException:
        await server.close()
        raise
    return Member(server, sync)


async def _connected(
    config: ServerSettings,
    renderer: Renderer,
    weights: bool,
    group: NCCLGroup | None,
    servers: Sequence[Server],
) -> RemoteEngine:
    """Do the same as `connect`, but without waiting for servers that don't answer."""
    adapters = config.weights if weights and isinstance(config.weights, Adapters) else None
    syncs = await _syncs(config, servers, weights, group)
    if weights:
        # A trainer that died during a weight sync leaves its servers paused. They must be resumed before the probe,
        # because a paused server can't answer it.
        for sync in syncs:
            await sync.free()
    found = [await probe(server, renderer, config.model) for server in servers]
    # All servers must agree in everything that is recorded on a tape or used by a check, such as the log-prob mode.
    kinds = {replace(capabilities, takes_weights=False) for _, capabilities in found}
    if len(kinds) > 1:
        raise EngineError(f"the servers differ: {sorted(map(str, kinds))}; one engine needs equal ones")
    dialect, capabilities = found[0]
    if weights and dialect.streams:
        raise EngineError(
            f"{list(servers)} answer by {dialect.route} alone, which takes no token ids, so the arrival of new "
            "weights can't be checked: start them with --enable-scale-out "
            f"({remedy('serve model', '`LocalServer`', flags='')} does)"
        )
    if weights and adapters is None:
        _check_takes_weights(servers, all(capability.takes_weights for _, capability in found))
    labels = {await weight_version(server) for server in servers} if capabilities.versions else {None}
    if len(labels) > 1:
        if not weights or adapters is not None:
            raise EngineError(
                f"the servers have different weights, {sorted(map(str, labels))}: restart them with the same ones"
            )
        # The servers may have different weights now, because the next weight sync makes them equal.
        labels = {DIFFERENT}
    version = labels.pop() or STARTED
    if not capabilities.seeds:
        _warn_of_seeds(servers[0].url)
    if not weights or adapters is not None:
        await _warn_of_weights(servers, config, version)
    members = [Member(server, sync) for server, sync in zip(servers, syncs, strict=True)]
    if adapters is None:
        if weights:
            for sync in syncs:
                await sync.init()
        return RemoteEngine(members, dialect, renderer, capabilities, config, version=version, takes_weights=weights)
    # With `lora`, the base weights are never replaced, so if they are unknown now, they stay unknown.
    if version.startswith(UNKNOWN):
        raise EngineError(f"the weights under the adapters would be {version!r}: restart {list(servers)}")
    return AdapterEngine(members, dialect, renderer, capabilities, config, version=version, adapters=adapters)


@cache  # a run connects several times
def _warn_of_seeds(url: str) -> None:
    log.warning("%s ignores seeds: start SGLang with --enable-deterministic-inference", url)


async def _warn_of_weights(servers: Sequence[Server], config: ServerSettings, version: str) -> None:
    """Log a warning for each server that holds other weights than `engine.model` and gets none from this engine. They
    may be those that a training run has sent, or those of another folder on this machine."""
    for server in servers:
        models = await server.get("/v1/models", seconds=30.0)
        held = str(cast(dict[str, object], field(models, "data", 0)).get("root"))
        if version != STARTED or await asyncio.to_thread(_is_elsewhere, config.model, held):
            log.warning(
                "%s holds the weights %r of %s, and engine.model is %s: restart the server with this model, or set "
                "engine.model to the folder of the weights that it holds",
                server,
                version,
                held,
                config.model,
            )


def _is_elsewhere(model: str, folder: str) -> bool:
    """Return whether `folder` exists on this machine and isn't the model's."""
    here = local_folder(model)
    return here is not None and os.path.isdir(folder) and not here.samefile(folder)


def _check_takes_weights(servers: Sequence[Server], do: bool) -> None:
    if not do:
        raise EngineError(
            f"{list(servers)} take no weights: start them with VLLM_SERVER_DEV_MODE=1, on loopback "
            "or a private network only, since those routes know no API key"
        )


async def _syncs(
    config: ServerSettings, servers: Sequence[Server], weights: bool, group: NCCLGroup | None
) -> list[WeightSync]:
    """Return a `WeightSync` for each server. For a broadcast, all of them share `group`. Raises EngineError if the
    configured way to receive weights doesn't exist for this kind of server."""
    kinds = [await kind_of(server) for server in servers]
    seconds = config.control_seconds
    if weights and not isinstance(config.weights, Reload) and any(kind.startswith("SGLang") for kind in kinds):
        raise EngineError(f"{kinds[0]} takes weights by engine.weights=reload only, not by {config.weights.kind!r}")
    if group is not None:
        return [NCCLTransfer(server, group, seconds=seconds) for server in servers]
    vllm = VLLMTransfer if weights and isinstance(config.weights, Transfer) else VLLMReload
    return [
        (SGLangWeights if kind.startswith("SGLang") else vllm)(server, seconds=seconds)
        for server, kind in zip(servers, kinds, strict=True)
    ]
