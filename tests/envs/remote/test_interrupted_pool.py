"""Ctrl-C in a run with `env_processes`: every environment is closed, whatever it was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORLD = """
import asyncio, os, sys, time
from pathlib import Path
import tapereel as tr

class Slow(tr.Environment):
    async def reset(self, task) -> str:
        self.place = Path("open") / f"{task}-{os.getpid()}"
        self.place.mkdir()
        return "?"

    async def step(self, action):
        (self.place / "stepping").touch()
        {wait}
        return tr.Outcome(reward=1.0, terminated=True)

    async def close(self):
        if hasattr(self, "place"):
            {closing}
            self.place.rename(Path("closed") / self.place.name)

if __name__ == "__main__":
    run = dict(settings={"env_processes": 3, "concurrency": 3}, out="run")
    tr.run(tr.ChatAgent(), "world.py:Slow", [1, 2, 3], ["4"], **run)
"""
WAITS = {
    "awaits": "await asyncio.sleep(60)",
    "blocks": "time.sleep(2)",
    "swallows": "\n        try: await asyncio.sleep(60)\n        except asyncio.CancelledError: pass",
}


def interrupted(folder: Path, wait: str, closing: str = "pass") -> tuple[int, float]:
    """Start a run, press Ctrl-C in the middle of all three steps, and return its exit code and the seconds it took."""
    (folder / "world.py").write_text(WORLD.replace("{wait}", wait).replace("{closing}", closing))
    (folder / "open").mkdir()
    (folder / "closed").mkdir()
    program = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "runpy.run_path('world.py', run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while len(list(folder.glob("open/*/stepping"))) < 3:
        assert process.poll() is None, process.communicate()[1].decode()[-2000:]
        assert time.monotonic() < until
        time.sleep(0.05)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    return process.returncode, time.monotonic() - began


def workers(folder: Path) -> list[int]:
    places = [*folder.glob("open/*"), *folder.glob("closed/*")]
    return [pid for place in places if alive(pid := int(place.name.split("-")[1]))]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("wait", WAITS)
def test_every_environment_is_closed(tmp_path: Path, wait: str) -> None:
    code, _ = interrupted(tmp_path, WAITS[wait])
    assert code != 0
    assert len(list(tmp_path.glob("closed/*"))) == 3
    assert not list(tmp_path.glob("open/*"))
    assert not workers(tmp_path)


def test_a_close_that_hangs_is_given_up(tmp_path: Path) -> None:
    code, seconds = interrupted(tmp_path, WAITS["awaits"], closing="time.sleep(600)")
    assert code != 0
    assert seconds < 60
    assert len(list(tmp_path.glob("open/*"))) == 3
    assert not workers(tmp_path)
