"""Runs a command as a plain user, with this interpreter and this checkout, wherever root keeps them.

    python plain_user.py USER COMMAND...

Folders that only root can enter are opened in a mount namespace of the command's own. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import sys
from pathlib import Path

MS_BIND, MS_REC, MS_PRIVATE, CLONE_NEWNS = 4096, 16384, 1 << 18, 0x00020000


def closed(tree: Path) -> Path | None:
    """The topmost folder on the way to `tree` that other users can't enter."""
    way = [*reversed(tree.parents), tree]
    return next((place for place in way if not place.stat().st_mode & stat.S_IXOTH), None)


def main(user: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) < 0:
            raise OSError(ctypes.get_errno(), f"mount {target}")

    entry = pwd.getpwnam(user)
    trees = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])}
    if libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    held = {tree: (closed(tree), os.open(tree, os.O_PATH)) for tree in trees}
    for top in {top for top, _ in held.values() if top}:
        mount("open", str(top), "tmpfs", 0, "mode=755")
    for tree, (top, opened) in held.items():
        if top:
            tree.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{opened}", str(tree), "", MS_BIND)
        os.close(opened)
    os.initgroups(user, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    os.chdir("/")
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
    path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    os.execve(command[0], command, {"HOME": entry.pw_dir, "USER": user, "PATH": path, **kept})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
