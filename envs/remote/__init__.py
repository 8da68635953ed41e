"""Environments in other processes: on a server, in a local process pool, or behind OpenEnv's protocol.

This package imports `envs` and `tapes`. Names that need aiohttp are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .declared import Declared
from .pool import Pool
from .remote_errors import (
    BadAnswer,
    Busy,
    Hung,
    Refused,
    RemoteError,
    RemoteFault,
    SessionLost,
    Unreachable,
    WrongEnvironment,
)

if TYPE_CHECKING:
    from .env_service import Service, ServiceLimits
    from .openenv import OpenEnvAction, OpenEnvironment, OpenEnvObservation
    from .remote_environment import RemoteEnvironment

_HOME = {
    "RemoteEnvironment": "remote_environment",
    "Service": "env_service",
    "ServiceLimits": "env_service",
    "OpenEnvAction": "openenv",
    "OpenEnvObservation": "openenv",
    "OpenEnvironment": "openenv",
}

__all__ = [
    "BadAnswer",
    "Busy",
    "Declared",
    "Hung",
    "OpenEnvAction",
    "OpenEnvObservation",
    "OpenEnvironment",
    "Pool",
    "Refused",
    "RemoteEnvironment",
    "RemoteError",
    "RemoteFault",
    "Service",
    "ServiceLimits",
    "SessionLost",
    "Unreachable",
    "WrongEnvironment",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
