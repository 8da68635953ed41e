"""Leases ensure that a run has only one lead at a time. The lead is the process that writes updates, weights and
results. A process takes a lease before it reads any records. The leases of a run are numbered, and this number is
called the epoch.

The invariant is: **a lead's write counts only if no process held a higher epoch when the write was made.**

* *Claim.* The new epoch is above every epoch in `leads/` and in the `lead` records. If several processes claim it at
  once, creating `leads/EPOCH.json` decides between them, since a file system creates the name for only one of them. The
  winner renames its file to `leads/EPOCH-NONCE.json`. A process that finds a renamed file with its epoch has lost.
* *Record.* `Store.take_lead` refuses an epoch that isn't above every recorded one, and makes the `lead` record durable.
  So an epoch has one lead even if `leads/` was removed between two claims.
* *Check.* Before a batch of lines is written, a listing of `leads/` must show this lease's file and no higher epoch.
  Before an update, weights, metrics, results or digests are written, there must also be no other `lead` record with
  this epoch or a higher one.
* *Fence.* A lead may be paused between its check and its write while a successor takes over. The records
  that the old lead then writes carry its epoch, so readers leave them out. The files that it writes have no effect. A
  lead creates a `.part` file, or opens a file for appending, before its check. After the claim, the successor removes
  all `.part` files and replaces the files that are appended to (`open_run`).

A lead counts as dead if neither its file nor its segment is locked. If `flock` has no effect, or the lead is on another
machine, a new process waits for a sign of life in the lead's file. The invariant holds even if a lead that counts as
dead is still alive.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from pydantic import Field

from ..common.text import logger
from ..errors import StoreFailed, UsageError, remedy
from ..records import Lead
from ..schema import read_record
from ..value import Value
from .disk import REAL, Disk, read_file, write_all
from .index import Index
from .writer import is_live

log = logger("lease")

FOLDER = "leads"
BEAT = 5.0
"""Seconds between two signs of life."""
GRACE = 3
"""If `flock` can't decide, a lead counts as dead after this number of beats without a sign of life."""
_NAME = re.compile(r"(\d{6,})(-[0-9a-f]{6})?\.json")


class LeaseLost(StoreFailed):
    """Raised if a later lead took the run over, or if the lease's file is gone. The process must stop writing."""


class Holder(Value):
    """The process that leads or led a run."""

    epoch: int
    host: str
    pid: int = Field(ge=0, lt=1 << 31)
    """The process id, or 0 if it is unknown because the lead's file can't be read."""
    began: float = Field(ge=0, le=253_402_300_799)
    """Time of the start, in seconds since 1970."""
    seen: float = Field(ge=0, le=253_402_300_799)
    """Time of the last sign of life, in seconds since 1970."""
    ended: bool = False
    """True if the lead itself gave the run up."""

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process (its file can't be read)"
        began, seen = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" for at in (self.began, self.seen))
        return f"process {self.pid} on {self.host} (started {began}, last sign of life {seen})"


def read_leads(run: Path) -> dict[int, Holder]:
    """Return every lead that has a file, by epoch. If a file can't be read, for example because a crash cut it short,
    its lead is an unknown process without a sign of life."""
    try:
        return {epoch: _read(path, epoch) for epoch, path in _files(run).items()}
    except FileNotFoundError:
        return read_leads(run)  # a lead has just renamed its file, or the file was removed


def _names(run: Path) -> list[str]:
    try:
        return os.listdir(run / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(run: Path, names: Sequence[str] = ()) -> dict[int, Path]:
    # If an epoch has two files, the one with a nonce counts. The other file is a claim that came second.
    names = sorted(names or _names(run), reverse=True)
    return dict(sorted({int(m[1]): run / FOLDER / m[0] for name in names if (m := _NAME.fullmatch(name))}.items()))


def _read(path: Path, epoch: int) -> Holder:
    for _ in range(3):
        try:
            return Holder.model_validate_json(read_file(path)).model_copy(update={"epoch": epoch})
        except ValueError:
            time.sleep(0.01)  # the lead may be writing the file at this moment
    return _unknown(epoch)


def _unknown(epoch: int) -> Holder:
    return Holder(epoch=epoch, host="an unknown host", pid=0, began=0.0, seen=0.0)


def recorded_leads(index: Index) -> list[tuple[Holder, str]]:
    """Return (lead, last segment that it wrote) for each `lead` record in the index, sorted by epoch."""
    following = {segment.name: segment.next for segment in index.segments()}
    places = index.places("", t="lead")
    found = list[tuple[Holder, str]]()
    for place, body in zip(places, index.bodies(places), strict=True):
        lead, segment = cast(Lead, read_record(body, f"record {place.n} of segment {place.segment}")), place.segment
        while (after := following.get(segment)) is not None and after > segment:
            segment = after
        found.append((Holder(epoch=lead.epoch, host=lead.host, pid=lead.pid, began=lead.at, seen=lead.at), segment))
    return sorted(found, key=lambda one: one[0].epoch)


def _last(run: Path, disk: Disk) -> tuple[int, Holder, Path | None, Path | None]:
    """Return (highest epoch, its holder, the holder's file, the holder's segment). The epoch is 0 if there was no
    lead."""
    recorded = dict[int, tuple[Holder, str]]()
    if (run / "tapes").is_dir():
        with closing(Index(run / "tapes", disk=disk, path=run / "tapes" / "index.sqlite")) as index:
            index.refresh()
            recorded = {one[0].epoch: one for one in recorded_leads(index)}
    leads = read_leads(run)
    newest = max((*leads, *recorded), default=0)
    holder, segment = leads.get(newest, _unknown(newest)), None
    if newest in recorded:
        by_record, name = recorded[newest]
        holder, segment = holder if holder.pid else by_record, run / "tapes" / f"{name}.jsonl"
    return newest, holder, _files(run).get(newest), segment


class Lease:
    """The right to write a run's next records. Use it as a context manager. A separate thread writes signs of life."""

    def __init__(self, run: str | Path, *, take_over: bool = False, beat: float = BEAT, disk: Disk = REAL) -> None:
        """Claim the next epoch of the run. Raises UsageError if another lead is alive. With `take_over`, the epoch of
        that lead is ended instead."""
        run = Path(run)
        self._folder, self._beat, self._disk = run / FOLDER, beat, disk
        disk.make_folder(self._folder)
        self.locks = _flock_works(self._folder, disk)
        """Whether `flock` has an effect on this file system. If not, only signs of life show which lead is alive."""
        # The new epoch is one above the last one found here. If another process claims it meanwhile, this claim fails.
        newest = _last(run, disk)[0] if take_over else check_free(run, beat=beat, disk=disk)
        now = time.time()
        self.holder = Holder(epoch=newest + 1, host=socket.gethostname(), pid=os.getpid(), began=now, seen=now)
        claim = self._folder / f"{self.epoch:06d}.json"
        try:
            self._handle = disk.create(claim)
        except FileExistsError:
            raise _taken(run) from None
        try:
            found = _files(run)
            if found.get(self.epoch) != claim or max(found) > self.epoch:
                disk.remove(claim)  # another process came first and has already renamed its claim
                raise _taken(run)
            # The file is locked before it has content. A process that finds an empty file waits for a sign of life, and
            # a process that finds content but no lock assumes that the lead is dead. `wait` is true because another
            # process may hold the lock for a moment to test it.
            disk.lock(self._handle, wait=True)
            self._write()
            self._path = self._folder / f"{self.epoch:06d}-{disk.nonce()}.json"
            disk.rename(claim, self._path)
            disk.sync_dir(self._folder)
        except BaseException as error:
            disk.close(self._handle)
            if isinstance(error, FileNotFoundError):
                raise LeaseLost(f"{claim} was removed while this process took the lease; repeat the command") from error
            raise
        if not self.locks:
            log.warning("file locks have no effect in %s: signs of life every %g s keep a second lead out", run, beat)
        self._failure: OSError | None = None
        self._checked: list[str] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tapereel-lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of this lease: 1 for the first lead of a run."""
        return self.holder.epoch

    def check(self) -> None:
        """Raise LeaseLost if a later epoch was claimed or this lease's file is gone. Called before each write.

        Raises StoreFailed if this process can't write its sign of life, because other processes then assume that it is
        dead.
        """
        if self._failure is not None:
            raise StoreFailed(f"{self._path} can't be written: {self._failure}") from self._failure
        names = _names(self._folder.parent)
        if names == self._checked:
            return
        found = _files(self._folder.parent, names)
        if found.get(self.epoch) != self._path or max(found) > self.epoch:
            later = [holder for holder in read_leads(self._folder.parent).values() if holder.epoch > self.epoch]
            raise self.lost(*later[-1:])
        self._checked = names  # saves work: there is a check before each batch, but the names rarely change

    def lost(self, later: Holder | None = None) -> LeaseLost:
        """Return the error for this lost lease. `later` is the lead that took the run over, or None if the file is
        gone."""
        how = f"was taken over by {later}, as lead {later.epoch}" if later else f"has lost the file {self._path.name}"
        return LeaseLost(
            f"{self._folder.parent} {how}. This process was lead {self.epoch} and writes nothing more; its records so "
            "far stay, and `resume=True` continues from them"
        )

    def close(self) -> None:
        """Give the lease up, and record that in its file. Does nothing in a forked child."""
        if not self._stop.is_set() and self.holder.pid == os.getpid():
            self._stop.set()
            self._thread.join()
            self.holder = self.holder.model_copy(update={"ended": True, "seen": time.time()})
            try:
                self._write()
            except OSError as error:
                # The next lead sees that the lock is free, as after a crash. This isn't logged as a warning, because
                # the store already reports the failing disk.
                log.info("%s doesn't say that the lead ended: %s", self._path, error)
            finally:
                self._disk.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self) -> None:
        """Overwrite the file in place, since replacing it would lose the lock. A reader may find it empty for a
        moment."""
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
    """Return the epoch of the run's last lead, or 0 if the run never had a lead. This takes no lease.

    Raises UsageError if a living process leads the run. Finding this out may take a few beats (`GRACE`).
    """
    run = Path(run)
    epoch, holder, file, segment = _last(run, disk)
    alive = file is not None and not holder.ended and _alive(file, holder, beat, disk)
    if alive or (segment is not None and is_live(run / "tapes", segment.stem, disk)):
        raise UsageError(
            f"{run} is led by {holder}. Two leads would train on the same tapes twice: "
            f"{_advice(holder, file or segment)}, or end its lease: {remedy('end lease', END)}"
        )
    return epoch


END = "`tapereel.tapes.store.lease.end_lease(run)`"


def _advice(holder: Holder, locked: Path | None) -> str:
    try:
        if holder.pid and holder.host == socket.gethostname():
            os.kill(holder.pid, 0)
    except ProcessLookupError:
        return f"that process has ended, but another one, probably its child, holds its lock; `lsof {locked}` names it"
    except PermissionError:
        pass  # the process is alive, and another user started it
    return "wait for it to end or stop it"


def _taken(run: Path) -> UsageError:
    holders = [*read_leads(run).values()] or ["its file is gone"]
    return UsageError(f"{run} was taken by another process at the same moment: {holders[-1]}")


def end_lease(run: str | Path) -> None:
    """End the lease of the process that leads the run. That process stops before its next record."""
    if _last(Path(run), REAL)[0]:
        Lease(run, take_over=True).close()


def take_over(run: str | Path, resume: bool) -> None:
    """End the lease of a run that is then resumed. In a group of processes, only rank 0 does. Raises UsageError if
    `resume` is false."""
    if not resume:
        raise UsageError("`take_over=True` is only for a run that is continued: add `resume=True`, or remove it")
    if os.environ.get("RANK", "0") == "0":
        end_lease(run)


def _alive(path: Path, holder: Holder, beat: float, disk: Disk) -> bool:
    try:
        if not _lockable(path, disk):
            return True
        if holder.host == socket.gethostname() and _flock_works(path.parent, disk):
            return False
        # The clocks of two machines are never compared. Instead, the lead's file must change while this process watches
        # it. If the lead has only just created the file and it is still empty, the lock shows that the lead is alive.
        before, stop = read_file(path), time.monotonic() + GRACE * beat
        while time.monotonic() < stop:
            time.sleep(beat / 10)
            if read_file(path) != before or not _lockable(path, disk):
                return True
    except FileNotFoundError:
        return True  # the lead has just renamed its claim
    return False


def _lockable(path: Path, disk: Disk) -> bool:
    """Return whether a new handle can lock the file. If so, nothing else holds the lock, or `flock` has no effect."""
    handle = disk.edit(path, new=False)
    try:
        return disk.lock(handle)
    finally:
        disk.close(handle)


def _flock_works(folder: Path, disk: Disk) -> bool:
    """Return whether `flock` has an effect here: while one handle holds a file's lock, a second handle can't take
    it."""
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    handle = disk.edit(path)
    try:
        return disk.lock(handle) and not _lockable(path, disk)
    finally:
        disk.close(handle)
        disk.remove(path)


__all__ = ["Holder", "Lease", "LeaseLost", "check_free", "end_lease", "read_leads", "recorded_leads", "take_over"]
