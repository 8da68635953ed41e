"""Environments in other processes: on a server, in a local process pool, or behind OpenEnv's protocol.

Imports `envs` and `tapes`. Names are imported when they are used, so that aiohttp is loaded only to connect or serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .declared import Declared, Undeclared
    from .env_client import RemoteEnvironment
    from .env_service import Service, ServiceLimits
    from .openenv import OpenEnvAction, OpenEnvironment, OpenEnvObservation
    from .openenv_service import add_openenv
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

_HOME = {
    "RemoteEnvironment": "env_client",
    "Declared": "declared",
    "Undeclared": "declared",
    "BadAnswer": "remote_errors",
    "Busy": "remote_errors",
    "Hung": "remote_errors",
    "Refused": "remote_errors",
    "RemoteError": "remote_errors",
    "RemoteFault": "remote_errors",
    "SessionLost": "remote_errors",
    "Unreachable": "remote_errors",
    "WrongEnvironment": "remote_errors",
    "OpenEnvAction": "openenv",
    "OpenEnvObservation": "openenv",
    "OpenEnvironment": "openenv",
    "add_openenv": "openenv_service",
    "Pool": "pool",
    "Service": "env_service",
    "ServiceLimits": "env_service",
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
    "Undeclared",
    "Unreachable",
    "WrongEnvironment",
    "add_openenv",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
