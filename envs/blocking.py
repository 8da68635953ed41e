"""Runs blocking code in threads, so that the event loop stays free.

`in_thread` runs one call, `CallThread` several, and `EnvironmentThread` runs all calls of an environment. They start
their own daemon threads. In a thread pool, a call that never returns would occupy a thread and delay the end of the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Never, TypeVar

from ..tapes.common.run_async import complete, end, shared_runner
from ..tapes.common.shared_loop import guest, settle

ResultT = TypeVar("ResultT")


async def in_thread(function: Callable[..., ResultT], *args: object) -> ResultT:
    """Run the function in its own thread. If the caller is cancelled, the wait ends, but the thread continues."""
    return await CallThread(f"tapereel-tool-{getattr(function, '__name__', '')}").run(function, *args)


class CallThread:
    """A thread that runs sync functions one after the other, without an event loop. It ends with the last reference to
    this object, or after the call that is then running."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve_calls, args=(self._calls,), name=name, daemon=True).start()

    async def run(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Run the function in the thread, in a copy of the caller's context. If the caller is cancelled, the wait ends,
        but a call that has begun continues."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = loop.create_future()
        self._calls.put((partial(contextvars.copy_context().run, function, *args), loop, done))
        return await done

    def __del__(self) -> None:
        self._calls.put(None)


def _serve_calls(calls: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    while (call := calls.get()) is not None:
        _work("it", *call)
        del call  # an idle thread must not keep the result's future in memory


class EnvironmentThread:
    """A thread with its own event loop for one whole episode. It runs coroutines one at a time.

    All calls in an episode run in the same thread, because C libraries and GPU contexts are often bound to one thread.
    If a call outlasts its caller, the thread is left behind, since Python can't stop a thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Coroutine[Any, Any, Any], asyncio.AbstractEventLoop, asyncio.Future[Any]] | None
        ] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"tapereel-env-{name}", daemon=True).start()

    async def run(self, coroutine: Coroutine[object, Never, ResultT]) -> ResultT:
        """Run the coroutine in the thread, and return its result or raise its exception here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = loop.create_future()
        self._calls.put((coroutine, loop, done))
        return await done

    def stop(self) -> None:
        """End the thread after the calls that are already queued."""
        self._calls.put(None)

    def _serve(self) -> None:
        runner, context = shared_runner(), contextvars.copy_context()
        context.run(guest.set, True)
        while (call := self._calls.get()) is not None:
            coroutine, loop, done = call
            task = runner.get_loop().create_task(coroutine, context=context)
            _work("the environment", partial(complete, runner, task), loop, done)
        end(runner)


def _work(who: str, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]) -> None:
    """Call `work` in this thread, and pass its result or exception to the future `done` in the waiting loop. `who` is
    the subject of error messages."""
    process = os.getpid()
    try:
        result, error = work(), None
    except (StopIteration, asyncio.CancelledError, KeyboardInterrupt, SystemExit) as raised:
        # A future can't hold StopIteration. The other exceptions would cancel the waiting task or end the process.
        result, error = None, RuntimeError(f"{who} raised {type(raised).__name__}: {raised}")
    except BaseException as raised:  # the waiting caller receives it
        result, error = None, raised
    settle(process)
    # If the loop is closed, no caller waits. The thread still runs the calls in its queue, which include `close`.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the result or the exception of the future. This runs in the future's own loop."""
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
