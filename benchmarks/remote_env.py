"""What a step costs in this process, in a process of a pool, on a server, and by OpenEnv's protocol; and what 1,000
sessions at once take.

    python benchmarks/remote_env.py
    python benchmarks/remote_env.py --openenv .contract/openenv

The environment says back what it is told. CPU seconds are those of both sides together, client and server, the best of
three rounds; OpenEnv's package lives in an environment of its own (`python -m tests.contract.openenv_env`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tapereel.envs import Environment, Outcome
from tapereel.envs.remote import OpenEnvAction, OpenEnvironment, Pool, RemoteEnvironment
from tapereel.tapes import Action, Observation

ROOT = Path(__file__).resolve().parents[1]
WORD = "hello there, how are you?"


class Say(Action, kind="bench_say"):
    message: str


class Echoed(Observation, kind="bench_echoed"):
    echoed_message: str
    message_length: int


class Echo(Environment[Say]):
    """As the echo environment of OpenEnv's template."""

    async def reset(self, task: Any) -> Echoed:
        return Echoed(echoed_message="ready", message_length=0)

    async def step(self, action: Say) -> Outcome:
        message = action.message
        return Outcome(Echoed(echoed_message=message, message_length=len(message)), reward=0.1 * len(message))


NAME = f"{Path(__file__).resolve()}:Echo"


@contextmanager
def process(command: list[Any], cwd: Path = ROOT) -> Iterator[tuple[psutil.Process, str]]:
    """A server, and the first line that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=cwd) as started:
        try:
            assert started.stdout is not None
            yield psutil.Process(started.pid), started.stdout.readline()
        finally:
            started.kill()


@contextmanager
def ours(*options: str) -> Iterator[tuple[psutil.Process, str]]:
    """`tapereel serve env`, and its address."""
    with process([sys.executable, "-m", "tapereel.cli", "serve", "env", NAME, "--json", *options]) as (
        server,
        line,
    ):
        yield server, json.loads(line)["url"]


def cpu(*others: psutil.Process) -> float:
    """CPU seconds of this process and of the others, so far."""
    return time.process_time() + sum(sum(one.cpu_times()[:2]) for one in others)


async def steps(env: Any, action: Any, count: int, *servers: psutil.Process) -> dict[str, float]:
    """Seconds and CPU seconds of one step, in one session; the best of three rounds."""
    await env.reset(None)
    rounds = []
    for _ in range(3):
        began, busy = time.perf_counter(), cpu(*servers)
        for _ in range(count):
            await env.step(action)
        rounds.append(((time.perf_counter() - began) / count, (cpu(*servers) - busy) / count))
    await env.close()
    wall, busy = (min(column) for column in zip(*rounds, strict=True))
    return {"wall_us": round(1e6 * wall, 1), "cpu_us": round(1e6 * busy, 1)}


async def openenv_s_client(python: Path, url: str, server: psutil.Process, count: int) -> dict[str, float]:
    """The same by OpenEnv's own client."""
    client = ROOT / "tests" / "contract" / "openenv_client.py"
    rounds = []
    for _ in range(3):
        before = sum(server.cpu_times()[:2])
        words = [python, client, url, "steps", str(count), json.dumps({"message": WORD})]
        run = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        out, _ = await run.communicate()
        told = json.loads(out)
        rounds.append((told["seconds"] / count, (told["cpu"] + sum(server.cpu_times()[:2]) - before) / count))
    wall, busy = (min(column) for column in zip(*rounds, strict=True))
    return {"wall_us": round(1e6 * wall, 1), "cpu_us": round(1e6 * busy, 1)}


def memory(one: psutil.Process) -> float:
    """MiB."""
    return one.memory_info().rss / 2**20


async def crowd(sessions: int, each: int) -> dict[str, float]:
    """Sessions that are all open at once: memory of both sides, and what they do together."""
    me = psutil.Process()
    with ours("--sessions", str(sessions)) as (server, url):
        found: dict[str, float] = {"server_before_mib": memory(server), "client_before_mib": memory(me)}
        for k in (1, 2):
            envs = [RemoteEnvironment(url, Echo) for _ in range(sessions)]
            action = Say(message=WORD)
            began = time.perf_counter()
            await together(lambda env: env.reset(None), envs)
            found[f"open_{k}_s"] = time.perf_counter() - began
            found |= {f"server_{k}_mib": memory(server), f"client_{k}_mib": memory(me)}

            async def play(env: Any, action: Any = action) -> None:
                for _ in range(each):
                    await env.step(action)

            began, busy = time.perf_counter(), cpu(server)
            await together(play, envs)
            found[f"steps_per_s_{k}"] = sessions * each / (time.perf_counter() - began)
            found[f"steps_per_core_s_{k}"] = sessions * each / (cpu(server) - busy)
            found[f"server_played_{k}_mib"] = memory(server)
            await together(lambda env: env.close(), envs)
    return {key: round(value, 1) for key, value in found.items()}


async def together(what: Callable[[Any], Awaitable[Any]], envs: list[Any]) -> None:
    await asyncio.gather(*map(what, envs))


async def main(openenv: Path | None, count: int, sessions: int) -> dict[str, Any]:
    action, data = Say(message=WORD), OpenEnvAction(data={"message": WORD})
    found: dict[str, Any] = {"in this process": await steps(Echo(), action, 10 * count)}
    with Pool(Echo, processes=1) as pool:
        env = pool()
        await env.reset(None)
        workers = [child for child in psutil.Process().children() if NAME in child.cmdline()]
        found["in a pool"] = await steps(env, action, count, *workers)
    with ours() as (server, url):
        found["on a server"] = await steps(RemoteEnvironment(url, Echo), action, count, server)
        found["our OpenEnv client, our server"] = await steps(OpenEnvironment(url), data, count, server)
        if openenv is not None:
            found["OpenEnv's client, our server"] = await openenv_s_client(openenv / "bin/python", url, server, count)
    if openenv is not None:
        port = "8765"
        command = [
            openenv / "bin/python",
            "-u",
            "-c",
            "import threading, time, uvicorn\n"
            "from server.app import app\n"
            f"server = uvicorn.Server(uvicorn.Config(app, port={port}, log_level='critical'))\n"
            "def told():\n    while not server.started: time.sleep(0.05)\n    print('up', flush=True)\n"
            "threading.Thread(target=told).start()\nserver.run()\n",
        ]
        with process(command, openenv / "echo") as (server, _):
            url = f"http://127.0.0.1:{port}"
            found["our OpenEnv client, OpenEnv's server"] = await steps(OpenEnvironment(url), data, count, server)
            found["OpenEnv's client and server"] = await openenv_s_client(openenv / "bin/python", url, server, count)
    found[f"{sessions} sessions"] = await crowd(sessions, 20)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openenv", type=Path, help="the environment with OpenEnv's package")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=1000)
    args = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 8192), limit[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = args.openenv.absolute() if args.openenv else None
    print(json.dumps(asyncio.run(main(where, args.steps, args.sessions)), indent=2))
