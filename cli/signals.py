"""The stop signal for verbs that serve, which is Ctrl-C, SIGTERM or a closed terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal


def stop_event() -> asyncio.Event:
    """Return an event that is set when this process receives SIGINT, SIGTERM or SIGHUP.

    The verb can then close its episodes and seal the store. By default, a signal would end the process before that. On
    a system without these signals, Ctrl-C raises KeyboardInterrupt as usual.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    names = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores SIGHUP, which must stay ignored. Windows has no SIGHUP.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        names.append(signal.SIGHUP)
    for name in names:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(name, stop.set)
    return stop
