"""Servers on this machine are asked directly, whatever proxy the environment names for the way out.

Clients of ours ignore proxies; those of other libraries read `HTTP_PROXY`, and would send to a proxy what is meant for
loopback, which no proxy reaches.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies_environment


def past_proxies(url: str) -> dict[str, str]:
    """The variables with which libraries ask `url` directly; empty where they do, or where it isn't on this machine."""
    host = urlsplit(url).hostname or ""
    named = getproxies_environment()
    spared = [one.strip() for one in named.pop("no", "").split(",") if one.strip()]
    if not named or not _is_here(host) or host in spared or "*" in spared:
        return {}
    all_spared = ",".join([*spared, host])
    return {"NO_PROXY": all_spared, "no_proxy": all_spared}


def ask_directly(url: str) -> None:
    """Have libraries in this process, and processes it starts, do so."""
    os.environ.update(past_proxies(url))


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
