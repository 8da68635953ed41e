"""A service for an environment named as `module:name`, run in this process or in a pool of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ...tapes.errors import UsageError
from ..load_named import load_named
from .env_service import Service, ServiceLimits
from .openenv_service import add_openenv
from .pool import Pool

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

    processes: size of a pool that runs each episode in its own process; a process that hangs is killed and replaced.
    None runs all episodes in this process. openenv: also accept OpenEnv clients, at /ws; `tasks` are for a `reset`
    without a task. UsageError if the name, the address or a limit is invalid.
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
