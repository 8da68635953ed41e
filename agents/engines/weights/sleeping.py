"""Puts servers to sleep, so that another process, such as a trainer on the same GPU, can use their GPU memory.

The state machine has three known states. Each method is idempotent and leads to one of them:

    awake --sleep--> asleep --weights--> weights --wake--> awake      (wake also accepts asleep)

A server that is `asleep` has no KV on the GPU. vLLM has no weights there either, while SGLang keeps them. In the state
`weights`, the server has only weights, so that a weight sync can replace them. After a failed call the state is
`unknown`, and the next call does all of its steps again. Before each step towards `awake`, `Sleeper` releases the
unused GPU memory that this process caches. It also clears the server's prefix cache, because its keys and values were
freed.

vLLM's routes are `/sleep` and `/wake_up`. On CUDA they need `--enable-sleep-mode`. The CPU build accepts both calls,
but only pauses and frees no memory. SGLang's routes are `/release_memory_occupation` and `/resume_memory_occupation`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

State = Literal["awake", "weights", "asleep", "unknown"]
Part = Literal["weights", "kv_cache"]


class Rests(Protocol):
    """The sleep routes of one server. Each method returns after the server has finished, or raises an error."""

    async def release(self) -> None:
        """Free the GPU memory that `restore` can bring back."""
        ...

    async def clear(self) -> None:
        """Clear the server's prefix cache."""
        ...

    async def restore(self, part: Part) -> None:
        """Allocate `part` (the weights or the KV cache) on the GPU again."""
        ...


class Sleeper:
    """Puts all of an engine's servers to sleep and wakes them. All servers have the same state, unless the state is
    `unknown`.

    Each method sets the state to `unknown` before its first request. After an error or a cancellation, it stays
    `unknown`, because only some servers may have reached the next state. A lock keeps the steps of concurrent calls
    apart. A failed step isn't retried. The caller decides whether to retry."""

    def __init__(self, servers: Callable[[], Sequence[Rests]], clear_own: Callable[[], None] | None = None) -> None:
        """`servers` returns the engine's servers at this moment. `clear_own` releases GPU memory that this process
        caches. By default, it is `empty_cache`."""
        self.state: State = "awake"
        self._servers = servers
        self._clear_own = clear_own or empty_cache
        self._lock = asyncio.Lock()

    async def sleep(self) -> None:
        """Go to the state `asleep`. Completions in flight end as `abort`."""
        async with self._lock:
            if self.state != "asleep":
                self.state = "unknown"
                await asyncio.gather(*(server.release() for server in self._servers()))
                self.state = "asleep"

    async def weights(self) -> None:
        """Go from `asleep` or `unknown` to `weights`. Does nothing in the other two states, because the weights are on
        the GPU already."""
        async with self._lock:
            if self.state not in ("awake", "weights"):
                await self._restore("weights", then="weights")

    async def wake(self) -> None:
        """Go to the state `awake`."""
        async with self._lock:
            if self.state in ("asleep", "unknown"):
                await self._restore("weights", then="weights")
            if self.state == "weights":
                await self._restore("kv_cache", then="awake")

    async def _restore(self, part: Part, *, then: State) -> None:
        self.state = "unknown"
        # This process and all servers release memory before any server allocates, since allocations could otherwise
        # fail.
        self._clear_own()
        await asyncio.gather(*(server.clear() for server in self._servers()))
        await asyncio.gather(*(server.restore(part) for server in self._servers()))
        self.state = then


def empty_cache() -> None:
    """Release the unused GPU memory that torch caches. Does nothing if torch isn't loaded or has no GPU."""
    # torch isn't imported here, because that takes seconds, and a process that hasn't loaded it has nothing to free.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
