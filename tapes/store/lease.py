"""One lead per run: a lease with a number, its epoch, that a process takes before it reads what the run has done.

`leads/EPOCH.json` in the run directory names the lead of each epoch: host, process, start. Creating the file claims the
epoch; a file system creates a name for one process only. The lead holds the file's `flock` and writes its last sign of
life into it. A later epoch ends the earlier ones: before a lead writes, it asks whether the next epoch was claimed.

A lead counts as dead when its `flock` is free. That proves nothing where `flock` has no effect (some cluster file
systems) or holds on one machine only. There, and for a lead on another machine, a new lead waits for a sign of life.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from ..common.text import logger
from ..errors import StoreFailed, UsageError
from ..value import Value
from .disk import REAL, Disk, read_file, write_all

log = logger("lease")

FOLDER = "leads"
BEAT = 5.0
"""Seconds between two signs of life."""
GRACE = 3
"""Beats without a sign of life after which a lead counts as dead where `flock` says nothing."""


class RunHeld(UsageError):
    """Another process leads the run. Exits with code 64."""


class LeaseLost(StoreFailed):
    """A later lead took the run over, so this process must write nothing more."""


class Holder(Value):
    """Who leads, or led, a run."""

    epoch: int
    host: str
    pid: int
    began: float
    """Seconds since 1970, as `seen`."""
    seen: float
    """The last sign of life."""
    ended: bool = False
    """True when the lead gave the run up itself."""

    def __str__(self) -> str:
        began, seen = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" for at in (self.began, self.seen))
        return f"process {self.pid} on {self.host} (started {began}, last sign of life {seen})"


def read_leads(run: Path) -> dict[int, Holder]:
    """Every lead of the run so far, by epoch. Empty for runs without leases. A file cut short by a crash counts as a
    lead without a sign of life."""
    found: dict[int, Holder] = {}
    if not (run / FOLDER).is_dir():
        return found
    for name in os.listdir(run / FOLDER):
        if match := re.fullmatch(r"(\d{6,})\.json", name):
            found[int(match[1])] = _read(run / FOLDER / name, int(match[1]))
    return dict(sorted(found.items()))


def _read(path: Path, epoch: int) -> Holder:
    for _ in range(3):
        try:
            return Holder.model_validate_json(read_file(path))
        except ValueError:
            time.sleep(0.01)  # the lead is just writing it
    return Holder(epoch=epoch, host="an unknown host", pid=0, began=0.0, seen=0.0)


class Lease:
    """The right to write what a run does next. Use it as a context manager; it beats in a thread of its own."""

    def __init__(self, run: str | Path, *, take_over: bool = False, beat: float = BEAT, disk: Disk = REAL) -> None:
        """Claim the next epoch of the run. RunHeld where another lead is alive, unless `take_over` ends its epoch."""
        run = Path(run)
        self._folder, self._beat, self._disk = run / FOLDER, beat, disk
        disk.make_folder(self._folder)
        self.locks = _flock_works(self._folder, disk)
        """Whether `flock` has an effect on this file system. Where not, only signs of life tell who is alive."""
        # The epoch after the one that was found to be over, never after one that was claimed since.
        newest = max(read_leads(run), default=0) if take_over else check_free(run, beat=beat, disk=disk)
        now = time.time()
        self.holder = Holder(epoch=newest + 1, host=socket.gethostname(), pid=os.getpid(), began=now, seen=now)
        path = self._path(self.epoch)
        try:
            self._handle = disk.create(path)
        except FileExistsError:
            raise RunHeld(
                f"{run} was taken by another process at the same moment: {read_leads(Path(run))[newest + 1]}"
            ) from None
        # Locked before it has content: a process that finds it empty waits for a sign of life, and one that finds it
        # free and filled takes its lead for dead. Another process may hold the lock for a moment, to test it.
        disk.lock(self._handle, wait=True)
        self._write()
        disk.sync_dir(self._folder)
        if not self.locks:
            log.warning("file locks have no effect in %s: signs of life every %g s keep a second lead out", run, beat)
        self._failure: OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tapereel-lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of this lease: 1 for the first lead of a run."""
        return self.holder.epoch

    def check(self) -> None:
        """LeaseLost where a later epoch was claimed. Called before lines are written to the segment.

        StoreFailed where the sign of life can't be written: another process would take this one for dead.
        """
        if self._failure is not None:
            raise StoreFailed(f"{self._path(self.epoch)} can't be written: {self._failure}") from self._failure
        if not self._path(self.epoch + 1).exists():
            return
        later = list(read_leads(self._folder.parent).values())[-1]
        raise LeaseLost(
            f"{self._folder.parent} was taken over by {later}, as lead {later.epoch}. This process was lead "
            f"{self.epoch} and writes nothing more; its records so far stay"
        )

    def close(self) -> None:
        """Give the lease up, and say so in its file."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.holder = self.holder.model_copy(update={"ended": True, "seen": time.time()})
            try:
                self._write()
            except OSError as error:
                # As after a crash: the free lock tells the next lead. No warning: the store reports the same disk.
                log.info("%s doesn't say that the lead ended: %s", self._path(self.epoch), error)
            finally:
                self._disk.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch:06d}.json"

    def _write(self) -> None:
        """Overwrite the file in place: a replaced file would lose the lock. A reader may find it empty for a moment."""
        text = self.holder.model_dump_json().encode()
        self._disk.truncate(self._handle, 0)
        write_all(self._disk, self._handle, text)
        self._disk.sync(self._handle)

    def _run(self) -> None:
        while not self._stop.wait(self._beat):
            self.holder = self.holder.model_copy(update={"seen": time.time()})
            try:
                self._write()
            except OSError as error:
                self._failure = error
                return


def check_free(run: str | Path, *, beat: float = BEAT, disk: Disk = REAL) -> int:
    """The last epoch, which is over; 0 where the run had no lead. Takes nothing.

    RunHeld where a living process leads the run. It may take a few beats to tell.
    """
    run = Path(run)
    leads = read_leads(run)
    newest = max(leads, default=0)
    if newest and not leads[newest].ended and _alive(run / FOLDER, leads[newest], beat, disk):
        raise RunHeld(
            f"{run} is led by {read_leads(run)[newest]}. Two leads would train on the same tapes twice: wait for it to "
            "end or stop it, or end its lease with --take-over"
        )
    return newest


def end_lease(run: str | Path) -> None:
    """End the lease of the process that leads the run: it stops before its next record. For `--take-over`."""
    if read_leads(Path(run)):
        Lease(run, take_over=True).close()


def _alive(folder: Path, holder: Holder, beat: float, disk: Disk) -> bool:
    path = folder / f"{holder.epoch:06d}.json"
    if not _lockable(path, disk):
        return True
    if holder.host == socket.gethostname() and _flock_works(folder, disk):
        return False
    # No clock of another machine is compared: the file must change while this process looks at it. A lead that had just
    # created its file, and was not yet named in it, shows by its lock.
    before, stop = read_file(path), time.monotonic() + GRACE * beat
    while time.monotonic() < stop:
        time.sleep(beat / 10)
        if read_file(path) != before or not _lockable(path, disk):
            return True
    return False


def _lockable(path: Path, disk: Disk) -> bool:
    """Whether a new handle can lock the file: then no other process holds it, or `flock` has no effect here."""
    handle = disk.edit(path)
    try:
        return disk.lock(handle)
    finally:
        disk.close(handle)


def _flock_works(folder: Path, disk: Disk) -> bool:
    """Two handles of one file: the second lock must fail."""
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    handle = disk.edit(path)
    try:
        return disk.lock(handle) and not _lockable(path, disk)
    finally:
        disk.close(handle)
        disk.remove(path)


__all__ = ["Holder", "Lease", "LeaseLost", "RunHeld", "check_free", "end_lease", "read_leads"]
