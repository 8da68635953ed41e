"""Statistics of a `RemoteEngine`: sums, timers, the health of each server, and the choice of a server.

Sums and timers never decrease, so the difference of two readings measures the time between them.
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
"""Seconds for which new conversations avoid a server after a request to it failed."""


@dataclass(slots=True)
class RemoteStats:
    """Sums since the engine was made."""

    requests: int = 0
    tokens: int = 0
    """Tokens sampled and returned, those of cancelled requests included."""
    refused: int = 0
    """Answers with status 429 or 503 whose request was repeated."""
    bad_answers: int = 0
    """Answers that failed a check (`BadAnswer`)."""
    failed: int = 0
    """Requests that raised an error in the end, after all repeats."""
    cancelled: int = 0
    """Requests that their caller cancelled."""
    publishes: int = 0
    """Completed weight syncs."""
    busy_seconds: float = 0.0
    """Wall time in seconds in which at least one request was in flight."""
    longest_seconds: float = 0.0
    """Duration of the slowest request, in seconds."""
    timers: dict[str, float] = field(default_factory=dict)
    """Seconds by activity: `request` (summed over concurrent requests), `publish`, its steps `publish/pause`,
    `publish/update`, ..., and `sleep`, `wake`."""
    health: dict[str, Health] = field(default_factory=dict)
    """Health by server address, from the last call of `RemoteEngine.health`."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the timer `name`, also when the block raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.timers[name] = self.timers.get(name, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health of one server."""

    well: bool
    """Whether the server's `/health` route answered with success."""
    error: str | None
    """Error message of the health request; None when the server is healthy."""
    in_flight: int
    """Requests of this process in flight at the server."""
    seconds: float
    """Duration of the health request."""


async def check(server: Channel, *, seconds: float = 10.0) -> Health:
    """Return the health of a server; no answer within `seconds` counts as unhealthy."""
    began, error = time.perf_counter(), None
    try:
        await server.get("/health", seconds=seconds)
    except EngineError as failed:
        error = str(failed)
    return Health(well=error is None, error=error, in_flight=server.in_flight, seconds=time.perf_counter() - began)


async def check_all(servers: Sequence[Channel], *, seconds: float = 10.0) -> dict[str, Health]:
    """Return the health of all servers, by address."""
    found: list[Any] = await asyncio.gather(*(check(server, seconds=seconds) for server in servers))
    return {repr(server): health for server, health in zip(servers, found, strict=True)}


class Wellness:
    """Chooses the server of each new conversation and avoids servers that failed within the last `AVOIDED` seconds."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._coming: Counter[int] = Counter()

    def lost(self, server: Channel) -> None:
        """A request to the server failed: avoid it for `AVOIDED` seconds."""
        self._until[id(server)] = time.monotonic() + AVOIDED

    def reached(self, server: Channel) -> None:
        """The server answered: use it again at once."""
        self._until.pop(id(server), None)

    def best(self, servers: Sequence[Channel]) -> Channel:
        """Return the server for a new conversation: the healthy one with the fewest requests in flight, or the one with
        the fewest of all when none is healthy."""
        now = time.monotonic()
        well = [server for server in servers if self._until.get(id(server), now) <= now]
        best = min(well or servers, key=lambda server: server.in_flight + self._coming[id(server)])
        # `in_flight` grows only when the request's task runs, in the event loop's next turn. `_coming` counts the
        # choice until then: otherwise all conversations that start in this turn would choose the same server.
        self._coming[id(best)] += 1
        asyncio.get_running_loop().call_soon(self._coming.subtract, (id(best),))
        return best
