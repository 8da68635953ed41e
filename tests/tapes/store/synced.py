"""What a power cut would leave of the real disk's files: it follows the calls of `os.fsync` and `os.fdatasync`."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest


class Synced:
    """Every call reaches the system, one after the other. `files` and `folders` count them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root.resolve()
        """The test's folder, whose own name is durable."""
        self.files = self.folders = 0
        self._bytes: dict[int, int] = {}
        """Inode -> size of the file when it was synced."""
        self._names: dict[int, dict[str, int]] = {}
        """Inode of a folder -> its names and their inodes when it was synced."""
        # If two threads synced one folder at once, the names that the first listed could replace those of the second.
        self._one = threading.Lock()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))

    def _noted(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(handle: int) -> None:
            with self._one:
                # Before the call: what is written or renamed meanwhile need not be covered by it.
                before, folder = os.fstat(handle), Path(os.readlink(f"/proc/self/fd/{handle}"))
                names = {one.name: one.inode() for one in os.scandir(folder)} if stat.S_ISDIR(before.st_mode) else None
                sync(handle)
                if names is None:
                    self._bytes[before.st_ino] = before.st_size
                    self.files += 1
                else:
                    self._names[before.st_ino] = names
                    self.folders += 1

        return noted

    def named(self, path: Path) -> bool:
        """Whether the names of a file or folder and of all folders above it would survive."""
        path = path.resolve()
        above = [path, *path.parents[: len(path.relative_to(self.root).parts) - 1]]
        return all(self._names.get(one.parent.stat().st_ino, {}).get(one.name) == one.stat().st_ino for one in above)

    def content(self, path: Path) -> bytes:
        """The bytes that would survive if the name does."""
        return path.read_bytes()[: self._bytes.get(path.stat().st_ino, 0)]

    def left(self, path: Path) -> bytes | None:
        """The bytes that would survive; None if the name would not."""
        return self.content(path) if self.named(path) else None
