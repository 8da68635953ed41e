"""Runs the code of one agent or environment so that a fault in it ends only its own episode.

The code runs in its own task. Thus a CancelledError that the code raises isn't mistaken for a cancellation of the
episode. Code that swallows its cancellation is left running. Code that never awaits can't be stopped. It blocks the
event loop, and `loop_watch` reports the blocking line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

from ..tapes.common.run_async import GRACE, leave
from ..tapes.common.shared_loop import guest, settle
from ..tapes.common.text import logger
from ..tapes.errors import StrayCancellation

log = logger("supervised")

ResultT = TypeVar("ResultT")


class Stopped(Exception):
    """The call was ended by `stop`."""


class TimedOut(Exception):
    """The call exceeded its time limit."""


class Supervised:
    """Runs coroutines, one at a time: `await code(coroutine, "what")`.

    All calls run in the same task, because context variables and the cancel scopes of anyio belong to one task. A new
    task is made only if a call was left running in the old task.
    """

    def __init__(self) -> None:
        self.left: list[str] = []
        """The calls that were left running."""
        self._task: asyncio.Task[None] | None = None
        self._work: Coroutine[Any, Any, Any] | None = None
        """A call that has not begun yet."""
        self._busy = False
        """True from the beginning of a call until its code has ended."""
        self._done: asyncio.Future[tuple[Any, BaseException | None]] | None = None
        """Receives the result of the newest call."""
        self._wake: asyncio.Future[None] | None = None
        """The task waits for this future between calls."""
        self._stopped: type[Exception] | None = None
        self._what = ""
        self._due: float | None = None
        """When the newest call exceeds its time limit, on the loop's clock."""
        self._alarm: asyncio.TimerHandle | None = None
        """Rings at `_due` or earlier. One alarm serves many calls, because an event loop keeps cancelled timers."""
        self._process = os.getpid()

    async def __call__(
        self, work: Coroutine[object, Never, ResultT], what: str, seconds: float | None = None
    ) -> ResultT:
        """Return the result of `work` or raise its error. A CancelledError of `work` becomes a StrayCancellation.

        `what` names the work in messages. Raises TimedOut after `seconds`, Stopped if `stop` was called, and
        CancelledError if the caller was cancelled. `work` has then ended or is listed in `left`.
        """
        loop = asyncio.get_running_loop()
        done = self._done = asyncio.Future(loop=loop)
        self._work, self._what, self._stopped, self._busy = work, what, None, True
        if self._task is None:
            self._task = loop.create_task(self._serve(), name=f"tapereel {what}")
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._due = None
        if seconds is not None:
            self._due = loop.time() + seconds
            if self._alarm is None or self._due < self._alarm.when():
                self._arm(loop, self._due)
        try:
            result, error = await done
        except asyncio.CancelledError:  # only the caller was cancelled: this future raises nothing else
            if self._busy:
                self._done = loop.create_future()
                self.stop()
                with contextlib.suppress(asyncio.CancelledError):  # a second cancellation ends the wait
                    await self._done
                self._leave(self._done)
            raise
        if self._stopped is not None:
            raise self._stopped(f"{what} did not return within {seconds or 0:g} s") from error
        if isinstance(error, asyncio.CancelledError):
            raise StrayCancellation(
                "it raised CancelledError, and its episode was not cancelled: its task, or one that it awaited, was "
                "cancelled by other code"
            ).with_traceback(error.__traceback__) from error
        if error is not None:
            raise error
        return result

    def _arm(self, loop: asyncio.AbstractEventLoop, due: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(due, self._ring, loop, due) if due is not None else None

    def _ring(self, loop: asyncio.AbstractEventLoop, rung: float) -> None:
        due = self._due if self._busy else None  # another call may have begun since the alarm was set
        self._arm(loop, due if due is not None and due > rung else None)
        if due is not None and due <= rung:
            self.stop(TimedOut)

    def stop(self, why: type[Exception] = Stopped) -> None:
        """Cancel the call in progress. The call raises `why` when its code ends, or after `GRACE` seconds."""
        if not self._busy or self._task is None or self._done is None:
            return
        self._stopped = why
        if self._work is not None:
            self._work.close()
            self._work = None
            self._settle(None, None)
            return
        self._task.cancel()
        asyncio.get_running_loop().call_later(GRACE, self._leave, self._done)

    def close(self) -> None:
        """End the task. Call this only when no call is in progress."""
        task, self._task = self._task, None
        if self._wake is not None and not self._wake.done():
            # After a cancellation, the error's traceback would keep the task in memory until a garbage collection.
            self._wake.set_result(None)
        elif task is not None:
            task.cancel()
        self._done = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _leave(self, done: asyncio.Future[tuple[Any, BaseException | None]]) -> None:
        if self._done is not done or not self._busy or self._task is None:
            return
        self.left.append(f"{self._what} swallowed its cancellation and was left running")
        log.warning(
            "%s did not end within %g s of its cancellation and is left running: it swallows CancelledError, which it "
            "must let pass",
            self._what,
            GRACE,
        )
        leave(self._task)
        self._task = self._wake = None
        self._settle(None, None)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        self._busy = False
        if self._done is not None and not self._done.done():
            self._done.set_result((result, error))

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        guest.set(True)
        loop = asyncio.get_running_loop()
        while True:
            work, self._work = self._work, None
            if work is not None:
                result, error = None, None
                try:
                    result = await work
                except KeyboardInterrupt as raised:  # Ctrl-C ends the loop, and with it the caller
                    if not getattr(loop, "ending", False):
                        self._busy, self._task, self._wake = False, None, None
                        task.add_done_callback(asyncio.Task.exception)  # otherwise, asyncio logs it too
                        raise
                    error = RuntimeError(f"it raised {raised!r}")  # would cut off the end of all other code
                except BaseException as raised:  # the caller gets it
                    error = raised
                settle(self._process)
                if self._task is not task or loop.is_closed():
                    return  # left behind meanwhile
                while task.cancelling():
                    task.uncancel()  # the next call's `asyncio.timeout` would take this cancellation for its own
                self._settle(result, error)
                del work, result, error
            self._wake = asyncio.Future(loop=loop)
            try:
                await self._wake
            except asyncio.CancelledError:
                if task.cancelling():  # otherwise, code in the previous call cancelled its own task
                    if self._task is task:  # not cancelled by `close`, but by other code, perhaps as a call begins
                        self._task = loop.create_task(self._serve()) if self._work is not None else None
                    raise
            if self._task is not task:
                return  # closed
