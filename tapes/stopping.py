"""When a verb that serves is told to end: by Ctrl-C or SIGTERM. Knows nothing of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import signal


def told_to_end() -> asyncio.Event:
    """Set when this process is told to end. Where a system has no such signals, Ctrl-C still ends it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(name, stop.set)
    return stop
