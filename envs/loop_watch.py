"""Detects a blocked event loop and names the line that blocks it.

A blocking call inside an `async` method stops every episode in the process, and no code in the loop can report it. A
daemon thread therefore posts a heartbeat to the loop. If the heartbeat is late, the thread reads the stack of the
loop's thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from ..tapes.common.text import logger

log = logger("loop")

STALL_SECONDS = 5.0
"""Seconds that the event loop may be blocked before a warning names the blocking line. A forward pass takes far less
time."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One period during which the loop was blocked."""

    seconds: float
    """Seconds without a heartbeat when the stack was read. The stall may have lasted longer."""
    stack: tuple[traceback.FrameSummary, ...]
    """The stack of the loop's thread during the stall, outermost frame first."""

    def where(self, filename: str | None = None) -> str:
        """Return `file:line in function` for the innermost frame in the file `filename`. If no frame is in this file,
        use the innermost frame of all."""
        own = [frame for frame in self.stack if frame.filename == filename]
        frame = (own or self.stack)[-1]
        return f"{frame.filename}:{frame.lineno} in {frame.name}"


def watch_episodes() -> LoopWatch:
    """Return a watch that warns if the running event loop is blocked for `STALL_SECONDS`: `with watch_episodes():`"""
    return LoopWatch(_stalled, seconds=STALL_SECONDS)


def _stalled(stall: Stall) -> None:
    log.warning(
        "the event loop has been blocked for %.1f s at %s, and every episode waits. Code that doesn't await can't be "
        "stopped: run it in a thread (an environment sets `blocking = True`) or in a process (`env_processes`)",
        stall.seconds,
        stall.where(),
    )


class LoopWatch:
    """Watches the running loop until the block ends: `with LoopWatch(on_stall):` inside a coroutine.

    `on_stall` is called in the watching thread, once for each stall that lasts at least `seconds`. A watch can be used
    only once.
    """

    def __init__(
        self, on_stall: Callable[[Stall], None], *, seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if seconds <= 0:
            raise ValueError(f"seconds is {seconds}; it must be more than 0")
        self._on_stall = on_stall
        self._seconds = seconds
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = 0
        self._alive = True
        self._asked = 0.0
        self._reported = False

    def attach(self) -> None:
        """Watch the running loop without starting a thread. The caller must call `sample` regularly."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._asked = self._clock()

    def __enter__(self) -> LoopWatch:
        self.attach()
        self._thread = threading.Thread(target=self._watch, name="tapereel-loop-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching. This method may also be called before the block has ended."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            if not self.sample():
                return

    def sample(self) -> bool:
        """Check the heartbeat once. Return False if the loop has closed.

        Each stall is reported once, because `_reported` is cleared only after the loop has answered a heartbeat.
        """
        assert self._loop is not None
        if self._alive:
            self._alive, self._reported, self._asked = False, False, self._clock()
            try:
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:
                return False
            return True
        silent = self._clock() - self._asked
        if silent >= self._seconds and not self._reported:
            self._reported = True
            frame = sys._current_frames().get(self._watched)
            # The loop may continue between the heartbeat check and the stack read. Without this second check, the idle
            # stack of a healthy loop would be reported as a stall.
            if frame is not None and not self._alive:
                self._on_stall(Stall(silent, tuple(traceback.extract_stack(frame))))
        return True

    def _beat(self) -> None:
        self._alive = True
