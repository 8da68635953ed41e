"""The process side of the sandbox: run as a script, it walls itself in, runs one command, and tells how that ended.

    python -I -S jail.py <<< '{"command": [...], "folder": ..., "seconds": ..., "report": FD, ...}'

What the command finds in the folder was made by commands before it, which are not to be trusted: only the command's own
process, once it has no more rights than they had, enters the folder, and writes a file there where the order has one.
Imports nothing but the standard library, since it starts for every snippet. Where namespaces are to be had:

    jail ── init (pid 1 of its own process namespace; its death kills all) ── the command (no privileges, limits)

and else the jail adopts every orphan of the command and kills what it finds, until there is nothing left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
FIRST_UID = 1 << 20
"""Where this process is root, each sandbox has a user of its own, from here on: which its limit of processes counts."""
POLL_SECONDS = 0.01
KILL_SECONDS = 20
"""That killing what is left may take, on a machine that has other things to do."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """OSError where a call of libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare() -> None:
    """New namespaces for this process and its children; as a user without privileges, by way of a user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)


def mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    """mount(2)."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), None), f"mount {target}")


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of Linux."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def read_only(target: str, *, on: bool, deep: bool) -> None:
    """mount_setattr(2): may nothing be written there?"""
    attributes = MountAttributes(MOUNT_ATTR_RDONLY if on else 0, 0 if on else MOUNT_ATTR_RDONLY, 0, 0)
    check(
        libc.syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            target.encode(),
            AT_RECURSIVE if deep else 0,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),
        ),
        f"mount_setattr {target}",
    )


def wall_in(folder: str) -> None:
    """As pid 1 of the namespaces: only `folder` can be written, only own processes are seen."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount(folder, folder, None, MS_BIND)
    read_only("/", on=True, deep=True)
    read_only(folder, on=False, deep=False)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # a container that masks parts of /proc forbids a new one: better none than everybody's
        mount("none", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)


def bound(what: int, value: float) -> None:
    """One limit of this process, and of every one that it starts."""
    hard = resource.getrlimit(what)[1]
    least = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(what, (least, least))


def limit(order: dict[str, Any]) -> None:
    """All limits but that of files' sizes, which comes last."""
    seconds = int(order["seconds"]) + 2
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_NPROC, order["processes"] + order["others"]),
    ):
        bound(what, value)


def settle(order: dict[str, Any]) -> None:
    """Enter the folder and write the order's file, with the command's own rights: what stands in the way, a command
    before this one has put there. Then it reads so, as the output of this one."""
    name, text = order["file"] or ("", "")
    doing = "its working directory can't be entered"
    try:
        os.chmod(order["folder"], 0o700)
        os.chdir(order["folder"])
        if name:
            doing = f"{name} can't be written"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            with open(name, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
    except OSError as error:
        os.write(2, f"{doing}: {error.strerror}\n".encode())
        os._exit(1)


def become(order: dict[str, Any]) -> None:
    """The command, in this process: without privileges, with its limits. Never returns."""
    try:
        for fd in range(3, 256):
            if fd != order["report"]:
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.set_inheritable(order["report"], False)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(order["uid"], order["uid"], order["uid"])
        limit(order)
        if os.getuid() == 0:
            os.setresuid(order["uid"], order["uid"], order["uid"])
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        settle(order)
        bound(resource.RLIMIT_FSIZE, order["file_size"])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execv(order["command"][0], order["command"])
    except BaseException as error:
        tell(order, {"failed": f"{order['command'][0]}: {error}"})
    os._exit(127)


def tell(order: dict[str, Any], what: dict[str, Any]) -> None:
    """To whoever started the jail, by the pipe that the command doesn't have. What is told first counts."""
    with contextlib.suppress(OSError):
        os.write(order["report"], json.dumps(what).encode() + b"\n")


def wait_for(child: int, seconds: float) -> int | None:
    """Its exit code (negative: the signal), collecting whoever else dies; None where it hadn't ended in time."""
    until = time.monotonic() + seconds
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 127
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            if time.monotonic() > until:
                return None
            time.sleep(POLL_SECONDS)


def children_of(pid: int) -> list[int]:
    """Its children, by /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def kill_all() -> None:
    """Every descendant: each orphan becomes a child of the jail, and they are killed faster than they can fork."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until:
        found = children_of(os.getpid())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        for pid in found:
            for below in (*children_of(pid), pid):
                with contextlib.suppress(OSError):
                    os.kill(below, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run_apart(order: dict[str, Any]) -> None:
    """With namespaces: this process waits for the one that is init in there, and for all that end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # given up by whoever started it: nothing may stay
    init = os.fork()
    if init == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
        try:
            wall_in(order["folder"])
            command = os.fork()
            if command == 0:
                become(order)
            code = wait_for(command, order["seconds"])
        except BaseException as error:
            tell(order, {"failed": str(error)})
            os._exit(1)
        tell(order, {"code": code, "isolated": True})
        os._exit(0)
    try:
        os.waitpid(init, 0)
    except SystemExit:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
        raise


def run_beside(order: dict[str, Any]) -> None:
    """Without namespaces."""
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # given up by whoever started it: nothing may stay
    try:
        command = os.fork()
        if command == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            become(order)
        code = wait_for(command, order["seconds"])
    finally:
        kill_all()
    tell(order, {"code": code, "isolated": False})


def processes_of(uid: int) -> int:
    """How many processes and threads the user has now: the limit of processes counts them too."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def main(order: dict[str, Any]) -> None:
    """Carry out the order."""
    order["others"] = 0
    apart = order["isolation"] != "none"
    if apart:
        try:
            unshare()
        except OSError as error:
            apart = False
            if order["isolation"] == "required":
                tell(order, {"failed": f"this system gives no namespaces ({error}), and isolation is required"})
                return
    if not apart and os.getuid() != 0:
        order["others"] = processes_of(os.getuid())
    (run_apart if apart else run_beside)(order)


if __name__ == "__main__":
    told = json.load(sys.stdin)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    main(told)
