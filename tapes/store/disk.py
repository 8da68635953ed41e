"""The file system operations that the store uses. They are methods of one class, so that tests can simulate crashes and
full disks.

The class guarantees no more than POSIX does:

* A write may be short.
* A power cut may lose the bytes that were written to a file after its last `sync`.
* A power cut may undo the creation, renaming or removal of a file after its folder's last `sync_dir`, even if the file
  was synced.
* After a failed `sync`, the state of the bytes is unknown. Even if a second `sync` succeeds, it proves nothing.
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
    """Raised if a run's file is a folder, link, pipe, socket or device, or is too large. Nothing was read from it."""


class Disk:
    """The operating system's files. It works on POSIX only, since it uses `flock` for locks.

    Every method raises OSError if the operation fails.
    """

    def make_folder(self, path: Path) -> None:
        """Create the folder and its missing parents. They are durable when this returns."""
        missing: list[Path] = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        # The outermost folder comes first, and each name is synced before the next one. So the folders that remain
        # after a power cut form a path from the root without gaps.
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.sync_dir(folder.parent)

    def names(self, folder: Path) -> list[str]:
        """Return the names in the folder. Raises FileNotFoundError if the folder is missing."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """Return a handle for appending to a new file. Raises FileExistsError if the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def edit(self, path: Path, *, new: bool = True) -> int:
        """Return a handle for locking, syncing, truncating or overwriting a file. A missing file is created if `new` is
        true. Otherwise, FileNotFoundError is raised."""
        return open_regular(path, os.O_RDWR | (os.O_CREAT if new else 0))

    def lock(self, handle: int, *, wait: bool = False) -> bool:
        """Take the file's exclusive lock, which is held until `close`. Return False if another handle holds it.

        The system releases the lock when the process dies, so a segment without a lock has no living writer. On a file
        system without working locks, this returns True.
        """
        import fcntl  # imported here, so that runs can be read on systems without flock

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
        """Append `data`. Return the number of bytes written, which may be less than its length."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Block until the file's bytes and length would survive a power cut."""
        if sys.platform == "darwin":
            import fcntl

            # On macOS, fsync leaves the bytes in the drive's volatile cache. Only F_FULLFSYNC flushes that cache.
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            # fdatasync also writes the file's length, without which appended bytes can't be read after a power cut.
            os.fdatasync(handle)

    def sync_dir(self, folder: Path) -> None:
        """Block until the folder's names would survive a power cut."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def truncate(self, handle: int, size: int) -> None:
        """Cut the file to `size` bytes. The cut is durable after `sync`."""
        os.ftruncate(handle, size)

    def close(self, handle: int) -> None:
        """Close the handle and release its lock."""
        _locked.discard(handle)
        os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename the file atomically. A file that already has the new name is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove the file. Raises FileNotFoundError if it is missing."""
        os.unlink(path)

    def open(self, path: Path) -> BinaryIO:
        """Open the file for reading. Raises FileNotFoundError if it is missing, and NotAFile if it isn't a regular
        file."""
        return open(open_regular(path, os.O_RDONLY), "rb")

    def size(self, path: Path) -> int:
        """Return the size of the file in bytes."""
        return os.stat(path).st_size

    def nonce(self) -> str:
        """Return 6 random hex digits."""
        return os.urandom(3).hex()


REAL = Disk()
METRICS = "metrics.jsonl"
MOST_BYTES = {"config.yaml": LARGEST, "results.json": 1 << 28, "pins.json": 1 << 28, METRICS: 1 << 30}
"""Maximum size in bytes of each file that is read as a whole."""
_parts = itertools.count()
_LEAD = re.compile(rb'\{"lead": (\d{1,15})[,}]')
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_locked: set[int] = set()
"""Locked handles of this process. A forked child closes its copies of them, because they would keep the locks after the
parent's death."""


def _let_go() -> None:
    for handle in _locked:
        os.close(handle)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def write_all(disk: Disk, handle: int, data: bytes) -> None:
    """Write all of `data`, however short the individual writes are."""
    view = memoryview(data)
    while view:
        taken = disk.write(handle, view)  # type: ignore[arg-type]
        if taken <= 0:
            raise OSError(f"the file system wrote {taken} of {len(view)} bytes and gave no reason")
        view = view[taken:]


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file in a run, and return its handle. Anyone who can write to the run's folder can put something
    else at its path. A pipe would block forever, and a link could lead to /dev/zero or to another user's file.

    Raises NotAFile if the path isn't a regular file. The check never waits, and never follows a link in the last part
    of the path.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # These are the errors for a folder that is opened for writing, a socket, a link and a loop of links.
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.ELOOP):
            raise NotAFile(f"{path} is not a regular file ({error.strerror}): restore it from a copy") from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise NotAFile(f"{path} is not a regular file ({stat.filemode(mode)}): restore it from a copy")
    return handle


def read_file(path: Path, disk: Disk = REAL) -> bytes:
    """Return the bytes of a run's file. Raises FileNotFoundError, or NotAFile if it isn't a regular file or is too
    large."""
    with disk.open(path) as file:
        _check_size(path, disk)
        return file.read()


def _check_size(path: Path, disk: Disk) -> None:
    """Raise NotAFile if the file is too large. An archive of a run can contain a sparse file of 300 GB."""
    size, most = disk.size(path), MOST_BYTES.get(path.name, sys.maxsize)
    if size > most:
        raise NotAFile(f"{path} has {size:,} bytes, and a run's has at most {most:,}: restore it from a copy")


def file_digest(path: Path, disk: Disk = REAL) -> str:
    """Return the SHA-256 (hex) of a file, which is read in pieces. Raises FileNotFoundError, or NotAFile if it isn't a
    regular file or is too large."""
    if path.name == METRICS:
        return hashlib.sha256(b"".join(counted_lines(read_file(path, disk)))).hexdigest()
    digest = hashlib.sha256()
    with disk.open(path) as file:
        _check_size(path, disk)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def counted_lines(data: bytes) -> list[bytes]:
    """Return the lines in a metrics file that count. A line may state the epoch of its writer (`lead`). It
    doesn't count if an earlier line has a higher epoch, because another process had then taken the run over.

    Readers and `file_digest` use the same lines, so a line that the digest doesn't cover is never read.
    """
    kept, newest = list[bytes](), 0
    for line in data.splitlines(keepends=True):
        lead = int(match[1]) if (match := _LEAD.match(line)) else newest
        if lead >= newest:
            kept.append(line)
            newest = lead
    return kept


def changed(path: Path, digest: str) -> str | None:
    """Return a sentence if the file's digest differs from the recorded one, or None if they are equal."""
    try:
        found = file_digest(path)
    except FileNotFoundError:
        return f"{path} is gone, but a record has its digest"
    except OSError as error:
        return f"{error}; a record has its digest"
    return None if found == digest else f"{path} was changed: it has the digest {found}, the record {digest}"


def damage(folder: Path, digests: Mapping[Path, str]) -> list[str]:
    """Return a sentence for each file below `folder` that differs from its digest, is missing, or has no digest."""
    folders = {above for path in digests for above in path.parents}
    more = sorted(path for path in folder.rglob("*") if path not in digests and path not in folders)
    found = [text for path, digest in sorted(digests.items()) if (text := changed(path, digest)) is not None]
    return [*found, *(f"{path} was added: no record has its digest" for path in more)]


def put_file(disk: Disk, path: Path, data: bytes, *, check: Callable[[], object] = lambda: None) -> None:
    """Create or replace a file. After a crash, it holds either all of `data` or its previous content.

    The bytes are synced before the rename, because a power cut could otherwise leave an empty file with the new name.
    The folder is synced last, so the new name is durable when this returns. A crash before the rename leaves a `.part`
    file, which recovery removes. If two processes write to one path at once, the file gets the whole content from one
    of them.

    `check` is called when the `.part` file is complete, and may raise an error to keep the old file. Even after the
    check, another process can prevent the rename by removing the `.part` file.
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
        check()  # if another process has removed the `.part` file, this raises the reason
        raise
    disk.sync_dir(path.parent)
