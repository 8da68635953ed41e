"""The process that holds one sandbox: a script, started as `python -I -S sandbox_launcher.py` with a socket as stdin.

    runner ── launcher (holds the box) ── keeper, one for each request ── bwrap or podman ── the snippet

The box is a file system in memory, of bounded size. It has the folders that a snippet may write to. It exists only in
the launcher's mount namespace, so it disappears when the sandbox's last process ends, however that happens. Each
message on stdin carries a socket with one request. The first request sets the box up. For every later request, the
launcher forks a keeper. The keeper ends a snippet when its time is up or the runner closes the request's socket. In
folders that snippets wrote, it acts as the snippets' user and follows no links. Only the standard library is imported.
This happens before privileges are dropped, because the snippets' user may not be able to read the interpreter's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import subprocess
import time
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID_NODEV, MS_REC_PRIVATE = 2 | 4, 16384 | 1 << 18
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
KEYCTL, JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
SNIPPET_UID = 65534
"""The user id of a snippet, as it sees itself."""
START_SECONDS = 30.0
"""Time limit for the start of a snippet's namespaces, in seconds. The snippet's own time limit begins afterwards."""
KILL_SECONDS = 20.0
"""Time limit for terminating all of a snippet's processes, in seconds. It is generous because machines may be busy."""
POLL_SECONDS = 0.02
Order = dict[str, Any]
"""Instructions from `LocalBackend`. `user` is the user id to take, or None. `owner` is the snippets' id in the box."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call to libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# The box


def set_up(order: Order) -> None:
    """Give up the runner's privileges and keys, and make the box. Raises OSError if that fails."""
    with contextlib.suppress(OSError, KeyError):
        # The runner's session keyring may hold Kerberos tickets and keys for encrypted folders, so join an empty
        # keyring. Joining fails if the kernel has no keys or the user's quota is used up. That does no harm, because
        # the filter refuses keyctl anyway.
        check(libc.syscall(KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None), "keyctl")
    box: str = order["box"]
    if order["backend"] == "bubblewrap":
        become(order["user"])
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else /proc/self belongs to root after `become`
        new_user(os.getuid(), os.getgid())
    if order["backend"] != "none":
        check(libc.unshare(CLONE_NEWNS), "unshare")
        check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None), "mount /")
        options = f"size={order['disk']},nr_inodes={order['entries']},mode=755".encode()
        flags = ctypes.c_ulong(MS_NOSUID_NODEV)
        check(libc.mount(b"tapereel", box.encode(), b"tmpfs", flags, options), f"mount {box}")
    for name in ("work", "tmp", "shm"):  # a snippet's working directory, /tmp and /dev/shm
        os.mkdir(f"{box}/{name}", 0o700)
        os.chown(f"{box}/{name}", order["owner"], order["owner"])
    for name, text in order["given"].items():  # files that the backend reads
        with open(f"{box}/{name}", "wb") as file:
            file.write(text.encode("latin-1"))
    for name, link in order["root"].items():  # podman's root directory, owned by the container's root
        os.makedirs(f"{box}/root", exist_ok=True)
        os.symlink(link, f"{box}/root/{name}") if link else os.mkdir(f"{box}/root/{name}")
        for path in (f"{box}/root", f"{box}/root/{name}"):
            os.chown(path, order["owner"] - SNIPPET_UID, order["owner"] - SNIPPET_UID, follow_symlinks=False)
    if order["backend"] == "none":
        become(order["user"])


def become(user: int | None) -> None:
    """Give up root and become another user. None keeps the present user."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def new_user(uid: int, gid: int) -> None:
    """Enter a new user namespace, which maps the present namespace's `uid` and `gid` to SNIPPET_UID.

    The kernel counts processes by user and namespace, so an RLIMIT_NPROC that is set afterwards doesn't count any
    process outside the new namespace.
    """
    check(libc.unshare(CLONE_NEWUSER), "this system allows no user namespaces: unshare")
    # `setgroups` comes first, because the kernel refuses an unprivileged `gid_map` until setgroups(2) is denied.
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{SNIPPET_UID} {uid} 1"),
        ("gid_map", f"{SNIPPET_UID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(line)


# Files


def open_below(order: Order, path: str, flags: int, *, make: bool) -> int:
    """Open a file below `work`. Raises OSError if a folder in `path` is a link.

    Without `make`, the file itself must not be a link either. With `make`, the folders are made, and the file is
    replaced, even if it is a link, pipe or socket.
    """
    os.chmod(f"{order['box']}/work", 0o700)  # a snippet may have locked it
    here = os.open(f"{order['box']}/work", os.O_RDONLY | os.O_DIRECTORY)
    *parts, name = path.split("/")
    for part in parts:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=here)
        here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    if make:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=here)  # a link, pipe or socket is removed, never opened
    # With O_NONBLOCK, opening a pipe doesn't wait.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o600, dir_fd=here)


def write(order: Order, path: str, content: bytes) -> None:
    """Create or replace the file. Raises OSError if that fails."""
    with open(open_below(order, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True), "wb") as file:
        file.write(content)


def read(order: Order, path: str, limit: int) -> bytes:
    """Return at most `limit` bytes of the file. Raises OSError if that fails or if it isn't a plain file."""
    opened = open_below(order, path, os.O_RDONLY, make=False)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        raise OSError(errno.EINVAL, "Not a plain file")
    with open(opened, "rb") as file:
        return file.read(limit)


# Snippets


def enter(order: Order, cgroup: int | None) -> None:
    """Put the command's process into its cgroup and namespace, and set its limits. Raises OSError if that fails."""
    if cgroup is not None:
        os.write(cgroup, b"0")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")  # if the machine's memory runs out, a snippet ends first, not the training run
    if order["backend"] == "podman":
        return  # podman needs more than a snippet may have, so its arguments set the container's limits
    others = 2  # bubblewrap and its first process are counted too
    if order["backend"] == "none":
        os.chmod(f"{order['box']}/work", 0o700)
        os.chdir(f"{order['box']}/work")
        others = processes_of(os.getuid()) - 1
    else:
        new_user(SNIPPET_UID, SNIPPET_UID)
    for what, value in (
        # The CPU time may exceed the time limit by 2 s, so that a command with one thread reaches the time limit first.
        (resource.RLIMIT_CPU, int(order["seconds"]) + 2),
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_FSIZE, order["disk"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_NPROC, order["processes"] + others),
    ):
        hard = resource.getrlimit(what)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (least, least))


def run(order: Order, connection: socket.socket, request: Order, cgroup: int | None) -> tuple[Order, bytes]:
    """Run a command until it ends, its time is up or the connection is closed. Return how it ended, and its output."""
    backend, pidfile = order["backend"], f"{order['box']}/pid-{os.getpid()}"
    passed: list[int] = []
    if backend != "podman":  # makes orphans children of this process, which then learns when the last one ends
        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    status, status_end = os.pipe()
    if backend == "bubblewrap":
        passed = [os.open(f"{order['box']}/filter", os.O_RDONLY), status_end]
    places = {"{pidfile}": pidfile} | dict(zip(("{filter}", "{status}"), map(str, passed), strict=False))
    child = subprocess.Popen(
        [places.get(word, word) for word in order["command"]] + request["command"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=passed,
        start_new_session=True,
        # podman inherits this process's variables: those in the order, and those that `podman unshare` added.
        env=None if backend == "podman" else order["environment"],
        preexec_fn=functools.partial(enter, order, cgroup),  # safe: this process has one thread
    )
    os.close(status_end)
    assert child.stdout is not None
    output, ended = child.stdout.fileno(), os.pidfd_open(child.pid)
    for pipe in (output, status):
        os.set_blocking(pipe, False)
    kept, printed, said = bytearray(), 0, b""
    stopped, began, until = "", False, time.monotonic() + START_SECONDS
    while not stopped:
        if not began:
            said += available(status)
            began = {"bubblewrap": b"\n" in said, "podman": os.path.exists(pidfile), "none": True}[backend]
            until = time.monotonic() + order["seconds"] if began else until
        left = max(0.0, until - time.monotonic())
        # Nothing more is sent on the connection, so it becomes readable when the runner closes it.
        ready = select.select([output, connection, ended], [], [], left if began else min(left, POLL_SECONDS))[0]
        if output in ready:
            chunk = available(output)
            if not chunk:
                time.sleep(POLL_SECONDS)  # the command closed its output but is still running
            kept += chunk[: request["limit"] - len(kept)]
            printed += len(chunk)
        if ended in ready or connection in ready:
            break
        stopped = "" if left else "time" if began else "start"
    code = end(order, child, ended, pidfile)
    while chunk := available(output):
        kept += chunk[: request["limit"] - len(kept)]
        printed += len(chunk)
    facts: Order = {}
    for line in (said + available(status)).splitlines():
        facts |= json.loads(line)
    # A signal that ended bwrap came from an administrator or, for lack of memory, from the kernel.
    done = {"bubblewrap": "exit-code" in facts or code > 128, "podman": os.path.exists(pidfile), "none": True}[backend]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pidfile)
    if stopped == "start" or not (done or stopped):
        what = "it did not start in time" if stopped else f"exit code {code}"
        return {"failed": f"{what}: {kept[-500:].decode(errors='replace')}"}, b""
    return {"more": printed - len(kept), "code": None if stopped else facts.get("exit-code", code)}, bytes(kept)


def available(pipe: int) -> bytes:
    """Return the bytes that can be read from a pipe now. There are none if the pipe is empty or has ended."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def end(order: Order, child: subprocess.Popen[bytes], ended: int, pidfile: str) -> int:
    """End the command, if it is still running, and all its processes. Return its exit code, or 128 + n for signal n."""
    until = time.monotonic() + KILL_SECONDS
    # podman's client ends after the first process in its container. When that process ends, the kernel ends all others.
    while order["backend"] == "podman" and time.monotonic() < until and not select.select([ended], [], [], 0)[0]:
        with contextlib.suppress(OSError, ValueError):
            with open(pidfile, encoding="utf-8") as file:
                first = int(file.read())
            if os.stat(f"/proc/{first}").st_uid == order["owner"]:  # else the number now belongs to another process
                os.kill(first, signal.SIGKILL)
        select.select([ended], [], [], POLL_SECONDS)
    child.kill()
    code = child.wait()
    while order["backend"] != "podman" and time.monotonic() < until:
        # A namespace ends with its first process. Otherwise, the next pass finds the children of killed processes.
        if order["backend"] == "none":
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
                for pid in map(int, file.read().split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(POLL_SECONDS / 10)
        except ChildProcessError:
            break
    return 128 - code if code < 0 else code


def processes_of(uid: int) -> int:
    """Return how many processes and threads the user has now. Without a new namespace, RLIMIT_NPROC counts them all."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


# Requests


def keep(order: Order | None, connection: socket.socket, cgroup: int | None) -> Order | None:
    """Answer a request, which is a line of JSON and then `size` bytes. Return the request if it has set up the box."""
    stream = connection.makefile("rb")
    request: Order = json.loads(stream.readline())
    content, data, reply = stream.read(request["size"]), b"", {}
    try:
        if order is None:
            set_up(request)
        elif request["op"] == "run":
            reply, data = run(order, connection, request, cgroup)
        else:
            become(order["owner"] if order["backend"] == "podman" else None)
            if request["op"] == "write":
                write(order, request["path"], content)
            else:
                data = read(order, request["path"], request["limit"])
    except OSError as error:
        reply = {"failed" if request.get("op") == "run" else "refused": error.strerror or str(error)}
    except Exception as error:
        reply = {"failed": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):  # a runner that closed the connection doesn't read the answer
        connection.sendall(json.dumps(reply | {"size": len(data)}).encode() + b"\n" + data)
    return request if order is None and not reply else None


def main() -> None:
    """Serve requests until the runner closes its end of stdin or is gone. Then wait for the keepers."""
    control = socket.socket(fileno=0)
    order: Order | None = None
    while (received := socket.recv_fds(control, 1, 2))[0]:
        descriptors = received[1]
        with socket.socket(fileno=descriptors[0]) as connection:
            if order is None:
                order = keep(None, connection, None)
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers that end
            elif os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                keep(order, connection, descriptors[1] if descriptors[1:] else None)
                os._exit(0)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # because SIGCHLD is ignored, this returns when the last child has ended


if __name__ == "__main__":
    main()
