"""One thread for an environment that blocks: its coroutines run there, one at a time, while the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine
from typing import Any


class EnvironmentThread:
    """A daemon thread with an event loop of its own, for the whole of one episode.

    A call that outlasts its caller leaves the thread behind, since Python can't stop it.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tapereel-env-{name}", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._work.put((coroutine, loop, done))
        return await done

    def stop(self) -> None:
        """The thread ends when what was asked of it is done."""
        self._work.put(None)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (item := self._work.get()) is not None:
                coroutine, loop, done = item
                try:
                    result, error = runner.run(coroutine), None
                except BaseException as raised:  # handed to the waiting episode, which types it
                    result, error = None, raised
                if not loop.is_closed():  # else nobody waits any more; what is left to do, `close` above all, is done
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        done.set_exception(RuntimeError(f"the environment raised {type(error).__name__}: {error}"))
    else:
        done.set_exception(error)
