"""Disks that fill up, fail, vanish or stall; several processes at once; a clock that goes backwards."""

from __future__ import annotations

import asyncio
import errno
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes import Corrupt, Status, StoreFailed
from tapereel.tapes.journal import Durability
from tapereel.tapes.store import Disk, Store, verify, writer

from .lab import Lab

lab = Lab()


class FaultyDisk(Disk):
    """A real disk on which writes or syncs fail, are cut short, or wait, as a test says."""

    def __init__(self) -> None:
        self.write_error: OSError | None = None
        self.sync_error: OSError | None = None
        self.most = 1 << 30
        """Bytes that one write takes."""
        self.gate = threading.Event()
        """Syncs wait for it."""
        self.gate.set()
        self.syncs = 0
        self.threads: set[threading.Thread] = set()
        """Those that have synced."""

    def write(self, handle: int, data: bytes) -> int:
        if self.write_error is not None:
            super().write(handle, bytes(data)[: len(data) // 2])  # half of it reaches the file
            raise self.write_error
        return super().write(handle, bytes(data)[: self.most])

    def sync(self, handle: int) -> None:
        self.syncs += 1
        self.threads.add(threading.current_thread())
        self.gate.wait()
        if self.sync_error is not None:
            raise self.sync_error
        super().sync(handle)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the writer's thread syncs, so a closed gate doesn't stop the event loop that opens it."""
    monkeypatch.setattr(writer, "BRIEF", 0.0)


def write(store: Store, *bodies: bytes) -> None:
    for body in bodies:
        store.writer.append(body)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_poisons_the_writer_and_loses_nothing_acknowledged(small_disk: Path) -> None:
    store = Store.create(small_disk / "run", cache=False)
    acknowledged = 0
    with pytest.raises(StoreFailed, match="No space left") as caught:  # noqa: PT012
        for k in range(1_000):
            write(store, *lab.episode(f"t{k:04d}"))
            store.writer.sync()
            acknowledged += 1
    assert caught.value.errno == errno.ENOSPC
    assert 0 < acknowledged < 1_000
    with pytest.raises(StoreFailed, match="No space left"):
        store.writer.append(lab.begin("more"))
    with pytest.raises(StoreFailed):
        asyncio.run(store.writer.durable())
    with pytest.raises(StoreFailed):
        store.close()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    with Store.open(small_disk / "run", write=True) as store:
        finished = [summary.id for summary in store.summaries(status="finished")]
        assert finished[:acknowledged] == [f"t{k:04d}" for k in range(acknowledged)]
        write(store, *lab.episode("after"))
    assert verify(small_disk / "run").exit_code == 0


def test_a_full_disk_at_the_start_or_in_recovery_is_an_error_and_changes_nothing(small_disk: Path) -> None:
    run = small_disk / "run"
    store = Store.create(run, cache=False)
    write(store, lab.begin("a"))
    store.writer.sync()
    store.abandon()
    (small_disk / "fill").write_bytes(b"")
    with pytest.raises(OSError, match="No space left"), (small_disk / "fill").open("wb") as fill:  # noqa: PT012
        while True:
            fill.write(bytes(4096))
            fill.flush()
    with pytest.raises(OSError, match="No space left"):
        Store.open(run, write=True, cache=False)
    (small_disk / "fill").unlink()
    with Store.open(run, write=True, cache=False) as store:
        assert store.recovered.crashed == ["a"]
    assert verify(run).exit_code in (0, 2)  # the file that could not get its first line is a torn one, or is gone
    assert not verify(run).broken


def test_a_read_only_disk_can_be_read_and_verified_but_not_written(small_disk: Path) -> None:
    run = small_disk / "run"
    with Store.create(run) as store:
        write(store, *lab.episode("a"))
    (run / "tapes" / "index.sqlite").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Store.open(run) as store:
        assert [tape.id for tape in store.tapes()] == ["a"]
        assert store.books().closes
    assert verify(run).exit_code == 0
    with pytest.raises(OSError, match="Read-only"):
        Store.open(run, write=True)


@pytest.mark.parametrize("fault", ["write", "sync"])
def test_an_input_output_error_poisons_the_writer(tmp_path: Path, fault: str) -> None:
    disk = FaultyDisk()
    store = Store.create(tmp_path / "run", disk=disk)
    write(store, *lab.episode("safe"))
    store.writer.sync()
    setattr(disk, f"{fault}_error", OSError(errno.EIO, "the disk is on fire"))
    with suppress(StoreFailed):  # the writing thread may fail before the last record is appended
        write(store, *lab.episode("lost"))
    with pytest.raises(StoreFailed, match="fire") as caught:
        store.writer.sync()
    assert caught.value.errno == errno.EIO
    setattr(disk, f"{fault}_error", None)  # the disk says that it is well again: nobody believes it
    with pytest.raises(StoreFailed):
        store.writer.append(lab.begin("more"))
    with pytest.raises(StoreFailed), store:
        pass
    with Store.open(tmp_path / "run", write=True) as store:
        assert store.tape("safe").status is Status.FINISHED
        if fault == "write":
            assert len(store.recovered.torn) == 1
    assert verify(tmp_path / "run").exit_code == 0


@pytest.mark.usefixtures("handed_over")
def test_everyone_who_waits_is_told_of_a_failure(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = Store.create(tmp_path / "run", disk=disk)

    async def wait_and_fail() -> list[Any]:
        disk.gate.clear()
        disk.sync_error = OSError(errno.EIO, "gone")
        waiting = []
        for k in range(5):
            store.writer.append(lab.begin(f"t{k}"))
            waiting.append(asyncio.ensure_future(store.writer.durable()))
            await asyncio.sleep(0)
        disk.gate.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    told = asyncio.run(wait_and_fail())
    assert [type(error) for error in told] == [StoreFailed] * 5
    assert len({id(error) for error in told}) == 5  # each has its own, so that tracebacks don't mix
    store.abandon()


def test_an_error_of_any_other_kind_is_told_too(tmp_path: Path) -> None:
    """A writer's thread that dies in silence would leave everybody waiting for ever."""
    disk = FaultyDisk()
    store = Store.create(tmp_path / "run", disk=disk)
    disk.sync_error = MemoryError("no room")  # type: ignore[assignment]
    store.writer.append(lab.begin("a"))
    with pytest.raises(StoreFailed, match="room"):
        asyncio.run(store.writer.durable())
    store.abandon()


def test_a_failure_inside_the_with_statement_is_what_comes_out(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with pytest.raises(StoreFailed, match="fire"), Store.create(tmp_path / "run", disk=disk) as store:  # noqa: PT012
        disk.sync_error = OSError(errno.EIO, "on fire")
        write(store, lab.begin("a"))
        store.writer.sync()


def test_short_writes_are_continued(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk) as store:
        disk.most = 7
        write(store, *lab.episode("a"))
    assert verify(tmp_path / "run").exit_code == 0


@pytest.mark.usefixtures("handed_over")
def test_the_event_loop_runs_on_while_the_disk_stalls_and_one_sync_serves_all(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk) as store:

        async def episode(k: int) -> None:
            for body in lab.episode(f"t{k}"):
                store.writer.append(body)
            await store.writer.durable()

        async def many() -> int:
            before = disk.syncs
            disk.gate.clear()
            tasks = [asyncio.create_task(episode(k)) for k in range(50)]
            for _ in range(100):  # the loop turns, though no sync returns
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            disk.gate.set()
            await asyncio.gather(*tasks)
            return disk.syncs - before

        # One sync may have begun before all had appended; everybody else shares the next.
        assert asyncio.run(many()) <= 2
        assert len(store.summaries(status="finished")) == 50


@pytest.mark.parametrize("brief", [60.0, 0.0], ids=["brief syncs", "slow syncs"])
def test_a_caller_that_waits_alone_syncs_in_its_own_thread_if_syncs_are_brief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: float
) -> None:
    monkeypatch.setattr(writer, "BRIEF", brief)
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk) as store:

        async def episodes() -> None:
            for k in range(10):
                write(store, *lab.episode(f"a{k}"))
                await store.writer.durable()

        disk.threads.clear()
        asyncio.run(episodes())
        # The writer's thread may sync what a caller that is slow to ask leaves for it.
        assert (threading.current_thread() in disk.threads) == bool(brief)
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.episodes) == (0, 10)


class Interrupted(FaultyDisk):
    """A disk on which Ctrl-C arrives when half of the lines are written, in the main thread."""

    armed = False

    def write(self, handle: int, data: bytes) -> int:
        if self.armed and threading.current_thread() is threading.main_thread():
            super().write(handle, bytes(data)[: len(data) // 2])
            raise KeyboardInterrupt
        return super().write(handle, data)


def test_a_task_that_is_interrupted_while_it_writes_poisons_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BRIEF", 60.0)
    disk = Interrupted()
    store = Store.create(tmp_path / "run", disk=disk)

    async def episodes() -> None:
        write(store, *lab.episode("a"))
        await store.writer.durable()
        disk.armed = True
        for k in range(1_000):  # the writer's thread may be faster with some of them
            write(store, *lab.episode(f"b{k}"))
            await store.writer.durable()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(episodes())
    disk.armed = False
    with pytest.raises(StoreFailed):
        write(store, *lab.episode("c"))
    with pytest.raises(StoreFailed):
        store.close()
    with Store.open(tmp_path / "run", write=True) as again:
        assert again.tape("a").closed
    assert verify(tmp_path / "run").broken == ()


def test_closing_waits_for_a_caller_that_syncs_in_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BRIEF", 60.0)
    disk = FaultyDisk()
    store = Store.create(tmp_path / "run", disk=disk)
    disk.gate.clear()
    write(store, *lab.episode("a"))
    caller = threading.Thread(target=lambda: asyncio.run(store.writer.durable()))
    closing = threading.Thread(target=store.close)
    disk.threads.clear()
    caller.start()
    while not disk.threads:
        time.sleep(0.001)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    disk.gate.set()
    caller.join()
    closing.join()
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.episodes, report.open) == (0, 1, 0)


@pytest.mark.usefixtures("handed_over")
def test_waiting_can_be_cancelled(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk) as store:

        async def give_up() -> None:
            disk.gate.clear()
            store.writer.append(lab.begin("a"))
            waiting = asyncio.create_task(store.writer.durable())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            disk.gate.set()
            await store.writer.durable()

        asyncio.run(give_up())
    assert verify(tmp_path / "run").exit_code == 0


@pytest.mark.usefixtures("handed_over")
def test_a_loop_that_is_gone_does_not_stop_the_writer(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk) as store:

        async def leave() -> None:
            disk.gate.clear()
            store.writer.append(lab.begin("a"))
            waiting = asyncio.ensure_future(store.writer.durable())
            await asyncio.sleep(0)
            waiting.cancel()

        asyncio.run(leave())
        disk.gate.set()
        store.writer.append(lab.end("a"))
        store.writer.sync()
        assert store.tape("a").closed


def test_with_durability_os_nothing_waits_for_a_sync(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Store.create(tmp_path / "run", disk=disk, durability="os", max_age=1e9, idle=1e9) as store:
        assert store.writer.durability is Durability.OS
        disk.gate.clear()
        write(store, *lab.episode("a"))
        asyncio.run(store.writer.durable())
        assert store.tape("a").closed
        assert store.writer.durable_lines == 1  # its `open`
        disk.gate.set()
    assert verify(tmp_path / "run").exit_code == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}\n", b'{"a":1}\n{"b":2}', b"{" + b" " * (64 << 20) + b"}"],
    ids=["empty", "list", "line break", "two", "too long"],
)
def test_what_is_no_body_never_reaches_the_disk(tmp_path: Path, body: bytes) -> None:
    with Store.create(tmp_path / "run") as store, pytest.raises(ValueError, match=re.escape(repr(body[:60]))):
        store.writer.append(body)
    assert verify(tmp_path / "run").exit_code == 0


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run")
    store.close()
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        store.writer.append(lab.begin("a"))


# Several threads and processes


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", rotate_bytes=20_000) as store:

        def work(name: str) -> None:
            for k in range(40):
                write(store, *lab.episode(f"{name}{k}"))
                if k % 10 == 0:
                    store.writer.sync()

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.episodes, report.open) == (0, 160, 0)
    assert len(report.segments) > 2


CHILD = """
import sys
from tapereel.tapes.store.store import Store
from tests.tapes.store.lab import Lab
lab, name = Lab(), sys.argv[2]
with Store.open(sys.argv[1], write=True, rotate_bytes=8_000) as store:
    print("ready", flush=True)
    for k in range(60):
        for body in lab.episode(f"{name}{k}"):
            store.writer.append(body)
        store.writer.sync()
    sys.stdin.readline()
"""


def child(run: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run), name],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )


def test_two_processes_write_while_a_third_reads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Store.create(run).close()
    children = [child(run, name) for name in ("x", "y")]
    seen: set[str] = set()
    with Store.open(run) as reader:
        while len(seen) < 120 and all(process.poll() is None for process in children):
            seen = {summary.id for summary in reader.summaries(closed=True)}
            assert reader.books().closes
        assert len(seen) == 120
        with Store.open(run, write=True) as third:  # the two are at work: nothing of theirs is touched
            assert third.recovered.crashed == []
            assert len(third.recovered.live) == 2
        for process in children:
            process.communicate("\n", timeout=60)
            assert process.returncode == 0
        assert len(list(reader.tapes(status="finished"))) == 120
    report = verify(run)
    assert (report.exit_code, report.episodes, report.open) == (0, 120, 0)


def forked(store: Store, tell: Any) -> None:
    try:
        store.writer.append(lab.begin("from the child"))
        tell.send("written")
    except StoreFailed as error:
        tell.send(str(error))


def asleep(hold: Any) -> None:
    hold.send("at work")
    hold.recv()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_can_neither_write_nor_keep_the_lock(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run")
    write(store, lab.begin("a"))
    store.writer.sync()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=forked, args=(store, there))
    process.start()
    assert f"process {os.getpid()}" in here.recv()
    process.join()
    hold, let_go = context.Pipe()
    sleeper = context.Process(target=asleep, args=(hold,))
    sleeper.start()
    assert let_go.recv() == "at work"  # a child closes what it inherited a moment after the fork
    store.abandon()
    with Store.open(tmp_path / "run", write=True) as again:  # though the child lives
        assert again.recovered.crashed == ["a"]
    let_go.send("go")
    sleeper.join()


def test_a_process_that_forgets_to_close_is_sealed_when_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tapereel.tapes.store.store import Store\nfrom tests.tapes.store.lab import Lab\n"
        "store = Store.create(sys.argv[1])\nfor body in Lab().episode('a'): store.writer.append(body)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, cwd=Path(__file__).parents[3])
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.episodes, report.open) == (0, 1, 0)
    assert report.segments[0].sealed


# Recovery on real files


def test_open_episodes_end_as_crashed_and_irreversible_actions_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = Store.create(run)
    write(store, lab.begin("pure"), lab.step("pure", "do it"))
    write(store, lab.begin("sent", effect="irreversible"), lab.step("sent", "send the letter"))
    write(store, lab.begin("seen", effect="irreversible"), lab.step("seen", "send"))
    write(store, lab.step("seen", "sent", action=False))
    write(store, *lab.episode("done", effect="irreversible"))
    store.writer.sync()
    store.abandon()
    with Store.open(run, write=True) as store:
        assert sorted(store.recovered.crashed) == ["pure", "seen", "sent"]
        assert [(d.tape, d.action) for d in store.recovered.dangling] == [("sent", "answer")]
        cause = store.tape("sent").cause
        assert cause is not None
        assert "'answer'" in (cause.message or "")
        assert store.tape("pure").status is Status.CRASHED
        assert store.tape("pure").cause is None
    with Store.open(run, write=True) as store:
        assert store.recovered.crashed == []
    assert verify(run).exit_code == 0


def test_a_torn_tail_is_set_aside_with_its_bytes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = Store.create(run)
    write(store, *lab.episode("a"))
    store.writer.sync()
    store.abandon()
    (path,) = (run / "tapes").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":7,"c":1,"p":"half a li')
    assert verify(run).exit_code == 2
    assert "line 7 " in verify(run).torn[0]
    with Store.open(run) as reader:
        assert reader.tape("a").closed  # readers stop at the tear
    with Store.open(run, write=True) as store:
        (torn,) = store.recovered.torn
        assert (run / "tapes" / torn.kept).read_bytes() == b'{"n":7,"c":1,"p":"half a li'
    assert path.read_bytes() == whole
    report = verify(run)
    assert (report.exit_code, report.set_aside) == (0, (torn.kept,))


def test_recovery_refuses_changed_bytes_and_changes_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store.create(run) as store:
        write(store, *lab.episode("a"))
    (path,) = (run / "tapes").glob("*.jsonl")
    data = bytearray(path.read_bytes())
    data[400] ^= 4
    path.write_bytes(bytes(data))
    (run / "tapes" / "index.sqlite").unlink()
    before = {p.name: p.read_bytes() for p in (run / "tapes").iterdir() if p.suffix == ".jsonl"}
    with pytest.raises(Corrupt, match=f"{path.stem}.*corrupt"):
        Store.open(run, write=True)
    assert {p.name: p.read_bytes() for p in (run / "tapes").iterdir() if p.suffix == ".jsonl"} == before


def test_a_clock_that_goes_backwards_changes_no_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    times = iter(range(1_000_000, 0, -1_000))
    for k in range(4):
        start = Store.create if k == 0 else functools.partial(Store.open, write=True)
        with start(run, clock=lambda: next(times)) as store:
            write(store, lab.begin(f"t{k}", at=float(next(times))))
            if k % 2:
                write(store, lab.end(f"t{k}"))
    with Store.open(run, write=True, clock=lambda: next(times)) as store:
        assert [summary.id for summary in store.summaries()] == ["t0", "t1", "t2", "t3"]
        crashed = list(store.tapes(status="crashed"))
        assert [tape.id for tape in crashed] == ["t0", "t2"]
        assert all(tape.end is not None and tape.end.seconds >= 0 for tape in crashed)
        assert store.books().closes
    assert verify(run).exit_code == 0


def test_segments_are_read_in_the_order_of_their_numbers_not_of_their_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for k in range(12):
        with Store.open(run, write=True) if k else Store.create(run) as store:
            write(store, *lab.episode(f"t{k:02d}"))
    for path in (run / "tapes").glob("*.jsonl"):
        os.utime(path, (0, hash(path.name) % 10_000))
    with Store.open(run) as store:
        assert [stored.tape for stored in store.records() if stored.t == "begin"] == [f"t{k:02d}" for k in range(12)]
