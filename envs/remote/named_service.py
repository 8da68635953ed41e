"""A service for an environment that is named as `module:name`, in this process or in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ...tapes.errors import UsageError
from ..load_named import load_named
from .env_service import Service
from .openenv_service import add_openenv
from .pool import Pool
from .sessions import ServiceLimits

PROCESS_SHARE = 0.9
"""Share of a call's seconds after which its process is killed. It is below 1 so that the client gets the error of the
killed process, and not the service's bare timeout."""


@contextmanager
def named_service(
    name: str,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    limits: ServiceLimits | None = None,
    processes: int | None = None,
    openenv: bool = False,
    tasks: Sequence[Any] | None = None,
) -> Iterator[Service]:
    """A service to start with `async with service.serving(port)`; leaving the block ends its processes.

    processes: run each episode in one of so many processes, which are killed and replaced when they hang; None: run
    all in this process. openenv: accept OpenEnv's clients too, at /ws; `tasks` are for those that bring none.
    UsageError where the name, the address or a limit makes no service.
    """
    limits = limits or ServiceLimits()
    make = load_named(name)
    with ExitStack() as stack:
        try:
            if processes is not None:
                seconds = PROCESS_SHARE * limits.call_seconds
                pool = Pool(name, processes=processes, seconds=seconds, largest=limits.message_bytes)
                make = stack.enter_context(pool)
            service = Service(make, host=host, token=token, limits=limits)
            if openenv:
                service = add_openenv(service, tasks)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        yield service
