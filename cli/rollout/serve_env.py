"""`tapereel serve-env`: an environment on a port, for agents and trainers in other processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...envs.load_named import listed_tasks, load_named
from ...tapes.errors import UsageError
from ..console import Exit, answer, check_port, say
from ..signals import told_to_end

if TYPE_CHECKING:
    from ...envs.remote import Service

EXAMPLE = """
tapereel serve-env my_env.py:GuessNumber --port 8100
tapereel serve-env my_env.py:Simulator --port 8100 --processes 8 --call-seconds 20
tapereel serve-env my_env.py:GuessNumber --port 8100 --openenv --tasks "[3, 7, 9]"
"""

LEAST = {
    "sessions": 1,
    "processes": 1,
    "message_bytes": 1024,
    "call_seconds": 0,
    "window_seconds": 0,
    "idle_seconds": 0,
}
"""Of each option; 0: more than nothing."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument(
        "env", help="an Environment class, or a function with a return type that makes one: module:name, file.py:name"
    )
    parser.add_argument("--port", type=int, default=0, help="where to listen (default: a free port)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default: this machine only; anything else needs --key)",
    )
    parser.add_argument("--key", metavar="VARIABLE", help="the environment variable with the token to ask for")
    parser.add_argument("--sessions", type=int, default=1000, metavar="N", help="episodes at once (default 1000)")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="run each episode in one of N processes, which are killed and replaced when they hang",
    )
    parser.add_argument("--call-seconds", type=float, default=60.0, metavar="S", help="for any call (default 60)")
    parser.add_argument(
        "--window-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long an episode waits for its client after a connection broke (default 30)",
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=900.0,
        metavar="S",
        help="the most between two calls of an episode (default 900)",
    )
    parser.add_argument(
        "--message-bytes", type=int, default=1 << 20, metavar="N", help="the longest message to take (default 1 MiB)"
    )
    parser.add_argument("--openenv", action="store_true", help="take OpenEnv's clients too, at /ws")
    parser.add_argument("--tasks", help="with --openenv, whose clients may have none: a JSON list, or the name of one")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted or told to end."""
    if args.tasks is not None and not args.openenv:
        raise UsageError("--tasks are for OpenEnv's clients; ours bring their own: add --openenv, or leave it out")
    check_port(args.port)
    for name, least in LEAST.items():
        given = getattr(args, name)
        if given is not None and not (given >= least if least else given > 0):
            wanted = f"{least:,} or more" if least else "more than 0"
            raise UsageError(f"--{name.replace('_', '-')} is {given}; it must be {wanted}")
    make = load_named(args.env)
    with contextlib.ExitStack() as stack:
        try:
            service = _service(args, make, stack)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(args, service))
    return Exit.HOLDS


def _service(args: argparse.Namespace, make: Any, stack: contextlib.ExitStack) -> Service:
    from ...envs.remote import Pool, Service, ServiceLimits, add_openenv

    limits = ServiceLimits(
        sessions=args.sessions,
        message_bytes=args.message_bytes,
        call_seconds=args.call_seconds,
        window_seconds=args.window_seconds,
        idle_seconds=args.idle_seconds,
    )
    if args.processes is not None:
        # A process has no longer than a call may take, and is killed before the call is given up.
        make = stack.enter_context(
            Pool(args.env, processes=args.processes, seconds=0.9 * args.call_seconds, largest=args.message_bytes)
        )
    service = Service(make, host=args.host, token=_token(args.key), limits=limits)
    return add_openenv(service, _tasks(args.tasks)) if args.openenv else service


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise UsageError(f"the environment variable {variable} with the token is not set")
    return token


def _tasks(text: str | None) -> Sequence[Any] | None:
    if text is None:
        return None
    tasks = list(listed_tasks(text))
    if not tasks:
        raise UsageError(f"--tasks is {text!r:.60}; give a JSON list with at least one task, or the name of one")
    return tasks


async def _serve(args: argparse.Namespace, service: Service) -> None:
    stop = told_to_end()
    async with service.serving(args.port):
        answer(
            args,
            {"url": service.url, "environment": service.declared.name, "places": service.limits.sessions},
            f"{service.declared.name} at {service.url}, {service.limits.sessions} episodes at once",
        )
        say("press Ctrl-C to stop")
        await stop.wait()
        say("ending")
