"""Ctrl-C, and KeyboardInterrupt in code of an agent or an environment, end a run at once and leave whole tapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tapereel as tr

PROGRAM = """
import asyncio, os, signal, sys, threading, time
import tapereel as tr
from tapereel.tapes import Answer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
place, how = sys.argv[1:]


def interrupt(begun=[]):
    if how == "raise":
        raise KeyboardInterrupt
    if begun:
        return
    begun.append(True)
    times = 2 if how == "twice" else 1
    threading.Thread(target=press, args=(times,)).start()
    while times == 2:  # code that never awaits goes on after the first Ctrl-C
        pass


def press(times):
    for _ in range(times):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)


class World(tr.Environment):
    async def reset(self, task):
        return "q"

    async def step(self, action):
        if place == "step":
            interrupt()
            await asyncio.sleep(30)
        return tr.Outcome(reward=1.0, terminated=True)


@tr.agent
async def asking(tape, llm):
    reply = await llm(tape)
    if place == "act":
        interrupt()
        await asyncio.sleep(30)
    yield Answer(text=reply.text)


try:
    tr.run(asking, World, [1, 2, 3], ["a"], out="run")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["step", "act"])
@pytest.mark.parametrize("how", ["raise", "once", "twice"])
def test_it_ends_the_run_without_a_wait_for_code_that_has_ended(place: str, how: str, tmp_path: Path):
    words = [sys.executable, "-c", PROGRAM, place, how]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert "CancelledError" not in done.stderr, "it names code that ignores its cancellation, and none does"
    assert "Traceback" not in done.stderr
    run = tr.open(tmp_path / "run")
    assert run.verify().verdict == "holds"
    assert {str(tape.status) for tape in run} <= {"cancelled", "error"}
