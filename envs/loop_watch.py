"""Detects a blocked event loop and names the line that blocks it.

A blocking call inside an `async` method stops every episode in the process, and no code in the loop can report it. A
daemon thread therefore posts a heartbeat to the loop. If the heartbeat is late, the thread reads the stack of the
loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from ..tapes.common.text import logger

log = logger("loop")

_PACKAGE = Path(__file__).resolve().parents[1]
_FLOORS = ("tapes", "envs", "agents", "finetune", "cli")
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
    computed: float | None = None
    """Seconds of CPU time that the loop's thread used meanwhile, or None if the system doesn't tell."""
    waits: bool = False
    """Whether the thread waited for a CPU when the stack was read."""

    @property
    def starved(self) -> bool:
        """Whether the thread has hardly computed and waits for a CPU."""
        return self.waits and self._idle

    @property
    def busy_machine(self) -> bool:
        """Whether no code blocks the loop, because the machine is busy. If so, the thread has hardly computed, and it
        either waits for a CPU or runs only code of this package and of libraries."""
        inside = [k for k, frame in enumerate(self.stack) if frame.name == "_run_once"]  # the others called the loop
        run = self.stack[inside[-1] + 1 :] if inside else self.stack
        return self.starved or (self._idle and not any(is_user_code(frame.filename) for frame in run))

    @property
    def _idle(self) -> bool:
        return self.computed is not None and self.computed < self.seconds / 2

    def where(self, filename: str | None = None) -> str:
        """Return `file:line in function` for the innermost frame in the file `filename`. If no frame is in this file,
        use the innermost frame of all."""
        own = [frame for frame in self.stack if frame.filename == filename]
        frame = (own or self.stack)[-1]
        return f"{frame.filename}:{frame.lineno} in {frame.name}"


def watch_episodes() -> LoopWatch:
    """Return a watch that warns if the running event loop is blocked for `STALL_SECONDS`: `with watch_episodes():`"""
    return LoopWatch(_stalled, seconds=STALL_SECONDS)


@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's own, and not part of Python, an installed package or Tapereel.

    Code typed into an interpreter or a notebook counts as the user's. Code from `<string>` doesn't count, because
    methods that dataclasses generate have this file name.
    """
    if file.startswith(tuple(f"{_PACKAGE / name}/" for name in _FLOORS)):
        return False
    if file.startswith("<"):
        return file.startswith(("<stdin", "<ipython"))
    if {"site-packages", "dist-packages"} & {*Path(file).parts}:  # also those that a virtual environment inherits
        return False
    # A project's folder may hold the virtual environment, so a file inside it may still belong to a package.
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not file.startswith(tuple(f"{path}/" for path in libraries))


def _usage(thread: int) -> tuple[float, bool] | None:
    """Return the CPU seconds of a thread of this process, by its native id, and whether it is running or waits for a
    CPU. Return None if the system doesn't tell."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R"


def _stalled(stall: Stall) -> None:
    if stall.busy_machine:
        return
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
        self._watched = self._native = 0
        self._used: tuple[float, bool] | None = None
        self._alive = True
        self._asked = 0.0
        self._reported = False

    def attach(self) -> None:
        """Watch the running loop without starting a thread. The caller must call `sample` regularly."""
        self._loop = asyncio.get_running_loop()
        self._watched, self._native = threading.get_ident(), threading.get_native_id()
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
            self._used = _usage(self._native)
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
                before, now = self._used, _usage(self._native)
                computed, waits = (now[0] - before[0], now[1]) if before and now else (None, False)
                self._on_stall(Stall(silent, tuple(traceback.extract_stack(frame)), computed, waits))
        return True

    def _beat(self) -> None:
        self._alive = True
