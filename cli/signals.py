"""When a verb that serves is told to end: by Ctrl-C, SIGTERM, or its terminal that is closed. Knows nothing of what is
served."""

from __future__ import annotations

import asyncio
import contextlib
import signal


def told_to_end() -> asyncio.Event:
    """Set when this process is told to end. Where a system has no such signals, Ctrl-C still ends it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    names = [signal.SIGINT, signal.SIGTERM]
    # `nohup` has it ignored, and not every system has it.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        names.append(signal.SIGHUP)
    for name in names:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(name, stop.set)
    return stop
