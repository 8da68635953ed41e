"""One lead per run: leases, epochs, and what a lead that lost its lease may still do."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tapereel.tapes.store.disk import Disk
from tapereel.tapes.store.lease import Lease, LeaseLost, RunHeld, read_leads

HOLD = """
import sys, time
from tapereel.tapes.store.lease import Lease, LeaseLost
lease = Lease(sys.argv[1], beat=0.05)
print(lease.epoch, flush=True)
try:
    while True:
        time.sleep(0.01)
        lease.check()
except LeaseLost as error:
    print(error, flush=True)
"""


class NoLocks(Disk):
    """A file system on which `flock` has no effect."""

    def lock(self, handle: int, *, wait: bool = False) -> bool:
        return True


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    with process:
        yield process
        process.kill()


def test_a_second_lead_is_refused_and_the_error_names_the_first(tmp_path: Path, lead: subprocess.Popen[str]) -> None:
    with pytest.raises(RunHeld) as caught:
        Lease(tmp_path, beat=0.05)
    assert f"process {lead.pid} on {os.uname().nodename} (started 20" in str(caught.value)
    assert "last sign of life 20" in str(caught.value)
    assert "--take-over" in str(caught.value)
    assert list(read_leads(tmp_path)) == [1]


def test_a_killed_lead_is_followed_at_once(tmp_path: Path, lead: subprocess.Popen[str]) -> None:
    lead.send_signal(signal.SIGKILL)
    lead.wait()
    with Lease(tmp_path, beat=100.0) as lease:  # waiting for a sign of life would take minutes
        assert lease.epoch == 2
        assert lease.locks


def test_a_stopped_lead_that_lost_its_lease_ends_when_it_continues(tmp_path: Path, lead: subprocess.Popen[str]) -> None:
    lead.send_signal(signal.SIGSTOP)
    with pytest.raises(RunHeld):
        Lease(tmp_path, beat=0.05)  # it holds its lock, however long it is stopped
    with Lease(tmp_path, take_over=True) as lease:
        lead.send_signal(signal.SIGCONT)
        assert lead.stdout is not None
        said = lead.stdout.readline()
        assert f"was taken over by process {os.getpid()}" in said
        assert "as lead 2. This process was lead 1" in said
        assert lead.wait(60) == 0
        lease.check()


def test_where_flock_has_no_effect_signs_of_life_decide(tmp_path: Path) -> None:
    with Lease(tmp_path, beat=0.02, disk=NoLocks()) as first:
        assert not first.locks
        with pytest.raises(RunHeld):
            Lease(tmp_path, beat=1.0, disk=NoLocks())
        first.check()
    with Lease(tmp_path, beat=100.0, disk=NoLocks()) as second:  # the first one ended its lease itself
        assert second.epoch == 2


def test_a_silent_lead_without_locks_is_dead_after_its_grace(tmp_path: Path) -> None:
    first = Lease(tmp_path, beat=1000.0, disk=NoLocks())
    with Lease(tmp_path, beat=0.05, disk=NoLocks()) as second:
        assert second.epoch == 2
        with pytest.raises(LeaseLost, match="as lead 2"):
            first.check()
    first.close()


def test_the_lock_of_a_lead_on_another_machine_proves_nothing(tmp_path: Path) -> None:
    Lease(tmp_path, beat=1000.0).close()
    path = tmp_path / "leads" / "000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "ended": False}))
    started = time.monotonic()
    with Lease(tmp_path, beat=0.1) as lease:
        assert lease.epoch == 2
    assert time.monotonic() - started >= 0.3  # it looked for signs of life


def _claim(folder: Path, start: float, won: multiprocessing.Queue[int], told: Event) -> None:
    time.sleep(max(start - time.time(), 0.0))
    try:
        Lease(folder, beat=0.05)
    except RunHeld:
        won.put(0)
    else:
        won.put(os.getpid())
        told.wait(30)  # a lead that ends frees the run, for one that starts late on a busy machine


@pytest.mark.parametrize("leads", [0, 3])
def test_of_many_that_start_at_once_one_leads(tmp_path: Path, leads: int) -> None:
    for _ in range(leads):
        Lease(tmp_path).close()
    context = multiprocessing.get_context("fork")
    won: multiprocessing.Queue[int] = context.Queue()  # pyright: ignore[reportAssignmentType]
    start = time.time() + 0.3
    told = context.Event()
    crowd = [context.Process(target=_claim, args=(tmp_path, start, won, told)) for _ in range(8)]
    for one in crowd:
        one.start()
    pids = [won.get(timeout=30) for _ in crowd]
    told.set()
    for one in crowd:
        one.join()
    assert len([pid for pid in pids if pid]) == 1, read_leads(tmp_path)
    assert max(read_leads(tmp_path)) == leads + 1


class FullDisk(Disk):
    """Writes until it is full."""

    full = False

    def write(self, handle: int, data: bytes) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(handle, data)


def test_the_end_of_a_lease_on_a_full_disk_hides_no_other_error(tmp_path: Path) -> None:
    disk = FullDisk()

    def work() -> None:
        with Lease(tmp_path, disk=disk):
            disk.full = True
            raise RuntimeError("the run's own")

    with pytest.raises(RuntimeError, match="the run's own"):
        work()
    with Lease(tmp_path, beat=0.05) as lease:
        assert lease.epoch == 2


def test_a_lead_file_that_a_crash_cut_short_is_a_dead_lead(tmp_path: Path) -> None:
    Lease(tmp_path).close()
    (tmp_path / "leads" / "000001.json").write_bytes(b'{"epo')
    with Lease(tmp_path, beat=0.05) as lease:
        assert lease.epoch == 2
