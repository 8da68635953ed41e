"""A server beside what is tested, in a thread with an event loop of its own: for what runs an event loop itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(up: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `up()` gives, which stays entered in the thread until this is left. Raises what entering it raised."""
    ready: Future[tuple[T, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        async with up() as thing:
            ready.set_result((thing, lambda: loop.call_soon_threadsafe(done.set)))
            await done.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        thing, end = ready.result(60)
        try:
            yield thing
        finally:
            end()
    finally:
        thread.join(60)
