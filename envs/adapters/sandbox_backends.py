"""Backends that run a sandbox's snippets: bubblewrap, podman, processes without isolation, or a user's class.

`LocalBackend` runs them on this machine through `sandbox_launcher.py`. Neither this process nor a shell interprets the
content of a snippet, and this process never opens a file that a snippet wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import sandbox_launcher, seccomp
from .tools import ToolsLost, cut

GRACE_SECONDS = sandbox_launcher.START_SECONDS + sandbox_launcher.KILL_SECONDS
"""Seconds that a snippet may need to start and to end, in addition to its own time."""
FIRST_UID = 1 << 20
"""The first user id for snippets on the machine, if this process is root. It is above the ids of the system's users."""
BYTES_PER_FILE = 16 << 10
"""The folders may hold one file, folder or link for this many bytes of `disk`."""
_UID = str(sandbox_launcher.SNIPPET_UID)
_PLAIN = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_VARIABLES = {**_PLAIN, "HOME": "/work", "TMPDIR": "/tmp"}
"""The environment of snippets. It contains no variables of this process, because those may hold secrets."""
_PODMANS = ("HOME", "USER", "PATH", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS")
"""Variables of this process that podman itself reads. It passes none of them to a snippet."""
_FOLDERS = {"work": "/work", "tmp": "/tmp", "shm": "/dev/shm"}
"""For each folder in the box (`sandbox_launcher.py`), the path at which snippets see it."""
_ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/ssl/certs")
"""The files in /etc that programs in /usr need."""


class NoSandbox(ToolsLost):
    """No backend provides the required isolation, or a backend failed. This is an error of the environment."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a snippet."""

    output: str
    """Standard output and standard error, interleaved as written, and cut after `limit` characters with a note."""
    code: int | None
    """The exit code, or 128 + n if signal n killed the process. It is None if the time limit was reached."""

    def __str__(self) -> str:
        if self.code is None:
            return f"{self.output}\n[stopped: out of time]".lstrip("\n")
        killer = self.code - 128
        by = f", killed by {signal.Signals(killer).name}" if killer in list(signal.Signals) else ""
        return self.output if self.code == 0 else f"{self.output}\n[exit code {self.code}{by}]".lstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits that a sandbox asks its backend to enforce. `Sandbox` describes the fields."""

    seconds: float
    memory: int
    processes: int
    disk: int
    limit: int
    paths: tuple[str, ...] = ()
    python: str | None = None


class SandboxBackend(Protocol):
    """One sandbox. `backend="module:name"` names a function or class that makes a backend from `Bounds`."""

    python: str
    """The Python interpreter, as a path inside the sandbox."""
    memory: str
    """What `Bounds.memory` limits: `all processes` of a snippet together (a cgroup), or `each process` separately."""

    async def start(self) -> None:
        """Make the sandbox, with an empty working directory. Raises NoSandbox if that fails."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Create or replace a file. `path` is relative to the working directory.

        Raises OSError if something created by a snippet is in the way.
        """
        ...

    async def run(self, command: Sequence[str]) -> Ran:
        """Run a command and end all its processes. Raises NoSandbox if the sandbox itself fails."""
        ...

    async def read(self, path: str, limit: int) -> bytes:
        """Return at most `limit` bytes of a file. Raises OSError if `path` isn't a plain file.

        The method neither waits nor follows links.
        """
        ...

    async def stop(self) -> None:
        """End all processes and delete all files. This method is also called if `start` failed."""
        ...


class LocalBackend:
    """A sandbox on this machine. `kind` is `bubblewrap`, `podman`, `podman:IMAGE` or `none`."""

    def __init__(self, kind: str, bounds: Bounds) -> None:
        self._kind, _, self._image = kind.partition(":")
        self._bounds = bounds
        self.memory, self.python = "each process", bounds.python or "python3"
        self._box: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._requests: set[asyncio.StreamWriter] = set()
        self._cgroups: set[Path] = set()

    async def start(self) -> None:
        if sys.platform != "linux":
            raise NoSandbox(f"the sandbox needs Linux, but this system is {sys.platform}: run it in a Linux container")
        self._box = Path(tempfile.mkdtemp(prefix="tapereel-sandbox-"))
        self._box.chmod(0o711)  # if this user is root, snippets traverse it as another user
        try:
            order = await asyncio.to_thread(self._order, self._box)
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                unshare = [_program("podman"), "unshare"] if self._kind == "podman" and os.getuid() != 0 else []
                command = [*unshare, sys.executable, "-I", "-S", sandbox_launcher.__file__]
                none, env = subprocess.DEVNULL, order["environment"]
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    cwd="/",
                    env=env,
                    stdin=theirs.fileno(),
                    stdout=none,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            async with asyncio.timeout(GRACE_SECONDS):
                await self._ask(order)
        except (OSError, TimeoutError) as error:
            await self.stop()
            said = await self._process.stderr.read(500) if self._process and self._process.stderr else b""
            raise NoSandbox(f"{self._kind} can't start: {error} {said.decode(errors='replace')}".rstrip()) from error

    def _order(self, box: Path) -> dict[str, Any]:
        """Return the launcher's instructions for all snippets, including the files that the backend needs."""
        bounds, root = self._bounds, os.getuid() == 0
        user = FIRST_UID + box.stat().st_ino % (1 << 30) if root and self._kind != "podman" else None
        order: dict[str, Any] = {"backend": self._kind, "box": str(box), "user": user, "command": [], "given": {}}
        order |= {name: getattr(bounds, name) for name in ("seconds", "memory", "processes", "disk")}
        order |= {"entries": max(1000, bounds.disk // BYTES_PER_FILE), "root": {}}
        self.python, prefixes = (self.python, ()) if self._image else _interpreter(bounds.python)
        if self._kind == "none":
            order["owner"] = os.getuid() if user is None else user
            return order | {"environment": _PLAIN | {"HOME": f"{box}/work", "TMPDIR": f"{box}/tmp"}}
        binds = _binds((*prefixes, *(() if self._image else _ETC), *bounds.paths), image=bool(self._image))
        order["given"] = {
            "passwd": f"sandbox:x:{_UID}:{_UID}::/work:/bin/sh\n",
            "group": f"sandbox:x:{_UID}:\n",
        }
        order |= {"owner": sandbox_launcher.SNIPPET_UID, "environment": {"PATH": os.environ.get("PATH", "")}}
        if self._kind == "bubblewrap":
            order["given"]["filter"] = seccomp.program().decode("latin-1")
            self.memory = "all processes" if _cgroup_parent() else "each process"
            return order | {"command": _bubblewrap(box, binds)}
        order["given"]["filter"] = json.dumps(seccomp.profile())
        order["environment"] = {name: os.environ[name] for name in _PODMANS if name in os.environ}
        order["environment"]["CONTAINERS_CONF"] = os.devnull  # a user's file may add mounts, devices and variables
        base = FIRST_UID if root else 0  # the user id of the container's root on the host
        order |= {"owner": base + sandbox_launcher.SNIPPET_UID, "root": {} if self._image else _roots()}
        self.memory = "all processes" if _podman_bounds_memory() else "each process"
        return order | {"command": _podman(box, binds, bounds, self._image, base)}

    async def _ask(self, request: dict[str, Any], content: bytes = b"", cgroup: int | None = None) -> dict[str, Any]:
        """Send a request to the launcher and return its answer. The bytes after the answer are added as `data`. Raises
        OSError if the launcher refuses the request, and NoSandbox if it fails or is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._control is None:
                raise NoSandbox("the sandbox is closed")
            with contextlib.suppress(OSError):  # if the launcher has ended, the read below fails
                socket.send_fds(self._control, [b"."], [theirs.fileno(), *([] if cgroup is None else [cgroup])])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._requests.add(writer)
        try:
            writer.write(json.dumps(request | {"size": len(content)}).encode() + b"\n" + content)
            reply: dict[str, Any] = json.loads(await reader.readline())
            reply["data"] = await reader.readexactly(reply["size"])
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise NoSandbox(f"the launcher of {self._kind} ended without an answer") from error
        finally:
            writer.close()
            self._requests.discard(writer)
        if "failed" in reply:
            raise NoSandbox(f"{self._kind} failed: {reply['failed']}")
        if "refused" in reply:
            raise OSError(reply["refused"])
        return reply

    async def write(self, path: str, content: bytes) -> None:
        await self._ask({"op": "write", "path": path}, content)

    async def read(self, path: str, limit: int) -> bytes:
        return (await self._ask({"op": "read", "path": path, "limit": limit}))["data"]

    async def run(self, command: Sequence[str]) -> Ran:
        limit, folder, joined = self._bounds.limit, None, None
        try:
            if self._kind == "bubblewrap" and (parent := _cgroup_parent()):
                folder = _new_cgroup(parent, self._bounds.memory + self._bounds.disk)
                joined = os.open(folder / "cgroup.procs", os.O_WRONLY)
            async with asyncio.timeout(self._bounds.seconds + GRACE_SECONDS):
                # A character in UTF-8 has at most 4 bytes.
                reply = await self._ask({"op": "run", "command": list(command), "limit": 4 * limit}, cgroup=joined)
        except TimeoutError as error:
            raise NoSandbox(f"{self._kind} did not end a snippet in time") from error
        finally:
            if joined is not None:
                os.close(joined)
            if folder is not None:
                # The cgroup is added to the set only now. Every call that ends removes the empty cgroups in the set,
                # and this cgroup was empty until its snippet joined it.
                self._cgroups.add(folder)
            self._remove_cgroups()
        text: str = reply["data"].decode("utf-8", "replace")
        if not reply["more"]:
            return Ran(cut(text, limit), reply["code"])
        left = len(text) - limit + reply["more"]
        return Ran(f"{text[:limit]}\n[cut here: about {left:,} more characters were printed]", reply["code"])

    async def stop(self) -> None:
        for writer in self._requests:
            writer.close()
        if self._control is not None:
            self._control.close()
        self._control = None
        if self._process is not None:
            try:
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._process.wait()  # the launcher waits for its keepers, which wait for snippets' processes
            except TimeoutError:
                self._process.kill()
        self._remove_cgroups()
        box, self._box = self._box, None
        if box is not None:
            await asyncio.to_thread(_delete, box)

    def _remove_cgroups(self) -> None:
        """Remove the cgroups that have no process left."""
        for folder in list(self._cgroups):
            with contextlib.suppress(OSError):
                folder.rmdir()
                self._cgroups.remove(folder)


def _delete(box: Path) -> None:
    """Delete the box. Raises NoSandbox if something is left of it.

    With isolation, the box is an empty folder. Deleting it needs neither a process nor a descriptor, so it works even
    if they are used up. Without isolation, it is a tree on disk that snippets made, and `rm` deletes it. For users
    other than root, `find` first makes the folders readable and writable. Both programs follow no links, and deep paths
    or many files don't stop them.
    """
    with contextlib.suppress(OSError):
        return box.rmdir()
    if os.getuid() != 0:
        unlock = ["find", box, "-type", "d", "!", "-perm", "-700", "-execdir", "chmod", "700", "{}", ";"]
        subprocess.run(unlock, env=_PLAIN, capture_output=True)
    done = subprocess.run(["rm", "-rf", "--", box], capture_output=True, text=True, errors="replace")
    if box.exists():
        raise NoSandbox(f"the sandbox's folder {box} couldn't be deleted: {done.stderr[-500:]}")


# The files that a snippet sees


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise NoSandbox(f"the program {name} is missing")
    return found


@functools.cache
def _interpreter(python: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter and the folders that it needs. None means the current interpreter. If this process is root
    and other users can't run it, None means the system's interpreter."""
    if python is None:
        way = (Path(sys.executable).resolve(), *Path(sys.executable).resolve().parents)
        ours = os.getuid() != 0 or all(place.stat().st_mode & stat.S_IXOTH for place in way)
        python = sys.executable if ours else shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
    code = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')"
    asked = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    if asked.returncode != 0:
        raise NoSandbox(f"python: {python} doesn't run: {asked.stderr[-300:]}")
    path, *prefixes = asked.stdout.splitlines()
    return path, (*prefixes, str(Path(path).parent), str(Path(path).resolve().parent))


def _roots() -> dict[str, str]:
    """Return the entries of the root directory. The value of a link is its target. The value of a folder is empty."""
    system = [Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")]
    links = {path.name: os.readlink(path) if path.is_symlink() else "" for path in system if path.exists()}
    return links | dict.fromkeys(("proc", "dev", "sys", "tmp", "run", "home", "work", "etc"), "")


def _binds(paths: Sequence[str], *, image: bool) -> list[str]:
    """Return the host's paths that a snippet may read. A path that lies below an earlier one is left out.

    Raises NoSandbox for a path that exposes too much or is relative. An image brings its own system folders.
    """
    system = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
    found = [name for name in system if not image and Path(name).is_dir() and not Path(name).is_symlink()]
    for text in paths:
        real = Path(text).resolve()
        private = [Path(name) for name in (Path.home(), "/tmp", "/var", "/run", "/dev", "/proc", "/sys")]
        exposed = [p for p in private if p.is_relative_to(real) or (p in private[3:] and real.is_relative_to(p))]
        if exposed or not Path(text).is_absolute():
            why = f"it shows {exposed[0]}, with sockets or private files" if exposed else "it is a relative path"
            raise NoSandbox(f"{text!r} can't be shown to a snippet: {why}; name the folder that the snippet needs")
        if real.exists() and not any(Path(text).is_relative_to(p) for p in found):
            found.append(text)
    return found


def _bubblewrap(box: Path, binds: list[str]) -> list[str]:
    """Return the command line of bubblewrap, up to the snippet's command."""
    words = [_program("bwrap"), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    words += ["--new-session", "--hostname", "sandbox", "--uid", _UID, "--gid", _UID, "--chdir", "/work"]
    words += ["--clearenv", *(word for pair in _VARIABLES.items() for word in ("--setenv", *pair))]
    for name, link in _roots().items():
        words += ["--symlink", link, f"/{name}"] if link else ["--dir", f"/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for masked in filter(os.path.exists, ("/proc/keys", "/proc/key-users")):
        words += ["--ro-bind", os.devnull, masked]
    words += [word for name, place in _FOLDERS.items() for word in ("--bind", f"{box}/{name}", place)]
    words += [word for path in binds for word in ("--ro-bind", path, path)]
    words += [word for name in ("passwd", "group") for word in ("--ro-bind", f"{box}/{name}", f"/etc/{name}")]
    # The root is the last to become read-only, because bubblewrap makes the mount points in it.
    return [*words, "--remount-ro", "/", "--seccomp", "{filter}", "--json-status-fd", "{status}", "--"]


def _podman(box: Path, binds: list[str], bounds: Bounds, image: str, base: int) -> list[str]:
    """Return podman's command line, up to the snippet's command. `base` is the host's id for the container's root."""
    runtime = shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or _program("crun")
    # The snippet writes directly to this process's pipe, as descriptor 3. If podman forwarded the output, on a busy
    # machine it might lose the output of a command that ends at once.
    words = ["/bin/sh", "-c", 'exec "$@" 3>&1', "sh", _program("podman"), "--runtime", runtime, "run"]
    words += ["--rm", "--preserve-fds=1", "--pidfile", "{pidfile}", "--log-driver", "none"]
    words += ["--network", "none", "--no-hosts", "--hostname", "sandbox", "--http-proxy=false", "--unsetenv-all"]
    words += ["--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--user", f"{_UID}:{_UID}"]
    # The container has its own user namespace, so that its process limit doesn't count other containers' processes.
    words += ["--uidmap", f"0:{base}:65536", "--gidmap", f"0:{base}:65536", "--workdir", "/work"]
    words += ["--security-opt", "no-new-privileges", "--security-opt", f"seccomp={box}/filter"]
    words += ["--security-opt", "mask=/proc/keys:/proc/key-users:/sys", "--oom-score-adj", "1000"]
    limits = {"cpu": int(bounds.seconds) + 2, "fsize": bounds.disk, "core": 0, "nofile": 256, "nproc": bounds.processes}
    words += [word for name, value in limits.items() for word in ("--ulimit", f"{name}={value}:{value}")]
    if _podman_bounds_memory():
        words += ["--memory", str(bounds.memory + bounds.disk), "--memory-swap", str(bounds.memory + bounds.disk)]
    words += [word for name, value in _VARIABLES.items() for word in ("--env", f"{name}={value}")]
    volumes = [f"{box}/{name}:{place}" for name, place in _FOLDERS.items()] + [f"{path}:{path}:ro" for path in binds]
    volumes += [] if image else [f"{box}/{name}:/etc/{name}:ro" for name in ("passwd", "group")]
    words += [word for volume in volumes for word in ("--volume", volume)]
    words += [image] if image else ["--rootfs", f"{box}/root"]
    # podman can't limit the address space, so the shell does. The shell gets the command as its arguments and runs it
    # without interpreting it.
    script = 'ulimit -v "$1"; shift; exec >&3 3>&- 2>/dev/null; "$@" 2>&1; exit $?'
    return [*words, "/bin/sh", "-c", script, "sh", str(bounds.memory // 1024)]


# Memory of all processes


@functools.cache
def _podman_bounds_memory() -> bool:
    """Return whether podman can limit a container's memory. This needs root, or cgroups (v2) delegated to the user."""
    form = "{{.Host.CgroupsVersion}} {{.Host.CgroupControllers}}"
    asked = subprocess.run([_program("podman"), "info", "--format", form], capture_output=True, text=True)
    return "memory" in asked.stdout and (os.getuid() == 0 or asked.stdout.startswith("v2"))


def _new_cgroup(parent: Path, memory: int) -> Path:
    """Return a new cgroup. Its processes may use `memory` bytes together, and no swap. Raises OSError on failure."""
    folder = Path(tempfile.mkdtemp(prefix=f"tapereel-{os.getpid()}-", dir=parent))
    v1 = (folder / "memory.limit_in_bytes").exists()
    swap = folder / ("memory.memsw.limit_in_bytes" if v1 else "memory.swap.max")
    try:
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(memory))
        if swap.exists():
            swap.write_text(str(memory if v1 else 0))
    except OSError:
        folder.rmdir()
        raise
    return folder


@functools.cache
def _cgroup_parent() -> Path | None:
    """Return a cgroup below which this process can make cgroups and move processes into them. None if none exists.

    The search runs only once.
    """
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
        for parent in (own, *own.parents) if controllers in ("", "memory") else ():
            if parent in Path("/sys/fs/cgroup", controllers).parents:
                break
            with contextlib.suppress(OSError), subprocess.Popen(["sleep", "60"]) as moved:
                try:
                    folder = _new_cgroup(parent, 1 << 30)
                    (folder / "cgroup.procs").write_text(str(moved.pid))
                finally:
                    moved.kill()
                    moved.wait()
                for left in parent.glob("tapereel-*-*"):  # this folder, and those that killed processes left behind
                    if left == folder or not Path("/proc", left.name.split("-")[1]).exists():
                        left.rmdir()
                return parent
    return None
