"""Garbage collections are rare while episodes run.

A full collection visits every object in the process, which is half a million once torch and transformers are imported.
With Python's default thresholds, the steps of a few thousand turns start one.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (50_000, 20, 20)
"""The thresholds (`gc.set_threshold`) while an episode runs."""
_lock = threading.Lock()
_episodes = 0
_before = (0, 0, 0)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Return a context in which this process collects garbage rarely. Contexts may overlap, also in several threads:
    the last one that ends restores the thresholds.

    Thresholds that are already higher, or that turn the collector off, aren't changed.
    """
    global _episodes, _before
    with _lock:
        _episodes += 1
        if _episodes == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < RARE[0]:
                gc.set_threshold(*RARE)
    try:
        yield
    finally:
        with _lock:
            _episodes -= 1
            if not _episodes and gc.get_threshold() == RARE:  # otherwise, other code has set them meanwhile
                gc.set_threshold(*_before)
