"""A server beside what is tested, in a thread with an event loop of its own: for what runs an event loop itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(up: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `up()` gives, which stays entered in the thread until this is left."""
    found: list[T] = []
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with up() as thing:
            found.append(thing)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()
