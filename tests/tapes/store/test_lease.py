"""One lead per run: leases, epochs, and what a lead that lost its lease may still do."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Lead, Use
from tapereel.tapes.store import Disk, Lease, LeaseLost, Store, end_lease, verify
from tapereel.tapes.store import lease as lease_module
from tapereel.tapes.store.lease import read_leads

from .lab import Lab

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
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as caught:
        Lease(tmp_path, beat=0.05)
    assert re.search(rf"\b{lead.pid}\b.*{re.escape(os.uname().nodename)}.*( 20\d\d-.*){{2}}", str(caught.value))
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
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        Lease(tmp_path, beat=0.05)  # it holds its lock, however long it is stopped
    with Lease(tmp_path, take_over=True) as lease:
        lead.send_signal(signal.SIGCONT)
        assert lead.stdout is not None
        said = lead.stdout.readline()
        assert f"process {os.getpid()}" in said
        assert re.search("lead 2.*lead 1", said)
        assert lead.wait(60) == 0
        lease.check()


def test_where_flock_has_no_effect_signs_of_life_decide(tmp_path: Path) -> None:
    with Lease(tmp_path, beat=0.02, disk=NoLocks()) as first:
        assert not first.locks
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
            Lease(tmp_path, beat=1.0, disk=NoLocks())
        first.check()
    with Lease(tmp_path, beat=100.0, disk=NoLocks()) as second:  # the first one ended its lease itself
        assert second.epoch == 2


def test_a_silent_lead_without_locks_is_dead_after_its_grace(tmp_path: Path) -> None:
    first = Lease(tmp_path, beat=1000.0, disk=NoLocks())
    with Lease(tmp_path, beat=0.05, disk=NoLocks()) as second:
        assert second.epoch == 2
        with pytest.raises(LeaseLost, match="lead 2"):
            first.check()
    first.close()


def test_the_lock_of_a_lead_on_another_machine_proves_nothing(tmp_path: Path) -> None:
    Lease(tmp_path, beat=1000.0).close()
    path = file_of(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "ended": False}))
    started = time.monotonic()
    with Lease(tmp_path, beat=0.1) as lease:
        assert lease.epoch == 2
    assert time.monotonic() - started >= 0.3  # it looked for signs of life


def _claim(folder: Path, start: float, won: multiprocessing.Queue[int], told: Event) -> None:
    time.sleep(max(start - time.time(), 0.0))
    try:
        Lease(folder, beat=0.05)
    except UsageError:
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

    with pytest.raises(RuntimeError, match="own"):
        work()
    with Lease(tmp_path, beat=0.05) as lease:
        assert lease.epoch == 2


def test_a_lead_file_that_a_crash_cut_short_is_a_dead_lead(tmp_path: Path) -> None:
    Lease(tmp_path).close()
    file_of(tmp_path).write_bytes(b'{"epo')
    with Lease(tmp_path, beat=0.05) as lease:
        assert lease.epoch == 2


# The epoch is in the records


def file_of(run: Path, epoch: int = 1) -> Path:
    """The lead's file, which has a nonce in its name."""
    (path,) = (run / "leads").glob(f"{epoch:06d}*")
    assert re.fullmatch(r"\d{6}-[0-9a-f]{6}\.json", path.name)
    return path


def led(run: Path, times: int) -> None:
    """A run that had so many leads, each with an episode."""
    for k in range(times):
        with Lease(run) as lease, Store.create(run) if not k else Store.open(run, write=True) as store:
            store.take_lead(lease)
            for body in Lab().episode(f"t{k}"):
                store.writer.append(body)


def removed(path: Path) -> None:
    shutil.rmtree(path.parent)


def emptied(path: Path) -> None:
    for one in path.parent.iterdir():
        one.unlink()


def unlinked(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name(f"{path.name[:7]}ffffff.json"))


def copied(path: Path) -> None:
    """Another file of the same name and content, as a program that copies folders makes it."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(b"")


def from_before(path: Path) -> None:
    """The folder as it was before this lead."""
    path.unlink()
    path.with_name("000001-aaaaaa.json").write_text('{"epoch":1,"host":"h","pid":1,"began":0,"seen":0,"ended":true}')


def of_another_run(path: Path) -> None:
    """A file of another lead under this name."""
    path.write_text('{"epoch":1,"host":"h","pid":1,"began":0,"seen":0,"ended":true}')


ACTS = [removed, emptied, unlinked, renamed, copied, truncated, from_before, of_another_run]


@pytest.mark.parametrize("act", ACTS)
def test_a_new_epoch_is_above_every_recorded_one(tmp_path: Path, act: Callable[[Path], None]) -> None:
    led(tmp_path, 3)
    act(file_of(tmp_path, 3))
    with Lease(tmp_path, beat=0.05) as lease, Store.open(tmp_path, write=True) as store:
        assert lease.epoch == 4
        store.take_lead(lease)
    assert verify(tmp_path).exit_code == 0, verify(tmp_path)


@pytest.mark.parametrize("act", ACTS)
def test_a_living_lead_without_its_file_is_seen_by_its_segment(tmp_path: Path, act: Callable[[Path], None]) -> None:
    led(tmp_path, 1)
    with Lease(tmp_path, beat=1000.0) as lease:
        store = Store.open(tmp_path, write=True)
        store.take_lead(lease)
        act(file_of(tmp_path, 2))
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as caught:
            Lease(tmp_path, beat=0.05)
        assert "--take-over" in str(caught.value)
        store.writer.append(Lab().begin("late"))
        if act in (copied, truncated, of_another_run):  # its name is still there
            store.writer.sync()
        else:
            with pytest.raises(LeaseLost):
                store.writer.sync()
        store.abandon()
    with Lease(tmp_path, beat=0.05) as after, Store.open(tmp_path, write=True) as store:
        assert after.epoch >= 3
        store.take_lead(after)
    assert verify(tmp_path).exit_code == 0, verify(tmp_path)
    assert verify(tmp_path).books.findings == ()


def test_an_emptied_file_of_a_living_lead_names_it_by_its_record(tmp_path: Path) -> None:
    with Lease(tmp_path, beat=1000.0) as lease, Store.create(tmp_path) as store:
        store.take_lead(lease)
        truncated(file_of(tmp_path))
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as caught:
            Lease(tmp_path, beat=0.05)
        assert f"process {os.getpid()} on {os.uname().nodename} (started 20" in str(caught.value)


@pytest.mark.parametrize("recorded", [1, 2, 7])
def test_an_epoch_that_is_not_above_the_recorded_ones_takes_no_lead(tmp_path: Path, recorded: int) -> None:
    led(tmp_path, 1)
    with Lease(tmp_path, beat=0.05) as lease:  # epoch 2
        with Store.open(tmp_path, write=True) as other:
            other.writer.append(Lead(epoch=recorded, host="h", pid=1, at=0.0).body())
        with Store.open(tmp_path, write=True) as store:
            if recorded == 1:
                store.take_lead(lease)
                return
            with pytest.raises(LeaseLost):
                store.take_lead(lease)
            assert [lead.record.epoch for lead in store.run_records("lead")] == [1, recorded]


def test_of_two_records_of_one_epoch_neither_leads(tmp_path: Path) -> None:
    """As after `leads/` was removed between two claims, without file locks."""
    with Lease(tmp_path, beat=0.05) as lease, Store.create(tmp_path) as store:
        store.take_lead(lease)
        with Store.open(tmp_path, write=True) as other:
            other.writer.append(Lead(epoch=1, host="h", pid=1, at=0.0).body())
        with pytest.raises(LeaseLost):
            store.check_lead()
        with pytest.raises(LeaseLost):
            store.append_layer(Use(lineage="main", update=0, items=()))


def test_a_check_of_the_lead_reads_other_processes_records_only(tmp_path: Path) -> None:
    lab = Lab()
    with Lease(tmp_path, beat=0.05) as lease, Store.create(tmp_path) as store:
        store.take_lead(lease)
        for name in ("mine", "other"):
            writer = store.writer if name == "mine" else Store.open(tmp_path, write=True).writer
            writer.append(lab.begin(name))
            writer.sync()
        store.check_lead()
        assert [summary.id for summary in store.index.tapes("1", ())] == ["other"]
        assert [summary.id for summary in store.summaries()] == ["mine", "other"]


def test_of_two_that_record_one_epoch_at_once_neither_takes_the_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one records it after the first look at the records, so only a look after the write can find it."""
    with Lease(tmp_path, beat=0.05) as lease, Store.create(tmp_path) as store:
        sync = store.writer.sync

        def late() -> None:
            with Store.open(tmp_path, write=True) as other:
                other.writer.append(Lead(epoch=1, host="h", pid=1, at=0.0).body())
            sync()

        monkeypatch.setattr(store.writer, "sync", late)
        with pytest.raises(LeaseLost):
            store.take_lead(lease)


def test_a_lead_whose_folder_came_back_without_its_successor_writes_no_update(tmp_path: Path) -> None:
    with Lease(tmp_path, beat=1000.0) as first, Store.create(tmp_path) as store:
        store.take_lead(first)
        shutil.copytree(tmp_path / "leads", tmp_path / "kept")
        with Lease(tmp_path, take_over=True) as second, Store.open(tmp_path, write=True) as later:
            later.take_lead(second)
        shutil.rmtree(tmp_path / "leads")
        (tmp_path / "kept").rename(tmp_path / "leads")
        first.check()  # the listing alone doesn't show it
        with pytest.raises(LeaseLost):
            store.append_layer(Use(lineage="main", update=0, items=()))
        with pytest.raises(LeaseLost):
            store.record_files(tmp_path / "leads", open=True)


def test_a_lead_whose_update_does_not_count_is_told(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease, Store.create(tmp_path) as store:
        store.take_lead(lease)
        store.append_layer(Use(lineage="main", update=0, items=()))
        store.check_counted()
        store.writer.append(Use(lineage="main", update=1, items=(), lead=2).body())
        store.append_layer(Use(lineage="main", update=2, items=()))
        with pytest.raises(LeaseLost, match=r"lead 1 .*update 2"):
            store.check_counted()


def test_a_claim_that_comes_second_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lead renames its claim, so a second one can create the same file."""
    with Lease(tmp_path, beat=1000.0) as first:
        monkeypatch.setattr(lease_module, "check_free", lambda *_, **__: 0)  # it looked before the first claim
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
            Lease(tmp_path)
        assert [path.name for path in (tmp_path / "leads").iterdir()] == [file_of(tmp_path).name]
        first.check()


def test_leads_of_earlier_versions_are_read(tmp_path: Path) -> None:
    led(tmp_path, 2)
    for epoch in (1, 2):
        file_of(tmp_path, epoch).rename(tmp_path / "leads" / f"{epoch:06d}.json")
    assert verify(tmp_path).exit_code == 0
    assert [(epoch, lead.pid) for epoch, lead in read_leads(tmp_path).items()] == [(1, os.getpid()), (2, os.getpid())]
    with Lease(tmp_path) as lease:
        assert lease.epoch == 3


@pytest.mark.parametrize("wild", ['"pid":-1', '"pid":1e30', '"began":1e300', '"seen":-1'])
def test_a_file_with_wild_numbers_is_unreadable(tmp_path: Path, wild: str) -> None:
    with Lease(tmp_path, beat=1000.0):
        holder = file_of(tmp_path).read_text()
        file_of(tmp_path).write_text(re.sub(wild.split(":")[0] + r":[^,}]*", wild, holder))
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
            Lease(tmp_path, beat=0.05)
        assert read_leads(tmp_path)[1].pid == 0


def test_a_lost_lease_leaves_no_empty_segment(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        store = Store.create(tmp_path, rotate_bytes=1, thread=False)
        store.lease, store.writer.guard = lease, lease.check
        end_lease(tmp_path)
        store.writer.append(Lab().begin("a"))
        store.writer.commit()
        assert isinstance(store.writer.failure, LeaseLost)
        store.abandon()
    assert all(path.stat().st_size for path in (tmp_path / "tapes").glob("*.jsonl"))


# File locks that fail, and locks that a child keeps


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_run_without_file_locks_goes_on(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    led(tmp_path, 2)
    assert verify(tmp_path).exit_code == 0
    with Lease(tmp_path, beat=0.02) as first:
        assert not first.locks
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
            Lease(tmp_path, beat=1.0)


def test_another_error_of_a_lock_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Lease(tmp_path)


FORKS = """
import ctypes, os, sys, time
from tapereel.tapes.store.lease import Lease
from tapereel.tapes.store.store import Store
lease = Lease(sys.argv[1], beat=1000.0)
store = Store.create(sys.argv[1])
store.take_lead(lease)
fork = ctypes.PyDLL(None).fork if sys.argv[2] == "c" else os.fork
child = fork()
if child == 0 and sys.argv[2] == "python":
    lease.close()
os.write(1, b"%d\\n" % child)  # in one piece: two processes write
time.sleep(600)
"""


@pytest.mark.kill
@pytest.mark.timeout(60)
@pytest.mark.parametrize("fork", ["c", "python"])
def test_a_child_that_keeps_the_lock_of_a_dead_lead_is_named(tmp_path: Path, fork: str) -> None:
    """Python closes locked files in a child that it forks. A library that forks by itself doesn't."""
    words = [sys.executable, "-c", FORKS, str(tmp_path), fork]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as lead:
        assert lead.stdout is not None
        child = max(int(lead.stdout.readline()), int(lead.stdout.readline()))
        try:
            with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as caught:
                Lease(tmp_path, beat=0.05)
            assert "lsof" not in str(caught.value)
            assert not read_leads(tmp_path)[1].ended
            lead.kill()
            lead.wait()
            if fork == "c":
                with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as caught:
                    Lease(tmp_path, beat=0.05)
                assert f"process {lead.pid} on" in str(caught.value)
                assert f"lsof {file_of(tmp_path)}" in str(caught.value)
            else:
                Lease(tmp_path, beat=0.05).close()
        finally:
            lead.kill()
            os.kill(child, signal.SIGKILL)
