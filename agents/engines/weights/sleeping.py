"""Puts servers to sleep, so that another process can use their GPU memory, such as a trainer on the same GPU.

The state machine has three known states. Each call is idempotent and leads to one state:

    awake --sleep--> asleep --weights--> weights --wake--> awake      (wake also accepts asleep)

In `asleep`, a server has neither weights nor KV on the GPU. In `weights`, it has weights and no KV, so a weight sync
can write new weights. A failed call leaves the state `unknown`, and the next call repeats all of its steps. Before each
step towards `awake`, `Sleeper` clears two caches: the unused GPU memory of this process, and the server's prefix cache,
whose keys and values no longer exist.

vLLM has `/sleep` and `/wake_up`, with `--enable-sleep-mode` on CUDA. Its CPU build accepts both calls, pauses, and
keeps its memory. SGLang has `/release_memory_occupation` and `/resume_memory_occupation`.
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
        """Clear the prefix cache."""
        ...

    async def restore(self, part: Part) -> None:
        """Allocate `part` on the GPU again."""
        ...


class Sleeper:
    """Puts all servers of one engine to sleep and wakes them. They share one state, or the state is `unknown`.

    Each method sets `unknown` before its first request. An error or a cancellation therefore never leaves a state that
    only some servers have reached. The lock serialises the methods, because concurrent calls would interleave their
    steps. A failed step is not retried here, since that is the caller's decision."""

    def __init__(self, servers: Sequence[Rests], clear_own: Callable[[], None] | None = None) -> None:
        """`clear_own` frees the GPU memory that this process caches. By default it frees torch's cache, if torch is
        loaded."""
        self.state: State = "awake"
        self._servers = tuple(servers)
        self._clear_own = clear_own or empty_cache
        self._lock = asyncio.Lock()

    async def sleep(self) -> None:
        """Go to `asleep`. Completions in flight end as `abort`."""
        async with self._lock:
            if self.state != "asleep":
                self.state = "unknown"
                await asyncio.gather(*(server.release() for server in self._servers))
                self.state = "asleep"

    async def weights(self) -> None:
        """Go from `asleep` or `unknown` to `weights`. Does nothing in `awake` and `weights`, which have weights."""
        async with self._lock:
            if self.state not in ("awake", "weights"):
                await self._restore("weights", then="weights")

    async def wake(self) -> None:
        """Go to `awake`."""
        async with self._lock:
            if self.state in ("asleep", "unknown"):
                await self._restore("weights", then="weights")
            if self.state == "weights":
                await self._restore("kv_cache", then="awake")

    async def _restore(self, part: Part, *, then: State) -> None:
        self.state = "unknown"
        # Both sides free memory before any server allocates, since the allocation could otherwise run out of GPU
        # memory.
        self._clear_own()
        await asyncio.gather(*(server.clear() for server in self._servers))
        await asyncio.gather(*(server.restore(part) for server in self._servers))
        self.state = then


def empty_cache() -> None:
    """Return torch's unused cached memory to the GPU. Does nothing if torch isn't loaded or has no GPU."""
    # torch isn't imported, since loading it takes seconds and a process without torch has nothing to free.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
