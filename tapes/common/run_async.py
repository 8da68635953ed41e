"""Runs a coroutine to its end from synchronous code, in a script and in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_async(main: Coroutine[object, None, ResultT]) -> ResultT:
    """The result of `main`, which runs in an event loop of its own.

    `asyncio.run` refuses to start inside a running event loop, and a notebook has one in its main thread. There `main`
    runs in a fresh thread, and this function blocks the calling thread (and so the caller's event loop) until it ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    return _run_in_thread(main)


def _run_in_thread(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    results: list[ResultT] = []
    errors: list[BaseException] = []
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
            results.append(asyncio.run(inside()))
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)
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
    if errors:
        raise errors[0]
    return results[0]
