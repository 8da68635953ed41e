"""SIGKILL at random moments of a writing process: nothing that it was told is safe is lost, and the run goes on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tapereel.tapes.store import Store, verify

from .lab import Lab

WRITER = """
import asyncio, itertools, sys
from tapereel.tapes.store.store import Store
from tests.tapes.store.lab import Lab

lab, name = Lab(), sys.argv[2]

async def episodes(store, lane):
    for k in itertools.count():
        tape = f"{name}.{lane}.{k}"
        for body in lab.episode(tape):
            store.writer.append(body)
            await asyncio.sleep(0)
        await store.writer.durable()
        print(tape, flush=True)  # acknowledged

async def main():
    store = Store.open(sys.argv[1], write=True, rotate_bytes=40_000)
    await asyncio.gather(*(episodes(store, lane) for lane in range(8)))

asyncio.run(main())
"""


def killed_after(run: Path, name: str, lines: int) -> list[str]:
    """Start a writer, kill it once it has acknowledged so many episodes; gives all that it acknowledged."""
    told = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run), name], text=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line.strip())
            if len(told) == lines:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return told


@pytest.mark.kill
def test_twenty_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    run, rng = tmp_path / "run", random.Random(0)
    Store.create(run).close()
    told: list[str] = []
    for k in range(20):
        told += killed_after(run, f"w{k}", rng.randint(1, 120))
    with Store.open(run, write=True) as store:
        finished = {summary.id for summary in store.summaries(status="finished")}
        assert set(told) <= finished
        lab = Lab()
        for tape in list(store.tapes(status="finished"))[::20]:
            assert tape.bodies == list(lab.episode(tape.id))
        assert store.books().closes
    report = verify(run)
    assert (report.exit_code, report.open) == (0, 0), (report.broken, report.torn)


@pytest.mark.kill
def test_a_killed_writer_leaves_the_other_one_alone(tmp_path: Path) -> None:
    run, lab = tmp_path / "run", Lab()
    with Store.create(run) as store:
        store.writer.append(lab.begin("mine"))
        store.writer.sync()
        told = killed_after(run, "other", 30)
        with Store.open(run, write=True) as third:
            assert "mine" not in third.recovered.crashed
            assert set(told) <= {summary.id for summary in third.summaries(status="finished")}
        store.writer.append(lab.end("mine"))
    assert verify(run).exit_code == 0
