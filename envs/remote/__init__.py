"""Environments in other processes: on a server, in a local process pool, or behind OpenEnv's protocol.

This package imports `envs` and `tapes`. Names that need aiohttp are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...tapes.common.extras import lazy_names
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "env_protocol": "Item PROTOCOL ROUTE ResetCall read_call",
        "env_service": "Service ServiceLimits",
        "openenv": "OpenEnvAction OpenEnvObservation OpenEnvironment",
        "remote_environment": "RemoteEnvironment",
    },
)
