"""The writer keeps the journal of one process as a chain of segments. It holds the lock of its newest segment.

`append` builds the line and queues it without touching the disk. A thread of the writer does the writing:

* It writes the queued lines, and syncs when a caller waits. One sync serves all waiting callers (group commit).
* When it becomes idle, it writes a `commit` line that states the frontier, which is the number of durable lines.
* When a segment is full, it seals the segment and continues in a new one.

If a task on an event loop waits alone, it writes and syncs in its own thread, because handing over to the writer's
thread and back takes longer than a brief sync.

A line is acknowledged only after the sync that covers it. Each line states a frontier (`c`). The frontier counts only
lines that were synced before this line was built, so a reader can rely on it. If bytes below the frontier changed, the
segment is corrupt. Torn bytes above the frontier come from an ordinary crash.

The first write or sync that fails poisons the writer. Acknowledged lines are safe, nothing is retried, and every later
call raises StoreFailed. A successful retry of a sync proves nothing (see `disk`): Linux marks the failed pages clean,
so the next fsync may succeed although the bytes are lost.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypedDict

from ..errors import StoreFailed
from ..journal import MAX_BODY, Durability
from ..records import SCHEMA, Commit, Open, Seal
from .disk import REAL, Disk, write_all
from .media import Media
from .segment import ZERO, encode_line, next_name, segment_names

Done = Callable[[StoreFailed | None], None]

CLOSED = "closed"
"""The `reason` in the seal that a store writes when it is closed. The hash of this seal is in `pins.json`."""
NAMED_EVERY = 256
"""A writer that is never idle writes a `commit` line after this number of lines. The line states the hash of the
segment's first line. If other lines are damaged, this hash shows `reader` that the lines around the `commit` belong to
this file."""
BRIEF = 0.001
"""A task syncs in its own thread only if the previous sync took at most this number of seconds, because its event loop
can't run other tasks meanwhile."""


def new_segment(disk: Disk, folder: Path) -> tuple[str, int]:
    """Create and lock the file of the next segment. Return the segment's name and the file's handle.

    The caller must hold the folder's lock. Otherwise, another process that recovers the run could find the new file
    before it is locked, and take it over as the segment of a dead process.
    """
    name = next_name(segment_names(disk.names(folder)), disk.nonce())
    path = folder / f"{name}.jsonl"
    handle = disk.create(path)
    if not disk.lock(handle):
        raise StoreFailed(
            f"another process locked {path}, which this one just created; write to a run only through its Store"
        )
    # The file's name must be durable before a line is acknowledged. Otherwise, a power cut could lose synced lines.
    disk.sync_dir(folder)
    return name, handle


class FolderLock:
    """The lock that a process holds while it creates or recovers segments. Only one process can hold it at a time."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk, self._path = disk, folder / "lock"

    def __enter__(self) -> None:
        self._handle = self._disk.edit(self._path)
        self._disk.lock(self._handle, wait=True)

    def __exit__(self, *exc: object) -> None:
        self._disk.close(self._handle)


def is_live(folder: Path, name: str, disk: Disk) -> bool | None:
    """Return whether a writer holds the segment's lock, or None if the lock can't be tested.

    The test takes the segment's lock for a moment. It also holds the folder's lock, because a process that starts a
    writer at that moment could otherwise mistake the test for a live writer.
    """
    try:
        with FolderLock(disk, folder):
            handle = disk.edit(folder / f"{name}.jsonl", new=False)
            try:
                return not disk.lock(handle)
            finally:
                disk.close(handle)
    except OSError:
        return None  # a read-only copy, for example


class WriterOptions(TypedDict, total=False):
    """The options of a writer, which `SegmentWriter` explains."""

    durability: Durability | Literal["step", "tape", "os"]
    rotate_bytes: int
    idle: float
    max_age: float
    thread: bool
    clock: Callable[[], float]


class SegmentWriter:
    """Implements `Journal`. It is thread-safe, and can't be reopened after `close`. A process has one writer per run
    (`Store.writer`)."""

    def __init__(
        self,
        folder: Path,
        segment: tuple[str, int],
        *,
        pins: dict[str, str] | None = None,
        disk: Disk = REAL,
        durability: Durability | Literal["step", "tape", "os"] = Durability.TAPE,
        rotate_bytes: int = 256 * 1024 * 1024,
        idle: float = 0.25,
        max_age: float = 1.0,
        thread: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take over a segment that `new_segment` created, and make its first line durable.

        After `idle` seconds without a new record, a `commit` line is written. A record that no caller waits for is
        synced after at most `max_age` seconds. If `thread` is false, only `commit`, `sync` and `close` write.
        """
        self.folder, self.disk, self.durability = folder, disk, Durability(durability)
        name, self._handle = segment
        self._rotate_bytes, self._idle, self._max_age = rotate_bytes, idle, max_age
        self._clock, self._pid = clock, os.getpid()
        self.media = Media(folder / "media", disk=disk)
        self.guard: Callable[[], object] = lambda: None
        """A function that is called before lines are written. If it raises an error, the writer is poisoned. If the
        process holds a lease, this is `Lease.check`."""
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._sleeping = False
        self._writing = threading.Lock()
        """Held by the thread that writes."""
        self._callers = 0
        """Number of calls of `durable` that haven't begun to wait."""
        self._sync_seconds = 0.0
        """Duration of the most recent sync."""
        self.failure: BaseException | None = None
        """The error that poisoned this writer, or None while it works."""
        self._closing = False
        self._pending: list[bytes] = []
        self._waiting: list[tuple[int, Done]] = []
        # Numbers of lines in all segments of this writer. Invariant: appended >= written >= durable. Written lines
        # survive the death of this process, and durable lines also survive a power cut. Only the holder of `_writing`
        # increases the last two numbers.
        self._appended = self._written = self._durable = 0
        self._unnamed = 0
        self._size = 0
        pinned = dict(pins or {})
        self._start(name, pinned, next(reversed(pinned.values())).encode() if pinned else ZERO)
        self.commit()  # without a durable `open`, nothing would be pinned and recovery would find an empty file
        self._raise_failure()
        self._thread = threading.Thread(target=self._run, name=f"tapereel-{name}", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()
            atexit.register(self._at_exit)

    # Appending

    def append(self, body: bytes) -> None:
        """Queue one record body (compact JSON) without waiting for the disk. Raises StoreFailed if the writer is
        poisoned or closed."""
        if len(body) > MAX_BODY or b"\n" in body or body[:1] != b"{" or body[-1:] != b"}":
            raise ValueError(
                f"not a record body: {body[:60]!r}… ({len(body)} bytes); a body is one JSON object "
                f"without line breaks, at most {MAX_BODY} bytes (larger things are media)"
            )
        with self._lock:
            self._check()
            self._line(body)
            if self._sleeping:
                self._sleeping = False
                self._wake.notify()

    def _line(self, body: bytes) -> None:
        n = self._appended - self._base
        line, self._head = encode_line(n, self.durable_lines, self._head, body)
        self._pending.append(line)
        self._appended += 1
        self._stated = False
        self._unnamed += 1

    def _start(self, name: str, pins: dict[str, str], head: bytes) -> None:
        """Queue the first line of segment `name` after the lines that are already queued."""
        self.segment = name
        self._head = head
        self._base = self._appended
        versions = {"schema": SCHEMA}
        self._line(Open(segment=name, pid=self._pid, at=self._clock(), pins=pins, versions=versions).body())
        self._first = self._head.decode()

    @property
    def head(self) -> str:
        """Hash (hex) of the last line appended. As a pin, it covers all lines so far."""
        return self._head.decode()

    @property
    def durable_lines(self) -> int:
        """The number of lines in the current segment that would survive a power cut."""
        # The difference is negative while lines in the previous segment are unsynced. Then no line here is durable yet.
        return max(self._durable - self._base, 0)

    def _error(self) -> StoreFailed:
        """Return a new exception for each caller, since an exception that is raised twice collects both tracebacks."""
        cause = self.failure
        assert cause is not None
        if isinstance(cause, StoreFailed):  # a lost lease, which repairing the disk doesn't bring back
            return type(cause)(*cause.args)
        message = (
            f"writing to {self.folder / self.segment}.jsonl failed ({str(cause) or type(cause).__name__}): "
            "acknowledged records are safe, but this process writes nothing more. Repair the disk, then open the "
            "run again, which recovers it"
        )
        number = getattr(cause, "errno", None)
        error = StoreFailed(number, message) if number else StoreFailed(message)
        error.__cause__ = cause
        return error

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self._error()

    def _check(self) -> None:
        self._raise_failure()
        if self._pid != os.getpid():
            raise StoreFailed(
                f"the writer of {self.folder} belongs to process {self._pid}; a forked process must open "
                "the store itself"
            )
        if self._closing:
            raise StoreFailed(f"the writer of {self.folder} is closed; open the store again to write more")

    # Waiting

    async def durable(self) -> None:
        """Wait until every line appended so far would survive a power cut or, with durability `os`, the death of the
        process."""
        if self._free():
            with self._lock:
                self._callers += 1
            try:
                await asyncio.sleep(0)  # so that one sync serves all callers that are ready now
                if self._callers == 1 and self._commit_alone():
                    return
            finally:
                with self._lock:
                    self._callers -= 1
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: StoreFailed | None) -> None:
            try:
                loop.call_soon_threadsafe(_resolve, future, error)
            except RuntimeError:
                if not loop.is_closed():  # a closed loop has no waiting task left
                    raise

        if self.when_durable(done):
            await future

    def sync(self) -> None:
        """Wait like `durable`, but block the thread. This is for code outside an event loop."""
        future: Future[None] = Future()
        if self.when_durable(lambda error: _resolve(future, error)):
            if self._thread is None:
                self.commit()
            future.result()

    def when_durable(self, done: Done) -> bool:
        """Call `done(None)` in the writer's thread as soon as `durable` would return, or `done(error)` on failure.

        If there is nothing to wait for, return False and never call `done`. Otherwise, return True.
        """
        with self._lock:
            self._check()
            reached = self._written if self.durability is Durability.OS else self._durable
            if reached >= self._appended:
                return False
            self._waiting.append((self._appended, done))
            self._sleeping = False
            self._wake.notify()
        return True

    def _free(self) -> bool:
        """Return whether a caller may write in its own thread: no other caller waits, no thread writes, and a sync is
        all there is to do, and brief."""
        slow = self._sync_seconds > BRIEF or self._size >= self._rotate_bytes
        return not (slow or self._waiting or self._writing.locked() or self.durability is Durability.OS)

    def _commit_alone(self) -> bool:
        """Write and sync in the caller's thread. Return False if the caller must wait for the writer's thread."""
        with self._lock:
            self._check()
            if not self._free() or not self._writing.acquire(blocking=False):
                return False
        try:
            if self._durable < self._appended:
                self._commit(sync=True)
        finally:
            self._writing.release()
        self._raise_failure()
        return True

    # Writing. Only the holder of `_writing` writes, so lines reach the file in the order in which their hashes chain
    # them.

    def _run(self) -> None:
        """Commit while there is work, state the frontier when idle, then sleep until `append` wakes this thread.

        `append` notifies this thread only if `_sleeping` is true, which saves most notifications. `_sleeping` is set
        and read under the lock. Without the lock, an append between the thread's check and its wait would not wake the
        thread.
        """
        unsynced_since: float | None = None
        while True:
            with self._lock:
                waiting = bool(self._waiting)
                if not waiting and not self._closing:
                    self._sleeping = not self._pending
                    self._wake.wait(self._idle if self._sleeping else min(self._idle, 0.005))
                    self._sleeping = False
                waiting, closing = bool(self._waiting), self._closing
                idle = not self._pending and not waiting
                old = unsynced_since is not None and time.monotonic() - unsynced_since > self._max_age
            if closing or self.failure is not None:
                return
            sync = (waiting and self.durability is not Durability.OS) or old or (idle and self._durable < self._written)
            if sync or not idle:
                self.commit(sync=sync)
                unsynced_since = None if sync else unsynced_since or time.monotonic()
            elif not self._stated:
                self._state()
            else:
                with self._lock:
                    if not self._pending and not self._waiting and not self._closing:
                        self._sleeping = True
                        self._wake.wait()

    def commit(self, *, sync: bool = True) -> None:
        """Write the queued lines, sync them if `sync` is true, then acknowledge them.

        The store guarantees the order write, sync, acknowledge. The number of lines to acknowledge (`upto`) is read
        together with the batch. The sync doesn't cover lines that are appended while it runs, so these must not count
        as durable.
        """
        with self._writing:
            self._commit(sync=sync)

    def _commit(self, *, sync: bool) -> None:
        try:
            if self._size >= self._rotate_bytes:
                self._rotate()
            with self._lock:
                batch, self._pending = self._pending, []
                upto = self._appended
            self._put(batch)
            if sync:
                self._sync()
        except BaseException as error:  # any error must reach the waiting callers, who would otherwise block forever
            self._poison(error)
            if not isinstance(error, Exception):  # a second Ctrl-C while a task writes, perhaps between two lines
                raise
            return
        with self._lock:
            self._written = upto
            if sync:
                self._durable = upto
                if self._unnamed >= NAMED_EVERY:
                    self._commit_line()
            reached = upto if sync or self.durability is Durability.OS else self._durable
            served = [done for target, done in self._waiting if target <= reached]
            self._waiting = [entry for entry in self._waiting if entry[0] > reached]
        for done in served:
            done(None)

    def _sync(self) -> None:
        began = time.perf_counter()
        self.disk.sync(self._handle)
        self._sync_seconds = time.perf_counter() - began

    def _put(self, batch: list[bytes]) -> None:
        if batch:
            # If locks have no effect, a later lead may have recovered this segment. Then no line may be added to it.
            self.guard()
            data = b"".join(batch)
            write_all(self.disk, self._handle, data)
            self._size += len(data)

    def _state(self) -> None:
        """Write a `commit` line, which states that every earlier line is durable. The `commit` line itself need not be
        durable, because it acknowledges nothing."""
        with self._lock:
            if self._pending or self._durable < self._appended:
                return
            self._commit_line()
            self._stated = True
        self.commit(sync=False)

    def _commit_line(self) -> None:
        self._line(Commit(opened=self._first).body())
        self._unnamed = 0

    def _rotate(self) -> None:
        """Seal the full segment and continue in a new one.

        The order of these steps makes every crash recoverable:

        1. The new file exists, locked and with a durable name, before the seal names it as `next`. A crash here leaves
           an empty segment and an unsealed old one. Recovery handles both.
        2. The old lines are synced before the seal is written, because a seal states that they are durable.
        3. The seal is synced before the old lock is released and before the new segment gets its first line, whose
           `open` pins the seal's hash. If a power cut then lost the seal, the unmet pin would look like tampering.
        """
        self.guard()  # otherwise, a lead that lost its lease would leave an empty segment behind
        with FolderLock(self.disk, self.folder):
            name, handle = new_segment(self.disk, self.folder)
        with self._lock:
            batch, self._pending = self._pending, []
            seal = self._seal("full", name)
            old, pins = self._handle, {self.segment: self.head}
            self._start(name, pins, self._head)
            upto = self._base  # all lines in the old segment, including its seal
        self._put(batch)
        self.disk.sync(old)
        write_all(self.disk, old, seal)
        self.disk.sync(old)
        with self._lock:
            self._written = self._durable = upto
            self._handle, self._size = handle, 0
        self.disk.close(old)

    def _seal(self, reason: str, following: str | None) -> bytes:
        """Return the seal's line, which states that all lines before it are durable. The caller must sync these lines
        first."""
        n = self._appended - self._base
        body = Seal(opened=self._first, reason=reason, next=following).body()
        line, self._head = encode_line(n, n, self._head, body)
        self._appended += 1
        return line

    def _poison(self, error: BaseException) -> None:
        """Stop for good, and fail every waiting caller. `failure` is set first, so that no later caller starts to
        wait."""
        with self._lock:
            self.failure = error
            waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            done(self._error())

    # Ending

    def close(self, reason: str = CLOSED, *, sealed: Callable[[], object] = lambda: None) -> None:
        """Write the queued lines, seal the segment and release its lock. Blocks, and raises StoreFailed if any step
        fails.

        `sealed` is called once, after the seal is written and before the lock is released. So if a reader finds a
        sealed segment without a lock, either `sealed` was called or the process died.
        """
        if not self._stop():
            return
        while self.failure is None and (self._pending or self._durable < self._appended):
            self.commit()  # this may itself append a `commit` line, hence the loop
        if self.failure is None:
            self._finish(reason)
        try:
            if self.failure is None:
                sealed()
        finally:
            self.disk.close(self._handle)
            self._raise_failure()

    def _finish(self, reason: str) -> None:
        try:
            self._put([self._seal(reason, None)])
            self.disk.sync(self._handle)
        except Exception as error:
            self._poison(error)

    def abandon(self) -> None:
        """Release the lock and write nothing more. The segment is left as a dead process would leave it."""
        if self._stop():
            self.disk.close(self._handle)

    def _stop(self) -> bool:
        """End the writer's thread. Return False if the writer has already ended, or if this is its copy in a forked
        child."""
        with self._lock:
            if self._closing or self._pid != os.getpid():
                return False
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        with self._writing:
            pass  # a caller that writes in its own thread has finished
        atexit.unregister(self._at_exit)
        return True

    def _at_exit(self) -> None:
        if self.failure is None:
            self.close("exit")


def _resolve(future: Future[None] | asyncio.Future[None], error: StoreFailed | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
