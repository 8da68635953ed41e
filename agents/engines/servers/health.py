"""Keeps a `RemoteEngine`'s totals and timers, tracks each server's health, and chooses servers for new conversations.

Totals and timers never decrease, so the difference between two readings is what happened between them.
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
"""After a request to a server fails, new conversations avoid that server for this many seconds."""


@dataclass(slots=True)
class RemoteStats:
    """Totals since the engine was created."""

    requests: int = 0
    tokens: int = 0
    """Tokens sampled and returned, including tokens of cancelled requests."""
    refused: int = 0
    """Answers with status 429 or 503 after which the request was repeated."""
    failed: int = 0
    """Requests that still failed after all repeats."""
    cancelled: int = 0
    """Requests cancelled by their caller."""
    publishes: int = 0
    """Completed weight syncs."""
    busy_seconds: float = 0.0
    """Wall time in seconds during which at least one request was in flight."""
    timers: dict[str, float] = field(default_factory=dict)
    """Seconds spent on each activity: `request` (added up over concurrent requests), `publish`, its steps
    (`publish/pause`, `publish/update` ...), `sleep` and `wake`."""

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
        """Stop avoiding the server, because it answered."""
        self._until.pop(id(server), None)

    def best(self, servers: Sequence[Server]) -> Server:
        """Return the server for a new conversation. It is the one with the fewest requests in flight among the healthy
        servers, or among all servers if none of them is healthy."""
        now = time.monotonic()
        well = [server for server in servers if self._until.get(id(server), now) <= now]
        best = min(well or servers, key=lambda server: server.in_flight + self._coming[id(server)])
        # `in_flight` increases only in the event loop's next turn, when the request's task runs. `_coming` counts the
        # request until then, because all conversations that start in this turn would otherwise choose this server.
        self._coming[id(best)] += 1
        asyncio.get_running_loop().call_soon(self._coming.subtract, (id(best),))
        return best
