"""Runs a coroutine to its end from synchronous code, in a script or in a notebook.

At the end, tasks and threads that agents and environments left behind have `GRACE` seconds to finish, so the wait for
foreign code is limited.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import StrayCancellation
from .shared_loop import SharedLoop
from .text import logger

log = logger("run_async")

GRACE = 5.0
"""Cancelled code has this many seconds to end. Code that takes longer is left running, and its caller continues."""
THREADS = 20.0
"""Tapereel's own `asyncio.to_thread` threads have this many seconds to end, for example after a trainer's update
was cancelled."""
_left: set[asyncio.Task[Any]] = set()
"""Tasks that were left running. This set keeps them alive, because there may be no other reference to them."""
ResultT = TypeVar("ResultT")


def run_async(main: Coroutine[object, None, ResultT]) -> ResultT:
    """Run `main` in an event loop of its own and return its result.

    If the caller's thread already has a running event loop, as in a notebook, `asyncio.run` would refuse to start. In
    this case, `main` runs in a new thread. The caller's thread and its event loop are blocked until `main` ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    return _run_in_thread(main)


def leave(task: asyncio.Task[ResultT]) -> None:
    """Leave a task running if it ignores its cancellation. The event loop can then end without waiting for it."""
    # `asyncio.run` cancels every registered task at its end and waits for all of them, without a limit.
    asyncio._unregister_task(task)  # pyright: ignore[reportAttributeAccessIssue]
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    _left.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # without this call, asyncio logs the error, because no caller awaits the task


def _run(
    main: Coroutine[Any, Any, ResultT], began: Callable[[asyncio.Task[ResultT]], object] = lambda _: None
) -> ResultT:
    """Run `main` like `asyncio.run`, but limit the wait for other tasks at the end. `began` receives `main`'s task."""
    runner = shared_runner()  # the runner turns Ctrl-C into a cancellation
    task = runner.get_loop().create_task(main)
    began(task)
    try:
        return complete(runner, task)
    except asyncio.CancelledError as error:  # after Ctrl-C, KeyboardInterrupt is raised instead
        raise StrayCancellation("the run was cancelled by code that it called, and not by its caller") from error
    finally:
        end(runner, task)


def shared_runner() -> asyncio.Runner:
    """Return a runner with a SharedLoop as this thread's event loop. Use `end` to close the runner."""
    runner = asyncio.Runner(loop_factory=SharedLoop)
    asyncio.set_event_loop(runner.get_loop())
    return runner


def end(runner: asyncio.Runner, *first: asyncio.Task[object]) -> None:
    """Close the runner's loop. This waits for the `first` tasks without a limit, and then at most `GRACE` seconds for
    other tasks and `THREADS` seconds for threads."""
    loop = runner.get_loop()
    assert isinstance(loop, SharedLoop)
    loop.ending = True
    try:
        complete(runner, loop.create_task(_end(*first)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def complete(runner: asyncio.Runner, task: asyncio.Task[ResultT]) -> ResultT:
    """Return the result of a task in the runner's loop, even if code that runs in the loop stops the loop."""
    while True:
        try:
            runner.run(_join(task))
            return task.result()
        except (SystemExit, RuntimeError) as error:
            # The loop ends if any task raises SystemExit, even a helper task of an agent or environment. After
            # `loop.stop()`, it ends with a RuntimeError. Code that awaits the helper gets its SystemExit as well.
            if task.done() and not task.cancelled() and task.exception() is error:
                raise
            log.warning("code of an agent or environment ended the event loop (%r); it continues", error)


async def _join(task: asyncio.Task[Any]) -> None:
    here, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert here is not None
    assert isinstance(loop, SharedLoop)
    here.add_done_callback(_forget)  # the loop may end before this task does
    loop.tasks.discard(here)
    # If the task raised KeyboardInterrupt or SystemExit, the exception has already ended the loop. If it were raised
    # here too, it would end the loop again on its last run, before `_end` has begun.
    with suppress(KeyboardInterrupt, SystemExit):
        await task


async def _end(*first: asyncio.Task[object]) -> None:
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    assert isinstance(loop, SharedLoop)
    await asyncio.sleep(0)  # waits until the task that awaits this one has left `loop.tasks`
    for task in first:  # still open after Ctrl-C was pressed twice. It closes the run, so it has no time limit
        task.cancel()
        await asyncio.wait([task])
    rest = {task for task in loop.tasks if task is not here and task not in _left and not task.done()}
    for task in rest:
        task.cancel()
    if rest:
        _, stubborn = await asyncio.wait(rest, timeout=GRACE)
        if left := rest.intersection(loop.guests):
            names = ", ".join(sorted(repr(task.get_coro()) for task in left)[:5])
            log.warning(
                "%d tasks were left behind by agents or environments, and %d of them ignore their cancellation: %s",
                len(left),
                len(left & stubborn),
                names,
            )
    await loop.shutdown(GRACE, THREADS)
    for task in loop.tasks:
        if task is not here and not task.done():
            leave(task)


def _run_in_thread(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    found: Future[ResultT] = Future()
    began: Future[asyncio.Task[ResultT]] = Future()

    def work() -> None:
        try:
            found.set_result(_run(main, began.set_result))
        except BaseException as error:  # raised again in the calling thread
            found.set_exception(error)

    # A new thread begins with an empty context. Without the copy, the caller's context variables would be lost.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tapereel-run-async")
    thread.start()
    try:
        thread.join()
    except BaseException:
        # Only the main thread receives Ctrl-C. Without the cancellation, `main` would keep running in the background,
        # with its run directory open for writing.
        either: list[Future[Any]] = [began, found]
        wait(either, return_when=FIRST_COMPLETED)
        if began.done() and thread.is_alive():
            task = began.result()
            task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return found.result()
