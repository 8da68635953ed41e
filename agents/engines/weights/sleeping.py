"""Servers that give their GPU's memory to somebody else for a while, as to the trainer beside them.

A state machine of three states, in which every call leads to the state that it names, however often it is made:

    awake --sleep--> asleep --weights--> weights --wake--> awake      (wake also leads there from asleep)

Asleep, a server holds neither weights nor KV on the GPU; in `weights` it holds weights, so that new ones can be
published, and no KV. A call that failed leaves the state unknown, and the next one goes through all of its steps. Ahead
of every step towards `awake` what is cached is cleared: memory that this process holds for nothing, and on the server
prefixes whose keys and values are gone.

vLLM: `/sleep`, `/wake_up`, with `--enable-sleep-mode` on CUDA; its CPU build takes the calls, pauses, and keeps its
memory. SGLang: `/release_memory_occupation` and `/resume_memory_occupation`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from ..transport.http_channel import Channel

State = Literal["awake", "weights", "asleep", "unknown"]
Part = Literal["weights", "kv_cache"]


class Rests(Protocol):
    """One server's routes for it. Every method returns once the server has done it, and raises when it hasn't."""

    async def release(self) -> None:
        """Let go of everything on the GPU that can be restored."""
        ...

    async def clear(self) -> None:
        """Forget cached prefixes."""
        ...

    async def restore(self, part: Part) -> None:
        """Bring that back."""
        ...


class VLLMRest:
    """vLLM's routes of the development mode."""

    def __init__(self, server: Channel, *, level: Literal[1, 2] = 1, seconds: float = 120.0) -> None:
        """`level` 1 keeps the weights in the machine's memory; 2 drops them, so that new ones must be published before
        it wakes. Every step is bounded by `seconds`."""
        self.server = server
        self._level, self._seconds = level, seconds

    async def release(self) -> None:
        await self._post("/sleep", {"level": str(self._level)})

    async def clear(self) -> None:
        await self._post("/reset_prefix_cache")

    async def restore(self, part: Part) -> None:
        await self._post("/wake_up", {"tags": part})

    async def _post(self, route: str, params: dict[str, str] | None = None) -> None:
        await self.server.post(route, params=params, seconds=self._seconds, fresh=True)


class SGLangRest:
    """SGLang's routes. Its KV cache and CUDA graphs go, its weights stay unless told otherwise."""

    def __init__(self, server: Channel, *, weights: bool = False, seconds: float = 120.0) -> None:
        """`weights`: release those too. Every step is bounded by `seconds`."""
        self.server = server
        self._tags = ["kv_cache", "cuda_graph", *(["weights"] if weights else [])]
        self._seconds = seconds

    async def release(self) -> None:
        await self._post("/release_memory_occupation", {"tags": self._tags})

    async def clear(self) -> None:
        await self._post("/flush_cache", {})

    async def restore(self, part: Part) -> None:
        tags = [tag for tag in self._tags if (tag == "weights") == (part == "weights")]
        if tags:
            await self._post("/resume_memory_occupation", {"tags": tags})

    async def _post(self, route: str, body: dict[str, list[str]]) -> None:
        await self.server.post(route, body, seconds=self._seconds, fresh=True, plain=True)


class Sleeper:
    """All servers of one engine: they are in one state, or it is unknown."""

    def __init__(self, servers: Sequence[Rests], clear_own: Callable[[], None] | None = None) -> None:
        """`clear_own` lets go of what this process caches on the GPU (default: torch's cache, where torch is used)."""
        self.state: State = "awake"
        self._servers = tuple(servers)
        self._clear_own = clear_own or empty_cache
        self._lock = asyncio.Lock()

    async def sleep(self) -> None:
        """To `asleep`. Whatever is under way ends as aborted."""
        async with self._lock:
            if self.state != "asleep":
                self.state = "unknown"
                await asyncio.gather(*(server.release() for server in self._servers))
                self.state = "asleep"

    async def weights(self) -> None:
        """From `asleep` to `weights`; nothing where the weights are there already."""
        async with self._lock:
            if self.state not in ("awake", "weights"):
                await self._restore("weights", then="weights")

    async def wake(self) -> None:
        """To `awake`."""
        async with self._lock:
            if self.state in ("asleep", "unknown"):
                await self._restore("weights", then="weights")
            if self.state == "weights":
                await self._restore("kv_cache", then="awake")

    async def _restore(self, part: Part, *, then: State) -> None:
        self.state = "unknown"
        self._clear_own()
        await asyncio.gather(*(server.clear() for server in self._servers))
        await asyncio.gather(*(server.restore(part) for server in self._servers))
        self.state = then


def empty_cache() -> None:
    """Give back what torch holds of the GPU for nothing; nothing where torch isn't loaded or has no GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
