"""The stop signal of verbs that serve: Ctrl-C, SIGTERM, or a terminal that is closed."""

from __future__ import annotations

import asyncio
import contextlib
import signal


def stop_event() -> asyncio.Event:
    """An event that is set when this process receives SIGINT, SIGTERM or SIGHUP.

    The verb then ends in order: it closes episodes and seals the store, where the default action would lose them. On a
    system without such signals, Ctrl-C raises KeyboardInterrupt as usual.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    names = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores SIGHUP, which must stay ignored; Windows has no SIGHUP.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        names.append(signal.SIGHUP)
    for name in names:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(name, stop.set)
    return stop
