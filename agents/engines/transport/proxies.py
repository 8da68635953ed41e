"""Makes other libraries connect to servers on this machine directly instead of through the environment's HTTP proxy.

Tapereel's own HTTP clients ignore proxies. Other libraries read `HTTP_PROXY`, and would send requests for this
machine's loopback interface to a proxy that can't reach it.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from ....tapes.common.request_checks import is_loopback


def past_proxies(url: str) -> dict[str, str]:
    """Return the environment variables that make libraries connect to `url` directly. The result is empty if no proxy
    applies to `url`, or if `url` isn't on this machine."""
    host = urlsplit(url).hostname or ""
    named = getproxies_environment()
    spared = [one.strip() for one in named.pop("no", "").split(",") if one.strip()]
    if not named or not is_loopback(host) or host in spared or "*" in spared:
        return {}
    all_spared = ",".join([*spared, host])
    # Libraries differ in which of the two spellings they read or prefer, so both variables must contain the host.
    return {"NO_PROXY": all_spared, "no_proxy": all_spared}


def ask_directly(url: str) -> None:
    """Make libraries in this process and its future child processes connect to `url` directly. Changes `os.environ`."""
    os.environ.update(past_proxies(url))
