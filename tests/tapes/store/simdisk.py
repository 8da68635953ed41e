"""A file system whose every legal state after a power cut can be listed.

It keeps what POSIX promises and nothing more: bytes and lengths of a file are safe after `sync` of that file, names
after `sync_dir` of their folder, locks die with their holder. What was not synced may be there or not, in whole or by
sectors in any order, with zeros, noise or another file's old bytes in the gaps.
"""

from __future__ import annotations

import errno
import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

SECTOR = 128
"""Bytes that are written at once or not at all. Small, so that lines span several."""

Image = dict[str, bytes]
"""Every file by path: what a machine finds when it starts again."""


@dataclass
class Inode:
    """One file: what is safe, and what was done to it since."""

    safe: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)
    """(`write`, offset, data) or (`truncate`, size, b"")."""
    data: bytearray = field(default_factory=bytearray)
    """As a running machine sees it."""


class SimDisk:
    """Implements `Disk`. `journal` holds every operation, with what tests add to it."""

    def __init__(self, image: Image | None = None, *, seed: int = 0) -> None:
        self.seed, self._nonces = seed, 0
        self.inodes: list[Inode] = []
        self.names_now: dict[str, int] = {}
        self.names_safe: dict[str, int] = {}
        self.names_pending: list[tuple[str, str, int | None]] = []
        """(folder, path, inode or None for removed), in order; of a rename, both in one entry's place."""
        self.handles: dict[int, int] = {}
        self.locks: dict[int, int] = {}
        self.journal: list[tuple[Any, ...]] = []
        self.folders: set[str] = set()
        self.failing_syncs = 0
        """How many of the next syncs fail."""
        self._next = 3
        for path, data in (image or {}).items():
            self.inodes.append(Inode(data, [], bytearray(data)))
            self.names_now[path] = self.names_safe[path] = len(self.inodes) - 1
            self.folders |= {str(parent) for parent in Path(path).parents}

    # What the store asks for

    def make_folder(self, path: Path) -> None:
        self.folders |= {str(path), *map(str, path.parents)}

    def names(self, folder: Path) -> list[str]:
        if str(folder) not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
        parts = (path.rpartition("/") for path in self.names_now)
        return [name for parent, _, name in parts if parent == str(folder)]

    def create(self, path: Path) -> int:
        if str(path) in self.names_now:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self.inodes.append(Inode())
        inode = self.names_now[str(path)] = len(self.inodes) - 1
        self.names_pending.append((str(path.parent), str(path), inode))
        self._log("create", str(path), inode)
        return self._handle(inode)

    def edit(self, path: Path, *, new: bool = True) -> int:
        if str(path) not in self.names_now:
            if not new:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            return self.create(path)
        return self._handle(self.names_now[str(path)])

    def _handle(self, inode: int) -> int:
        self._next += 1
        self.handles[self._next] = inode
        return self._next

    def lock(self, handle: int, *, wait: bool = False) -> bool:
        inode = self.handles[handle]
        if self.locks.get(inode, handle) != handle:
            if wait:
                raise AssertionError("a lock that would wait for ever: one process holds it and runs no more")
            return False
        self.locks[inode] = handle
        return True

    def write(self, handle: int, data: bytes) -> int:
        inode = self.inodes[self.handles[handle]]
        data = bytes(data)
        inode.pending.append(("write", len(inode.data), data))
        inode.data += data
        self._log("write", self.handles[handle], data)
        return len(data)

    def sync(self, handle: int) -> None:
        inode = self.inodes[self.handles[handle]]
        if self.failing_syncs:
            # What Linux does: the pages are marked clean all the same, so that the next sync finds nothing to do.
            self.failing_syncs -= 1
            inode.pending = [("lost", 0, b"")]
            self._log("failed sync", self.handles[handle])
            raise OSError(errno.EIO, "the disk says no")
        if ("lost", 0, b"") in inode.pending:
            self._log("sync", self.handles[handle])
            return
        inode.safe, inode.pending = bytes(inode.data), []
        self._log("sync", self.handles[handle])

    def sync_dir(self, folder: Path) -> None:
        for entry in self.names_pending:
            if entry[0] == str(folder):
                self._settle(self.names_safe, entry)
        self.names_pending = [entry for entry in self.names_pending if entry[0] != str(folder)]
        self._log("sync_dir", str(folder))

    def truncate(self, handle: int, size: int) -> None:
        inode = self.inodes[self.handles[handle]]
        inode.pending.append(("truncate", size, b""))
        del inode.data[size:]
        self._log("truncate", self.handles[handle], size)

    def close(self, handle: int) -> None:
        inode = self.handles.pop(handle)
        if self.locks.get(inode) == handle:
            del self.locks[inode]

    def rename(self, old: Path, new: Path) -> None:
        inode = self.names_now.pop(str(old))
        self.names_now[str(new)] = inode
        self.names_pending.append((str(new.parent), f"{old}\0{new}", inode))
        self._log("rename", str(old), str(new))

    def remove(self, path: Path) -> None:
        if str(path) not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        del self.names_now[str(path)]
        self.names_pending.append((str(path.parent), str(path), None))
        self._log("remove", str(path))

    def open(self, path: Path) -> io.BytesIO:
        if str(path) not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return io.BytesIO(bytes(self.inodes[self.names_now[str(path)]].data))

    def size(self, path: Path) -> int:
        return len(self.inodes[self.names_now[str(path)]].data)

    def nonce(self) -> str:
        self._nonces += 1
        return hashlib.sha256(f"{self.seed} {self._nonces}".encode()).hexdigest()[:6]

    # What a test asks for

    def _log(self, *entry: Any) -> None:
        self.journal.append(entry)
        self.after_operation()

    def after_operation(self) -> None:
        """A place for tests to look at the disk after every operation."""

    def after_death(self) -> SimDisk:
        """The disk when every process has died but the power stays on: no locks, nothing safer than before."""
        copy = SimDisk(seed=self.seed + 100)
        copy.inodes = [Inode(i.safe, list(i.pending), bytearray(i.data)) for i in self.inodes]
        copy.names_now, copy.names_safe = dict(self.names_now), dict(self.names_safe)
        copy.names_pending, copy.folders = list(self.names_pending), set(self.folders)
        return copy

    def image(self) -> Image:
        """What a machine that lost no power sees: the death of a process."""
        return {path: bytes(self.inodes[inode].data) for path, inode in self.names_now.items()}

    def crash_images(self, stale: bytes, *, thorough: bool = True) -> Iterator[Image]:
        """Legal images after a power cut now. Each file varies in all its ways, the others between two extremes."""
        for names in self._name_states():
            inodes = sorted(set(names.values()))
            dirty = [inode for inode in inodes if self.inodes[inode].pending]
            for inode in dirty or [-1]:
                others = [k for k in dirty if k != inode]
                for mine in self._contents(inode, stale, thorough) if inode >= 0 else [b""]:
                    for extremes in product((False, True), repeat=len(others)):
                        content = {
                            k: bytes(self.inodes[k].data) if kept else self.inodes[k].safe
                            for k, kept in zip(others, extremes, strict=True)
                        }
                        content[inode] = mine
                        yield {
                            path: content.get(k, bytes(self.inodes[k].data) if k not in dirty else b"")
                            for path, k in names.items()
                        }

    def _name_states(self) -> Iterator[dict[str, int]]:
        pending = self.names_pending
        choices = {tuple(range(k)) for k in range(len(pending) + 1)}
        choices |= {tuple(j for j in range(len(pending)) if j != k) for k in range(len(pending))}
        choices |= {(k,) for k in range(len(pending))}
        for chosen in sorted(choices):
            names = dict(self.names_safe)
            for k in chosen:
                self._settle(names, pending[k])
            yield names

    @staticmethod
    def _settle(names: dict[str, int], entry: tuple[str, str, int | None]) -> None:
        _, path, inode = entry
        if "\0" in path:
            old, path = path.split("\0")
            names.pop(old, None)
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode

    def _contents(self, number: int, stale: bytes, thorough: bool) -> Iterator[bytes]:
        """What a file may hold: nothing that is safe is lost, the rest may be there, be missing or be old bytes."""
        inode = self.inodes[number]
        now, safe = bytes(inode.data), inode.safe
        yield now
        yield safe
        if len(now) < len(safe):  # a truncation that may or may not have happened
            return
        start = len(safe) - len(safe) % SECTOR
        cuts = list(range(start + SECTOR, len(now), SECTOR))
        noise = random.Random(len(now)).randbytes(len(now))
        old = (stale * (len(now) // max(len(stale), 1) + 1))[: len(now)]
        for cut in [*cuts, len(safe) + (len(now) - len(safe)) // 3, len(now) - 1]:
            if len(safe) <= cut < len(now):
                yield now[:cut]
        fills = (bytes(len(now)), noise, old) if thorough else (old,)
        for fill in fills:
            # Only sectors that never held anything safe can show old bytes.
            fresh = len(safe) + -len(safe) % SECTOR
            if fresh < len(now):
                yield now[:fresh] + fill[fresh:]
            for cut in cuts:
                if cut >= fresh:
                    yield now[:cut] + fill[cut : cut + SECTOR] + now[cut + SECTOR :]  # one sector is missing
                    yield now[:cut] + fill[cut:]  # all from here on are
                    if thorough:
                        yield now[:fresh] + fill[fresh:cut] + now[cut:]  # only later ones came through
            if fill is fills[0] and fresh > len(safe):
                yield safe + bytes(min(fresh, len(now)) - len(safe)) + now[fresh:]


def fingerprint(image: Image) -> bytes:
    """One digest for one image."""
    digest = hashlib.sha256()
    for path in sorted(image):
        digest.update(f"{path}\0{len(image[path])}\0".encode() + image[path])
    return digest.digest()
