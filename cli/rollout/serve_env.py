"""`tapereel serve env`: serve an environment on a port, for agents and trainers in other processes."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ...envs.load_named import listed_tasks, load_named
from ...tapes.common.run_async import run_async
from ...tapes.errors import UsageError
from ..console import Exit, answer, at_least, positive, say
from ..scene_arguments import add_server_arguments, token_line, variable_value
from ..signals import stop_event

if TYPE_CHECKING:
    from ...envs.environment import EnvironmentFactory
    from ...envs.remote import Service

EXAMPLE = """
tapereel serve env my_env.py:GuessNumber --port 8100
tapereel serve env my_env.py:Simulator --port 8100 --processes 8 --call-seconds 20
tapereel serve env my_env.py:GuessNumber --port 8100 --tasks "[3, 7, 9]"
"""

PROCESS_SHARE = 0.9
"""A process is killed if a call in it takes longer than this share of the call's time limit. The share is below 1, so
that the client gets the error about the killed process instead of a plain timeout."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "env", help="an Environment class, or a function with a return type that makes one: module:name, file.py:name"
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--sessions", type=at_least(1), default=1000, metavar="N", help="concurrent episodes (default 1000)"
    )
    parser.add_argument(
        "--processes",
        type=at_least(1),
        metavar="N",
        help="run each episode in one of N processes, which are killed and replaced when they hang",
    )
    parser.add_argument(
        "--call-seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="longest call of the environment in seconds (default 60)",
    )
    parser.add_argument(
        "--window-seconds",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds that an episode waits for its client after a lost connection (default 30)",
    )
    parser.add_argument(
        "--idle-seconds",
        type=positive,
        default=900.0,
        metavar="S",
        help="longest time in seconds between two calls of an episode (default 900)",
    )
    parser.add_argument(
        "--message-bytes",
        type=at_least(1024),
        default=1 << 20,
        metavar="N",
        help="longest message to accept (default 1 MiB)",
    )
    parser.add_argument("--tasks", help="tasks for OpenEnv clients that send none: a JSON list, or module:name")


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    from ...envs.remote import Pool, Service, ServiceLimits

    limits = ServiceLimits(
        sessions=args.sessions,
        message_bytes=args.message_bytes,
        call_seconds=args.call_seconds,
        window_seconds=args.window_seconds,
        idle_seconds=args.idle_seconds,
    )
    token, tasks = variable_value(args.key), _tasks(args.tasks)
    make = cast("EnvironmentFactory", load_named(args.env))
    with contextlib.ExitStack() as stack:
        try:
            if args.processes is not None:
                seconds = PROCESS_SHARE * limits.call_seconds
                pool = Pool(args.env, processes=args.processes, seconds=seconds, largest=limits.message_bytes)
                make = stack.enter_context(pool)
            service = Service(make, host=args.host, token=token, limits=limits, tasks=tasks)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        with contextlib.suppress(KeyboardInterrupt):
            run_async(_serve(args, service))
    return Exit.HOLDS


def _tasks(text: str | None) -> Sequence[Any] | None:
    if text is None:
        return None
    tasks = list(listed_tasks(text))
    if not tasks:
        raise UsageError(f"--tasks is {text!r:.60}; give a JSON list with at least one task, or the name of one")
    return tasks


async def _serve(args: argparse.Namespace, service: Service) -> None:
    stop = stop_event()
    async with service.serving(args.port):
        name, places = service.declared.name, service.limits.sessions
        answer(
            args,
            {"url": service.url, "environment": name, "places": places, "token_file": service.token_file},
            f"{name} at {service.url}, {places} concurrent episodes\n{token_line(service.token_file)}",
        )
        say("press Ctrl-C to stop")
        await stop.wait()
        say("stopping")
