"""OpenEnv's echo server as a process, and what its environment looks like from here."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tapereel.tapes import Action, Observation

from .openenv_env import ECHO, PYTHON

CLIENT = Path(__file__).with_name("openenv_client.py")


class Say(Action, kind="openenv_echo_say"):
    message: str


class Echoed(Observation, kind="openenv_echoed"):
    echoed_message: str
    message_length: int


@contextmanager
def echo_server(log: Path) -> Iterator[str]:
    """The address of a real OpenEnv server, which is gone afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        command = [
            PYTHON,
            "-m",
            "uvicorn",
            "server.app:app",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "warning",
        ]
        process = subprocess.Popen(command, cwd=ECHO, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.kill()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"OpenEnv's echo server did not come up:\n{log.read_text()[-3000:]}")
