"""Signals that end a verb: Ctrl-C, SIGTERM and, for verbs that serve, a closed terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from types import FrameType


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


def sigterm_as_interrupt() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that a run can close its episodes. By default, it would end the
    process at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # the handler of the event loop, if one is running
        if not callable(handler):  # a shell script starts its background jobs with SIGINT ignored
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
