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

from ..transport.http_channel import Server

AVOIDED = 10.0
"""Seconds for which new conversations avoid a server after a request to it failed."""


@dataclass(slots=True)
class RemoteStats:
    """Sums since the engine was created."""

    requests: int = 0
    tokens: int = 0
    """Tokens sampled and returned, including tokens of cancelled requests."""
    refused: int = 0
    """Answers with status 429 or 503 whose request was repeated."""
    failed: int = 0
    """Requests that finally raised an error, after all repeats."""
    cancelled: int = 0
    """Requests that their caller cancelled."""
    publishes: int = 0
    """Completed weight syncs."""
    busy_seconds: float = 0.0
    """Wall time in seconds during which at least one request was in flight."""
    timers: dict[str, float] = field(default_factory=dict)
    """Seconds by activity: `request` (summed over concurrent requests), `publish`, its steps `publish/pause`,
    `publish/update`, ..., and `sleep`, `wake`."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the `with` block to the timer `name`, even if the block raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.timers[name] = self.timers.get(name, 0.0) + seconds


class Wellness:
    """Chooses the server of each new conversation and avoids servers that failed within the last `AVOIDED` seconds."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._coming: Counter[int] = Counter()

    def lost(self, server: Server) -> None:
        """Avoid the server for `AVOIDED` seconds, because a request to it failed."""
        self._until[id(server)] = time.monotonic() + AVOIDED

    def reached(self, server: Server) -> None:
        """Use the server again at once, because it answered."""
        self._until.pop(id(server), None)

    def best(self, servers: Sequence[Server]) -> Server:
        """Return the server for a new conversation. It is the healthy server with the fewest requests in flight or, if
        no server is healthy, the one with the fewest of all."""
        now = time.monotonic()
        well = [server for server in servers if self._until.get(id(server), now) <= now]
        best = min(well or servers, key=lambda server: server.in_flight + self._coming[id(server)])
        # `in_flight` grows only when the request's task runs, in the event loop's next turn. `_coming` counts the
        # choice until then. Otherwise all conversations that start in this turn would choose the same server.
        self._coming[id(best)] += 1
        asyncio.get_running_loop().call_soon(self._coming.subtract, (id(best),))
        return best
