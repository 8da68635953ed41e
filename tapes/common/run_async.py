"""Runs a coroutine to its end from synchronous code, in a script and in a notebook.

The end waits for no code of others: tasks and threads that agents and environments left behind have `GRACE` seconds.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from .text import logger

log = logger("run_async")

GRACE = 5.0
"""Seconds that cancelled code has to end. After them it is left running, and its caller continues."""
THREADS = 20.0
"""Seconds that the threads of `asyncio.to_thread` have to end: a cancelled update of the trainer runs in one."""
_left: set[asyncio.Task[Any]] = set()
"""Tasks that were left running. They are referenced here, because nothing else may refer to them."""
ResultT = TypeVar("ResultT")


def run_async(main: Coroutine[object, None, ResultT]) -> ResultT:
    """The result of `main`, which runs in an event loop of its own.

    `asyncio.run` refuses to start inside a running event loop, and a notebook has one in its main thread. There `main`
    runs in a fresh thread, and this function blocks the calling thread (and so the caller's event loop) until it ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    return _run_in_thread(main)


def leave(task: asyncio.Task[ResultT]) -> None:
    """Leave a task running that ignores its cancellation: the end of the event loop won't wait for it."""
    # `asyncio.run` cancels every registered task at its end and waits for all of them, without a limit.
    asyncio._unregister_task(task)  # pyright: ignore[reportAttributeAccessIssue]
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    _left.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # without this call asyncio logs the error, since no caller awaits it


def _run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As `asyncio.run`, with an end that waits at most `GRACE` seconds for tasks and `THREADS` for threads."""
    first: list[asyncio.Task[Any]] = []

    async def inside() -> ResultT:
        task = asyncio.current_task()
        assert task is not None
        first.append(task)
        return await main

    runner = asyncio.Runner()  # it turns Ctrl-C into a cancellation of `inside`
    work = inside()
    try:
        while True:
            try:
                return runner.run(work)
            except SystemExit:
                # asyncio stops the loop where any task raises it, also a helper of an agent or environment. The code
                # that awaits that task gets it as well, so the loop goes on.
                if not first or first[0].done():
                    raise
                work = _join(first[0])
    finally:
        try:
            runner.run(_end(first))
        finally:
            asyncio.set_event_loop(None)
            runner.get_loop().close()


async def _join(task: asyncio.Task[ResultT]) -> ResultT:
    return await task


async def _end(first: list[asyncio.Task[Any]]) -> None:
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    for task in first:  # open after Ctrl-C was pressed twice: it closes the run, which takes the time that it takes
        task.cancel()
        await asyncio.wait([task])
    rest = asyncio.all_tasks() - {here}
    for task in rest:
        task.cancel()
    if rest:
        _, stubborn = await asyncio.wait(rest, timeout=GRACE)
        names = ", ".join(sorted(repr(task.get_coro()) for task in rest)[:5])
        log.warning(
            "%d tasks were left behind by agents or environments, and %d of them ignore their cancellation: %s",
            len(rest),
            len(stubborn),
            names,
        )
    for closing, seconds in ((loop.shutdown_asyncgens(), GRACE), (loop.shutdown_default_executor(), THREADS)):
        await asyncio.wait([loop.create_task(closing)], timeout=seconds)
    for task in asyncio.all_tasks() - {here}:
        leave(task)


def _run_in_thread(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    found: Future[ResultT] = Future()
    started = threading.Event()
    handle: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def inside() -> ResultT:
        task = asyncio.current_task()
        assert task is not None
        handle.append((asyncio.get_running_loop(), task))
        started.set()
        return await main

    def work() -> None:
        try:
            found.set_result(_run(inside()))
        except BaseException as error:  # raised again in the calling thread
            found.set_exception(error)
        finally:
            started.set()

    # A new thread begins with an empty context: without the copy, context variables of the caller would be lost.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tapereel-run-async")
    thread.start()
    try:
        thread.join()
    except BaseException:
        # Ctrl-C reaches the main thread only. Without the cancellation `main` would go on in the background, and would
        # keep its run directory open for writing.
        started.wait()
        if handle and thread.is_alive():
            loop, task = handle[0]
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return found.result()
