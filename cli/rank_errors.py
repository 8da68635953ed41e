"""Prints the same error of several processes (ranks) once, if `torchrun` or `accelerate launch` started them."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

PATIENCE = 10.0
"""Seconds for which another rank waits for the error of rank 0, before it prints its own."""


def is_news(said: str, *, wait: bool = True) -> bool:
    """Return whether this process, which is about to exit, should print an error. It shouldn't if rank 0 prints the
    same one.

    The launcher keeps a store that outlives the processes. Rank 0 leaves its error there, and the others read it. With
    `wait` false, they don't, because their error can't be the same. Whatever keeps them from reading it, such as a
    launcher without a store or a rank 0 that has no error, they print their own.
    """
    rank, shared = int(os.environ.get("RANK", "0")), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or (rank and not wait):
        return True
    # The launcher ends all processes when the first one exits. This one is about to exit with a code of its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(place, port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        key = f"tapereel/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if not rank:
            store.set(key, said)
            return True
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not store.check([key]):  # torch's own wait prints a warning at the end
            time.sleep(0.1)
        return not store.check([key]) or store.get(key).decode() != said
    except (ImportError, RuntimeError):
        return True
