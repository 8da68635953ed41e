"""The writer: one process's journal, a chain of segments of which it holds the last one's lock.

`append` builds the line and queues it, without touching the disk; a thread writes what is queued, syncs when somebody
waits for it (one sync serves all who wait), states the frontier when it falls idle, and goes on in a new segment when
one is full. The first write or sync that fails poisons the writer: whatever was acknowledged before is safe, nothing is
tried again, and everything after raises StoreFailed. It knows nothing of episodes, nor of what other writers do.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from ..errors import StoreFailed
from ..journal import Durability
from ..records import SCHEMA, Commit, Open, Seal
from .disk import REAL, Disk, write_all
from .segment import MAX_LINE, ZERO, encode_line, next_name, segment_names

Done = Callable[[StoreFailed | None], None]

NAMED_EVERY = 256
"""Lines. A busy writer, too, states the frontier this often: a `commit` names its segment, and so ties the lines
around it to their file when a stretch of it is damaged."""


def new_segment(disk: Disk, folder: Path) -> tuple[str, int]:
    """Create the next segment's file; gives its name and the locked handle.

    The folder's lock must be held: between creating a file and locking it, recovery would take it for a dead one.
    """
    name = next_name(segment_names(disk.names(folder)), disk.nonce())
    path = folder / f"{name}.jsonl"
    handle = disk.create(path)
    if not disk.lock(handle):
        raise StoreFailed(
            f"another process locked {path}, which this one just created; write to a run only through its Store"
        )
    disk.sync_dir(folder)
    return name, handle


class FolderLock:
    """The lock under which segments are created and recovered: one process at a time, and only while it does that."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk, self._path = disk, folder / "lock"

    def __enter__(self) -> None:
        self._handle = self._disk.edit(self._path)
        self._disk.lock(self._handle, wait=True)

    def __exit__(self, *exc: object) -> None:
        self._disk.close(self._handle)


class SegmentWriter:
    """Implements `Journal`. Thread-safe; single use; one per process and run (`Store.writer`)."""

    def __init__(
        self,
        folder: Path,
        name: str,
        handle: int,
        *,
        pins: dict[str, str] | None = None,
        disk: Disk = REAL,
        durability: Durability = Durability.TAPE,
        rotate_bytes: int = 256 * 1024 * 1024,
        idle: float = 0.25,
        max_age: float = 1.0,
        thread: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take over the locked, empty file of segment `name` and make its first line durable.

        `idle`: seconds without a record after which the frontier is stated. `max_age`: seconds that a record may stay
        unsynced when nobody waits for it. Without `thread`, nothing is written but in `commit`, `sync` and `close`.
        """
        self.folder, self.disk, self.durability = folder, disk, durability
        self._handle, self._rotate_bytes, self._idle, self._max_age = handle, rotate_bytes, idle, max_age
        self._clock, self._pid = clock, os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._sleeping = False
        self._failure: Exception | None = None
        self._closing = self._closed = False
        self._pending: list[bytes] = []
        self._waiting: list[tuple[int, Done]] = []
        # Counted over all segments of this writer, in lines: appended >= written >= durable.
        self._appended = self._written = self._durable = 0
        self._unnamed = 0
        self._size = 0
        pinned = dict(pins or {})
        self._start(name, pinned, next(reversed(pinned.values())).encode() if pinned else ZERO)
        self.commit()
        self._raise_failure()
        self._thread = threading.Thread(target=self._run, name=f"tapereel-{name}", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()
            atexit.register(self._at_exit)
        _watch_forks()
        _writers.add(self)

    # Appending

    def append(self, body: bytes) -> None:
        """Queue one record body (compact JSON). Never waits for the disk; StoreFailed once poisoned or closed."""
        if len(body) > MAX_LINE - 1024 or b"\n" in body or body[:1] != b"{" or body[-1:] != b"}":
            raise ValueError(
                f"not a record body: {body[:60]!r}… ({len(body)} bytes); a body is one JSON object "
                f"without line breaks, at most {MAX_LINE - 1024} bytes (larger things are media)"
            )
        with self._lock:
            self._check()
            self._line(body)
            if self._sleeping:
                self._sleeping = False
                self._wake.notify()

    def _line(self, body: bytes) -> None:
        n = self._appended - self._base
        line, self._head = encode_line(n, max(self._durable - self._base, 0), self._head, body)
        self._pending.append(line)
        self._appended += 1
        self._stated = False
        self._unnamed += 1

    def _start(self, name: str, pins: dict[str, str], head: bytes) -> None:
        """Begin the lines of segment `name`; they are written after those that are queued."""
        self.segment = name
        self._head = head
        self._base = self._appended
        versions = {"schema": SCHEMA}
        self._line(Open(segment=name, pid=self._pid, at=self._clock(), pins=pins, versions=versions).body())
        self._first = self._head.decode()

    @property
    def head(self) -> str:
        """Hash (hex) of the last line appended: the pin of everything before it."""
        return self._head.decode()

    @property
    def durable_lines(self) -> int:
        """How many lines of the present segment would survive a power cut."""
        return max(self._durable - self._base, 0)

    @property
    def failure(self) -> Exception | None:
        """What poisoned this writer; None while it is well."""
        return self._failure

    def _error(self) -> StoreFailed:
        """A new error for each who asks, so that tracebacks don't grow into each other."""
        cause = self._failure
        assert cause is not None
        message = (
            f"writing to {self.folder / self.segment}.jsonl failed ({cause}): what was acknowledged is safe, "
            "but this process writes nothing more. Mend the disk, then open the run again: it recovers itself"
        )
        number = getattr(cause, "errno", None)
        error = StoreFailed(number, message) if number else StoreFailed(message)
        error.__cause__ = cause
        return error

    def _raise_failure(self) -> None:
        if self._failure is not None:
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
        """Return when all that was appended so far would survive a power cut (with durability `os`: the process)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: StoreFailed | None) -> None:
            try:
                loop.call_soon_threadsafe(_resolve, future, error)
            except RuntimeError:
                if not loop.is_closed():  # in a loop that is gone nobody waits
                    raise

        if self.when_durable(done):
            await future

    def sync(self) -> None:
        """`durable` for code outside an event loop: blocks."""
        future: Future[None] = Future()
        if self.when_durable(lambda error: _resolve(future, error)):
            if self._thread is None:
                self.commit()
            future.result()

    def when_durable(self, done: Done) -> bool:
        """Have `done` called, in the writer's thread, once what is appended now is durable or can't be any more.

        False when it is durable already; then `done` is not called.
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

    # Writing: all of it in one thread

    def _run(self) -> None:
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
            if closing or self._failure is not None:
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
        """Write what is queued, sync if asked to, then tell those who waited for it. The thread's business, if any."""
        try:
            if self._size >= self._rotate_bytes:
                self._rotate()
            with self._lock:
                batch, self._pending = self._pending, []
                upto = self._appended
            self._put(batch)
            if sync:
                self.disk.sync(self._handle)
        except Exception as error:  # whatever it is, those who wait must hear of it
            self._poison(error)
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

    def _put(self, batch: list[bytes]) -> None:
        if batch:
            data = b"".join(batch)
            write_all(self.disk, self._handle, data)
            self._size += len(data)

    def _state(self) -> None:
        """All is durable and nothing comes: say so in a line, which itself need not be durable."""
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
        """Seal the full segment and go on in a new one, which exists and is locked before the seal names it."""
        with FolderLock(self.disk, self.folder):
            name, handle = new_segment(self.disk, self.folder)
        with self._lock:
            batch, self._pending = self._pending, []
            seal = self._seal("full", name)
            old, pins = self._handle, {self.segment: self.head}
            self._start(name, pins, self._head)
            upto = self._base
        self._put(batch)
        self.disk.sync(old)
        write_all(self.disk, old, seal)
        self.disk.sync(old)
        with self._lock:
            self._written = self._durable = upto
            self._handle, self._size = handle, 0
        self.disk.close(old)

    def _seal(self, reason: str, following: str | None) -> bytes:
        """The seal's line. It says that all lines before it are durable, so they must be when it is written."""
        n = self._appended - self._base
        body = Seal(opened=self._first, reason=reason, next=following).body()
        line, self._head = encode_line(n, n, self._head, body)
        self._appended += 1
        return line

    def _poison(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
            waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            done(self._error())

    # Ending

    def close(self, reason: str = "closed") -> None:
        """Write what is queued, seal the segment and give up its lock. Blocks. StoreFailed if any of it fails."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closing = self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self._at_exit)
        while self._failure is None and (self._pending or self._durable < self._appended):
            self.commit()  # which may itself add a line, that states the frontier
        if self._failure is None:
            self._finish(reason)
        try:
            self.disk.close(self._handle)
        finally:
            self._raise_failure()

    def _finish(self, reason: str) -> None:
        try:
            self._put([self._seal(reason, None)])
            self.disk.sync(self._handle)
        except Exception as error:
            self._poison(error)

    def abandon(self) -> None:
        """Give up the lock and write nothing more, as a process that died would leave it."""
        with self._lock:
            if self._closed:
                return
            self._closing = self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self._at_exit)
        self.disk.close(self._handle)

    def _at_exit(self) -> None:
        if self._failure is None:
            self.close("exit")

    def _forked(self) -> None:
        """In a forked child: this writer is the parent's."""
        if not self._closed:
            self._closed = self._closing = True
            self.disk.close(self._handle)


_writers: weakref.WeakSet[SegmentWriter] = weakref.WeakSet()
"""Of this process. A fork copies their handles, and a copied handle keeps the lock when the parent is long dead."""


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for writer in list(_writers):
        writer._forked()
    _writers.clear()


def _resolve(future: Future[None] | asyncio.Future[None], error: StoreFailed | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
