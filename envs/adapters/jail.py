"""The child process of the sandbox: a script that isolates itself, runs one command, and reports how the command ended.

    python -I -S jail.py <<< '{"command": [...], "folder": ..., "seconds": ..., "report": FD, ...}'

The content of the folder comes from earlier commands and is not trusted. So only the command's own process enters the
folder and writes the order's file there, after it has dropped its privileges. The script imports only the standard
library, because it starts for every snippet. With namespaces, the processes are:

    jail ── init (pid 1 of its own process namespace; its death kills all) ── the command (no privileges, limits)

Without namespaces, the jail becomes the parent of every orphan of the command, and kills its children until none is
left.
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
from typing import TypedDict

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
"""The first user id of sandboxes, if this process is root. Each sandbox has its own user id, because the kernel counts
the limit of processes per user."""
POLL_SECONDS = 0.01
"""Seconds between two checks whether the command has ended."""
KILL_SECONDS = 20
"""Time limit for killing the remaining processes; generous, for a loaded machine."""


class Bounds(TypedDict):
    """Limits of a command."""

    seconds: float
    memory: int
    processes: int
    file_size: int


class Order(Bounds):
    """What the sandbox asks for, as JSON on stdin."""

    command: list[str]
    folder: str
    file: tuple[str, str] | None
    """Name and text of a file that the command's process writes first."""
    report: int
    """File descriptor of the pipe to the sandbox."""
    isolation: str
    uid: int


libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call of libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare() -> None:
    """Create new namespaces for this process and its children; without privileges, inside a new user namespace.

    Raises OSError if the system forbids namespaces.
    """
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        # `setgroups` comes first: the kernel refuses an unprivileged `gid_map` until setgroups(2) is denied.
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)


def mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    """mount(2). Raises OSError."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), None), f"mount {target}")


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of Linux: four 64-bit fields."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def read_only(target: str, *, on: bool, deep: bool) -> None:
    """mount_setattr(2): make the mount read-only or writable. deep: with all mounts below it. Raises OSError."""
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
    """Isolate pid 1 of the namespaces: only `folder` is writable, and only processes of the namespace are visible."""
    # Order matters. Mounts become private first, or the changes would reach the host. The folder becomes a mount of its
    # own before all is read-only, because the read-only attribute holds per mount.
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount(folder, folder, None, MS_BIND)
    read_only("/", on=True, deep=True)
    read_only(folder, on=False, deep=False)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # a container that masks parts of /proc forbids a new /proc: show an empty one, not the host's
        mount("none", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)


def bound(what: int, value: float) -> None:
    """Set one resource limit (soft and hard) of this process and its children. An existing lower hard limit stays."""
    hard = resource.getrlimit(what)[1]
    least = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(what, (least, least))


def limit(order: Order) -> None:
    """Set all resource limits except that of file size, which `become` sets after the order's file is written."""
    # CPU time has 2 s more than the wall clock, so that a command with one thread reaches the wall clock's limit first.
    seconds = int(order["seconds"]) + 2
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_NPROC, order["processes"]),
    ):
        bound(what, value)


def settle(order: Order) -> None:
    """Enter the folder and write the order's file, with the rights of the command.

    Only an earlier command can have put an obstacle there. So a failure is written to stderr as output of this command
    and exits with 1; it is no failure of the jail.
    """
    name, text = order["file"] or ("", "")
    doing = "its working directory can't be entered"
    try:
        os.chmod(order["folder"], 0o700)
        os.chdir(order["folder"])
        if name:
            doing = f"{name} can't be written"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            # "x" refuses an existing path, so a link that an earlier command made is never followed.
            with open(name, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
    except OSError as error:
        os.write(2, f"{doing}: {error.strerror}\n".encode())
        os._exit(1)


def become(order: Order) -> None:
    """Replace this process by the command, without privileges and with its limits. Never returns."""
    # Order matters. Inherited descriptors are closed first, so that the command reaches no file of the parent. The
    # groups change before the user, because only root can change groups. The folder is entered last, when this process
    # has no more rights than the commands that filled it. The report pipe closes at `execv`.
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


def tell(order: Order, what: dict[str, str | int | bool | None]) -> None:
    """Send a JSON line to the parent of the jail by the report pipe, which the command doesn't have.

    The parent reads the first line only. A parent that is gone is no error.
    """
    with contextlib.suppress(OSError):
        os.write(order["report"], json.dumps(what).encode() + b"\n")


def wait_for(child: int, seconds: float) -> int | None:
    """Wait for a child. Returns its exit code (negative: the signal), or None if it hasn't ended after `seconds`.

    Also collects all other children that end, because init and a subreaper inherit every orphan: uncollected zombies
    would count towards the limit of processes.
    """
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
    """The ids of a process's children, read from /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            # The command name in parentheses may hold any character, so the fields are those after the last ")".
            if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def kill_all() -> None:
    """Kill every descendant, without namespaces, within `KILL_SECONDS`.

    The jail is a subreaper, so each orphan becomes its child and is found in a later round. Children are stopped before
    any of them is killed: a stopped process can't fork a new one while the others are killed.
    """
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


def run_apart(order: Order) -> None:
    """Run the order with namespaces. This process waits for init; the kernel kills all other processes with init."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the parent gave up: SystemExit, so that cleanup runs
    init = os.fork()
    if init == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # If the jail is killed with SIGKILL it can't clean up; this signal then ends init and so every process in it.
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


def run_beside(order: Order) -> None:
    """Run the order without namespaces, as a subreaper that kills all descendants at the end."""
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the parent gave up: SystemExit, so that cleanup runs
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
    """How many processes and threads the user has now. RLIMIT_NPROC counts them too, so they are added to the limit."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def main(order: Order) -> None:
    """Carry out the order. If isolation is required and the system forbids namespaces, report that with `tell`."""
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
        order["processes"] += processes_of(os.getuid())
    (run_apart if apart else run_beside)(order)


if __name__ == "__main__":
    received = json.load(sys.stdin)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    main(received)
