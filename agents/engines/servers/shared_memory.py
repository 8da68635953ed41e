"""Deletes the shared memory that a killed vLLM leaves in /dev/shm. It is hundreds of MiB each time.

`remember` writes the names of a running server's segments and semaphores to a file that belongs to this user (a note).
For each name in a note, `sweep` deletes the segment or semaphore if no process maps it any more. Segments of other
programs are in no note, so they are never deleted. Both functions do nothing on systems other than Linux.

Files are compared by inode and not by name. The reason is semaphores: the process that creates one maps it under a
temporary name, which is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..weights.weight_transfer import SHARED_MEMORY


def _notes() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapereel" / "shared_memory"


def remember(session: int) -> None:
    """Write a note of the segments that processes in this session map now. Raises OSError if that isn't possible."""
    noted, used = {}, _mapped(session)
    for path in SHARED_MEMORY.iterdir() if used else ():
        with contextlib.suppress(FileNotFoundError):  # it has just been deleted
            if path.lstat().st_ino in used:
                noted[str(path)] = _identity(str(path))
    if noted:
        _notes().mkdir(parents=True, exist_ok=True, mode=0o700)
        (_notes() / f"{session}.json").write_text(json.dumps(noted))


def sweep() -> list[str]:
    """Delete the noted segments and semaphores that no process maps any more, and return their names."""
    swept = []
    used = _mapped(None) if _notes().is_dir() else set()
    for note in _notes().glob("*.json"):
        try:
            noted = json.loads(note.read_text())
        except (OSError, ValueError):
            continue  # another Tapereel process is writing it now, or has deleted it
        for name, identity in noted.items():
            # The name alone isn't enough, because by now another program may have a segment with this name.
            with contextlib.suppress(OSError):
                if identity[1] not in used and _identity(name) == identity:
                    os.unlink(name)
                    swept.append(name)
        if not used.intersection(identity[1] for identity in noted.values()):
            note.unlink(missing_ok=True)
    return swept


def _identity(name: str) -> list[int]:
    found = os.stat(name)
    return [found.st_dev, found.st_ino, found.st_uid]


def _mapped(session: int | None) -> set[int]:
    """Return the inodes of the shared memory files that processes in `session` map or hold open. If `session` is None,
    the processes of all sessions count.

    Other users' processes can't be read. They can't map our segments either, because the segments have the mode
    0600."""
    return {
        inode
        for process in Path("/proc").glob("[0-9]*")
        if session is None or _session(int(process.name)) == session
        for inode in _inodes(process)
    }


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _inodes(process: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):  # the process has ended or belongs to another user
        for line in (process / "maps").read_text(errors="replace").splitlines():
            if f" {SHARED_MEMORY}/" in line:
                yield int(line.split(maxsplit=5)[4])
        for number in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(number).startswith(f"{SHARED_MEMORY}/"):
                    yield number.stat().st_ino
