"""What holds for every test: one thread for numerics, and no network beyond this machine."""

from __future__ import annotations

import ipaddress
import os
import sys
import tempfile
from typing import Any

from hypothesis import settings

# Before torch or a tokenizer is imported by any test: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# The user's secret, which indexes are kept with, and the tokens of servers are made here, not in the user's home.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"tapereel-tests-{os.getuid()}")

# A machine may be slow, or busy with something else.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


class NetworkRefused(RuntimeError):
    """A test reached for a machine other than this one."""


def _is_local(host: Any) -> bool:
    if host is None or isinstance(host, bytes) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse_network(event: str, args: tuple[Any, ...]) -> None:
    # An audit hook sees every socket of the process, those that C code opens through Python's module included.
    if event in ("socket.connect", "socket.sendto"):
        address = args[1]
        if isinstance(address, tuple) and not _is_local(address[0]):
            raise NetworkRefused(f"{event} to {address}: tests may talk to this machine only")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _is_local(args[0]):
        raise NetworkRefused(f"{event} of {args[0]!r}: tests may talk to this machine only")


sys.addaudithook(_refuse_network)
