"""SharedLoop is the event loop that Tapereel's tasks share with guests, which are the code of agents and environments.

A guest may cancel, stop or exhaust everything in its event loop, and expects to find only its own tasks and threads. So
this loop hides the other tasks from `asyncio.all_tasks()` and gives guests their own threads. A call that would change
the loop for everyone raises an error in the guest. A child process that a guest forks never runs the loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Never, TypeVar, cast

ResultT = TypeVar("ResultT")
FORKED = 70
"""If a guest forks a child and the child returns from the guest's code, the child ends with this exit code."""
guest: ContextVar[bool] = ContextVar("guest", default=False)
"""Whether the running code, and the tasks that it creates, belong to an agent or an environment."""
_executor: ContextVar[Executor | None] = ContextVar("executor", default=None)
_DEPTH = sys.getrecursionlimit()


def settle(process: int) -> None:
    """Clean up when a guest returns or waits. A lowered recursion limit is restored. If this process isn't `process`,
    it is a child that a guest forked. The child exits here, because it shares the run's files and sockets."""
    if os.getpid() != process:
        os._exit(FORKED)
    if sys.getrecursionlimit() < _DEPTH:
        sys.setrecursionlimit(_DEPTH)


class SharedLoop(asyncio.SelectorEventLoop):
    """An event loop that keeps its tasks in `tasks` and hides them from `asyncio.all_tasks()`."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.guests: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """The tasks that guests created."""
        self.ending = False
        """Whether the loop is about to close, and waits only for code that was cancelled."""
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """Two thread pools: one for guests (True) and one for Tapereel (False). Each is created at its first use."""
        self._process = os.getpid()
        _loops.add(self)

    def create_task(
        self, coro: Generator[object, None, ResultT] | Coroutine[object, Never, ResultT], **settings: object
    ) -> asyncio.Task[ResultT]:
        """Create a task as every event loop does."""
        task: asyncio.Task[ResultT] = asyncio.Task(cast(Any, coro), loop=self, **cast(Any, settings))
        asyncio._unregister_task(task)  # pyright: ignore[reportAttributeAccessIssue]
        self.tasks.add(task)
        if guest.get():
            self.guests.add(task)
        return task

    def _run_once(self) -> None:
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]
        settle(self._process)

    def set_default_executor(self, executor: ThreadPoolExecutor) -> None:
        """Set the default executor, but only for the caller's episode."""
        _executor.set(executor)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., ResultT], *args: object
    ) -> asyncio.Future[ResultT]:
        """Run the function as every event loop does."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        kind = guest.get()
        if kind not in self._threads:
            self._threads[kind] = ThreadPoolExecutor(thread_name_prefix="asyncio")
        executor = (kind and _executor.get()) or self._threads[kind]
        return super().run_in_executor(executor, _settled, self._process, func, *args)

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """Handle the error as every event loop does. Closing a generator that a task is still running doesn't count as
        an error."""
        if not getattr(context.get("asyncgen"), "ag_running", False):
            super().call_exception_handler(context)

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("refused: all episodes share this event loop, its task factory, generators and executor")

    set_task_factory: Any = _refuse
    shutdown_asyncgens: Any = _refuse
    shutdown_default_executor: Any = _refuse

    async def shutdown(self, seconds: float, thread_seconds: float) -> None:
        """Close the generators and end the threads. This waits at most `seconds` for the generators and for the guests'
        threads, and at most `thread_seconds` for Tapereel's own threads."""
        await asyncio.wait([self.create_task(super().shutdown_asyncgens())], timeout=seconds)
        for kind, limit in ((True, seconds), (False, thread_seconds)):
            self._default_executor = self._threads.get(kind)
            await asyncio.wait([self.create_task(super().shutdown_default_executor())], timeout=limit)


def _settled(process: int, function: Callable[..., ResultT], *args: Any) -> ResultT:
    try:
        return function(*args)
    finally:
        settle(process)


_loops: weakref.WeakSet[SharedLoop] = weakref.WeakSet()


def _leave_child() -> None:
    for loop in _loops:  # this callback is put first, because no callback of the parent may run in the child
        loop._ready.appendleft(asyncio.Handle(os._exit, (FORKED,), loop))  # pyright: ignore[reportAttributeAccessIssue]


os.register_at_fork(after_in_child=_leave_child)
