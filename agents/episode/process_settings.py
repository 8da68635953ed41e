"""Settings of the whole process that are changed while episodes run, and restored afterwards.

Garbage collections are rare while episodes run. A full collection visits every object in the process, which is half a
million once torch and transformers are imported. With Python's default thresholds, the steps of a few thousand turns
start one.

Threads take turns more often while a training loop runs. The trainer's thread gives up the GIL at each operation of
torch. With Python's default interval, it may then wait for 5 ms until the event loop's thread gives it up again.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

RARE = (50_000, 20, 20)
"""The thresholds (`gc.set_threshold`) while an episode runs."""
SWITCH = 0.0003
"""Seconds after which a thread must give up the GIL to one that waits for it (`sys.setswitchinterval`)."""
T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """A setting of the process that is changed in a context. Contexts may overlap, also in several threads: the last
    one that ends restores the value, unless other code has set another one meanwhile."""

    def __init__(self, get: Callable[[], T], put: Callable[[T], object], change: Callable[[T], T]) -> None:
        """`change` takes the current value and returns the one for the context."""
        self._get, self._put, self._change = get, put, change
        self._lock = threading.Lock()
        self._contexts = 0
        self._before: T
        self._ours: T

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Return a context in which the setting has the other value."""
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._before = self._get()
                self._put(self._change(self._before))
                self._ours = self._get()  # it may have been rounded
        try:
            yield
        finally:
            with self._lock:
                self._contexts -= 1
                if not self._contexts and self._get() == self._ours:
                    self._put(self._before)


def _rarer(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the thresholds for rare collections. Thresholds that are already higher, or that turn the collector off,
    stay."""
    return RARE if 0 < before[0] < RARE[0] else before


rare_collections = ProcessSetting(gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds), _rarer)
quick_switches = ProcessSetting(sys.getswitchinterval, sys.setswitchinterval, lambda before: min(before, SWITCH))
