"""A thread for a blocking environment: its coroutines run there, one at a time, and the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine
from typing import Any


class EnvironmentThread:
    """A daemon thread with its own event loop, for one whole episode.

    All calls of an episode run in the same thread: C libraries and GPU contexts are often bound to one. A call that
    outlasts its caller leaves the thread behind, since Python can't stop a thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tapereel-env-{name}", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine in the thread; return its result or raise its exception here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._work.put((coroutine, loop, done))
        return await done

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self._work.put(None)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (item := self._work.get()) is not None:
                coroutine, loop, done = item
                try:
                    result, error = runner.run(coroutine), None
                except BaseException as raised:  # the waiting episode receives it and records its cause
                    result, error = None, raised
                # A closed loop has no waiting caller; the thread still runs the queued calls, `close` among them.
                if not loop.is_closed():
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the future in its own loop. Exceptions that a future refuses, or that would end the process, are wrapped."""
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        done.set_exception(RuntimeError(f"the environment raised {type(error).__name__}: {error}"))
    else:
        done.set_exception(error)
