"""The file system operations that the store uses, as one class, so that tests can simulate crashes and full disks.

The class promises no more than POSIX does:

* a write may be short;
* written bytes may be lost in a power cut until `sync` of the file returns;
* a new, renamed or removed name may be lost until `sync_dir` of its folder returns, even when the file was synced;
* after a failed `sync` the state of the bytes is unknown, and a second `sync` that succeeds proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from ..common.config_yaml import LARGEST
from ..errors import TapereelError


class NotAFile(TapereelError, OSError):
    """A folder, link, pipe, socket or device has the name of a run's file. Nothing was read from it."""


class Disk:
    """The operating system's files. POSIX only, as the locks are `flock`.

    Every method raises OSError when the operation fails.
    """

    def make_folder(self, path: Path) -> None:
        """Create the folder and its missing parents; durable when this returns."""
        missing: list[Path] = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        # Outermost first, each name synced before the next one: a power cut leaves a path from the root, never a hole.
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.sync_dir(folder.parent)

    def names(self, folder: Path) -> list[str]:
        """Names in the folder; FileNotFoundError when the folder is missing."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """A handle on a new file, to append to; FileExistsError when the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def edit(self, path: Path, *, new: bool = True) -> int:
        """A handle on a file, to lock, sync, truncate or overwrite it. A missing file is created; without `new`, it is
        a FileNotFoundError."""
        return open_regular(path, os.O_RDWR | (os.O_CREAT if new else 0))

    def lock(self, handle: int, *, wait: bool = False) -> bool:
        """Take the file's exclusive lock, held until `close`. False when another handle holds it.

        The system releases the lock when the process dies: a segment without a lock has no living writer. On a file
        system without locks the answer is True, as on one on which they have no effect.
        """
        import fcntl  # here, so that runs can be read on systems without flock

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return True
        _locked.add(handle)
        return True

    def write(self, handle: int, data: bytes) -> int:
        """Append; returns the number of bytes written, which may be less than the length of `data`."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Return when the file's bytes and length would survive a power cut."""
        if sys.platform == "darwin":
            import fcntl

            # On macOS fsync leaves the bytes in the drive's volatile cache; only F_FULLFSYNC flushes that cache.
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            # fdatasync also writes the file's length, without which appended bytes can't be read after a power cut.
            os.fdatasync(handle)

    def sync_dir(self, folder: Path) -> None:
        """Return when the folder's names would survive a power cut."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def truncate(self, handle: int, size: int) -> None:
        """Cut the file to `size` bytes; durable after `sync`."""
        os.ftruncate(handle, size)

    def close(self, handle: int) -> None:
        """Give up the handle and its lock."""
        _locked.discard(handle)
        os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename the file atomically; a file that has the new name is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove the file; FileNotFoundError when it is missing."""
        os.unlink(path)

    def open(self, path: Path) -> BinaryIO:
        """The file, open for reading; FileNotFoundError when it is missing, NotAFile when it isn't a regular file."""
        return open(open_regular(path, os.O_RDONLY), "rb")

    def size(self, path: Path) -> int:
        """Bytes of the file."""
        return os.stat(path).st_size

    def nonce(self) -> str:
        """6 random hex digits."""
        return os.urandom(3).hex()


REAL = Disk()
METRICS = "metrics.jsonl"
MOST_BYTES = {"config.yaml": LARGEST, "results.json": 1 << 28, "pins.json": 1 << 28, METRICS: 1 << 30}
"""Name of a file that is read whole -> its maximum size in bytes."""
_parts = itertools.count()
_LEAD = re.compile(rb'\{"lead": (\d{1,15})[,}]')
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_locked: set[int] = set()
"""Locked handles of this process. A fork copies them, and a copy would keep the lock after the parent's death."""


def _let_go() -> None:
    for handle in _locked:
        os.close(handle)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def write_all(disk: Disk, handle: int, data: bytes) -> None:
    """Write all of `data`, however short the single writes are."""
    view = memoryview(data)
    while view:
        taken = disk.write(handle, view)  # type: ignore[arg-type]
        if taken <= 0:
            raise OSError(f"the file system wrote {taken} of {len(view)} bytes and gave no reason")
        view = view[taken:]


def open_regular(path: Path, flags: int) -> int:
    """A handle on a regular file of a run. Anyone who can write into a run's folder can put anything in a file's
    place: a pipe would block for ever, a link could lead to /dev/zero or to another user's file.

    NotAFile for anything else, without waiting and without following a link in the last place.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # A folder that is opened to write, a socket, a link or a loop of links.
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.ELOOP):
            raise NotAFile(f"{path} is not a regular file ({error.strerror}): restore it from a copy") from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise NotAFile(f"{path} is not a regular file ({stat.filemode(mode)}): restore it from a copy")
    return handle


def read_file(path: Path, disk: Disk = REAL) -> bytes:
    """The bytes of a run's file. FileNotFoundError; NotAFile if something else has its name, or if it is too large."""
    with disk.open(path) as file:
        _check_size(path, disk)
        return file.read()


def _check_size(path: Path, disk: Disk) -> None:
    """A file of 300 GB may take no space, and an archive of a run can hold one."""
    size, most = disk.size(path), MOST_BYTES.get(path.name, sys.maxsize)
    if size > most:
        raise NotAFile(f"{path} has {size:,} bytes, and a run's has at most {most:,}: restore it from a copy")


def file_digest(path: Path, disk: Disk = REAL) -> str:
    """SHA-256 (hex) of a file, read in pieces. FileNotFoundError; NotAFile if it isn't a regular file or too large."""
    if path.name == METRICS:
        return hashlib.sha256(b"".join(counted_lines(read_file(path, disk)))).hexdigest()
    digest = hashlib.sha256()
    with disk.open(path) as file:
        _check_size(path, disk)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def counted_lines(data: bytes) -> list[bytes]:
    """The lines of a metrics file, without those that a lead wrote after a line of a later lead.

    Readers and `file_digest` use the same lines, so an edit that changes no digest is never read.
    """
    kept, newest = list[bytes](), 0
    for line in data.splitlines(keepends=True):
        lead = int(match[1]) if (match := _LEAD.match(line)) else newest
        if lead >= newest:
            kept.append(line)
            newest = lead
    return kept


def changed(path: Path, digest: str) -> str | None:
    """A sentence if the file's digest differs from the recorded one; None if they are equal."""
    try:
        found = file_digest(path)
    except FileNotFoundError:
        return f"{path} is gone, but a record has its digest"
    except OSError as error:
        return f"{error}; a record has its digest"
    return None if found == digest else f"{path} was changed: it has the digest {found}, the record {digest}"


def damage(folder: Path, digests: Mapping[Path, str]) -> list[str]:
    """A sentence for each file below `folder` that differs from its digest, is gone, or has none."""
    folders = {above for path in digests for above in path.parents}
    more = sorted(path for path in folder.rglob("*") if path not in digests and path not in folders)
    found = [text for path, digest in sorted(digests.items()) if (text := changed(path, digest)) is not None]
    return [*found, *(f"{path} was added: no record has its digest" for path in more)]


def put_file(disk: Disk, path: Path, data: bytes, *, check: Callable[[], object] = lambda: None) -> None:
    """Create or replace a file so that after a crash it holds either all of `data` or its previous content.

    The bytes are synced before the rename: a rename alone may reach the disk before the bytes do, and a power cut then
    leaves the name on an empty file. The folder is synced last, so that the new name itself survives when this returns.
    A crash before the rename leaves a `.part` file, which recovery removes. Of two processes that write one path at
    once, one wins whole. `check` may raise to keep the old file; it is called when the `.part` file is complete, so a
    process that removes that file after the check has passed prevents the rename.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{next(_parts)}.part")
    try:
        handle = disk.create(part)
    except FileExistsError:  # left by a dead process that had this process id
        disk.remove(part)
        handle = disk.create(part)
    try:
        write_all(disk, handle, data)
        disk.sync(handle)
    finally:
        disk.close(handle)
    try:
        check()
        disk.rename(part, path)
    except Exception:
        with contextlib.suppress(OSError):
            disk.remove(part)
        check()  # names the reason if another process has removed the `.part` file
        raise
    disk.sync_dir(path.parent)
