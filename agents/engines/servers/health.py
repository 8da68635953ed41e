"""Statistics of an engine of servers: sums, timers, and the health of each server.

Sums and timers only grow, so that the difference of two readings is what happened between them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..engine import EngineError
from ..transport.http_channel import Channel

AVOIDED = 10.0
"""Seconds for which new conversations go elsewhere than to a server that couldn't be reached."""


@dataclass(slots=True)
class RemoteStats:
    """Sums since the engine was made."""

    requests: int = 0
    tokens: int = 0
    """Sampled and returned."""
    refused: int = 0
    """Answers 429 and 503, asked again."""
    bad_answers: int = 0
    failed: int = 0
    """Requests that ended in an error, refused and bad answers that nothing followed included."""
    cancelled: int = 0
    """Requests that their caller cancelled."""
    publishes: int = 0
    """Versions published."""
    busy_seconds: float = 0.0
    """Wall time in which at least one request was under way."""
    longest_seconds: float = 0.0
    """Duration of the slowest request, in seconds."""
    timers: dict[str, float] = field(default_factory=dict)
    """Seconds by what was done: `request` (summed over requests), `publish` and `publish/pause`, `publish/update`, ...
    (its steps), `sleep`, `wake`."""
    health: dict[str, Health] = field(default_factory=dict)
    """By server, as `RemoteEngine.health` found it last."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of what runs inside, errors included, to that timer."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.timers[name] = self.timers.get(name, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How one server is."""

    well: bool
    """It says so."""
    error: str | None
    """Why not; None where it is well."""
    in_flight: int
    """Requests of this process that it works on."""
    seconds: float
    """How long it took to say so."""


async def check(server: Channel, *, seconds: float = 10.0) -> Health:
    """How a server is, within `seconds`."""
    began, error = time.perf_counter(), None
    try:
        await server.get("/health", seconds=seconds)
    except EngineError as failed:
        error = str(failed)
    return Health(well=error is None, error=error, in_flight=server.in_flight, seconds=time.perf_counter() - began)


async def check_all(servers: Sequence[Channel], *, seconds: float = 10.0) -> dict[str, Health]:
    """How all of them are, by address."""
    found: list[Any] = await asyncio.gather(*(check(server, seconds=seconds) for server in servers))
    return {repr(server): health for server, health in zip(servers, found, strict=True)}


class Wellness:
    """Which servers couldn't be reached a moment ago: new conversations go elsewhere while there is an elsewhere."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._coming: Counter[int] = Counter()

    def lost(self, server: Channel) -> None:
        """It couldn't be reached."""
        self._until[id(server)] = time.monotonic() + AVOIDED

    def reached(self, server: Channel) -> None:
        """It answered."""
        self._until.pop(id(server), None)

    def best(self, servers: Sequence[Channel]) -> Channel:
        """The one for a new conversation: that with the least under way, of those that can be reached."""
        now = time.monotonic()
        well = [server for server in servers if self._until.get(id(server), now) <= now]
        best = min(well or servers, key=lambda server: server.in_flight + self._coming[id(server)])
        # A request is under way from the event loop's next turn on; until then others that begin with it don't see it.
        self._coming[id(best)] += 1
        asyncio.get_running_loop().call_soon(self._coming.subtract, (id(best),))
        return best
