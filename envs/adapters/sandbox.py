"""A sandbox: tools that run a model's Python and shell snippets, isolated from the machine and within limits.

`Sandbox` documents the guarantees and what they don't cover. The backends are in `sandbox_backends.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, cast

from pydantic import JsonValue

from ...tapes.common.text import DOCS
from ..environment import Effect
from ..load_named import load_named
from .sandbox_backends import GRACE_SECONDS, Bounds, LocalBackend, NoSandbox, Ran, SandboxBackend
from .tools import CHARACTERS, Tool, ToolFailed, tool

LONGEST_WORD = (128 << 10) - 1
"""The system's size limit for one argument of a command (for example a shell command), in bytes."""
BACKENDS = ("bubblewrap", "podman")
"""The backends that `backend=None` tries, in this order."""
_INSTALL = (
    "install bubblewrap (Debian, Ubuntu: apt install bubblewrap) or podman (apt install podman runc uidmap) and allow "
    f"user namespaces (see {DOCS / 'how-to' / 'tools.md'}); or write isolation='none' to run snippets with your own "
    "rights"
)


class Sandbox:
    """A source of two tools, `python(code)` and `shell(command)`, for one episode: `ToolEnvironment([Sandbox()])`.

    A snippet runs as user 65534 in its own namespaces. It sees no network except its own loopback interface, no
    processes except its own, none of this process's environment variables and none of this user's keys. Its file system
    has `/usr`, the interpreter and `paths`, all read-only, and the folders `/work`, `/tmp` and `/dev/shm`. A filter
    refuses system calls that would expose the kernel. The folders `/work`, `/tmp` and `/dev/shm` are kept in memory
    until the episode ends and hold `disk` bytes in total. When a snippet ends, all its processes are killed.

    Some things are not guaranteed. The sandbox is not a virtual machine, so a flaw in the kernel breaks it. Without a
    writable cgroup, `memory` limits each process separately, so all processes together may use `processes` times as
    much. `isolation="none"` limits only the time, the number of processes, the memory of each process and the size of
    each file. A snippet can then read what this user may read (as root, only what every user may read), use the network
    and signal this user's processes. The tape records an episode's backend, isolation and memory bound
    (`ToolOffer.sources`).
    """

    effect: Effect = "pure"
    """A snippet changes only its own folder, and each episode gets a new folder."""

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory: int = 512 << 20,
        processes: int = 32,
        disk: int = 128 << 20,
        limit: int = CHARACTERS,
        tools: Sequence[Literal["python", "shell"]] = ("python", "shell"),
        files: Mapping[str, str | bytes] | None = None,
        paths: Sequence[str] = (),
        python: str | None = None,
        isolation: Literal["required", "none"] = "required",
        backend: str | None = None,
    ) -> None:
        """
        seconds: Time limit for a snippet, in seconds of wall-clock time.
        memory: Memory limit for a snippet, in bytes.
        processes: The maximum number of processes and threads that a snippet has at once.
        disk: Size limit for all files together, in bytes. The number of files is limited to one per 16 KiB of `disk`,
            but at least 1000 files are allowed.
        limit: The maximum number of characters in the output.
        files: The initial files in the folder.
        paths: Further absolute paths that a snippet may read.
        python: The interpreter for the tool `python`. None means the current interpreter. If this user is root and
            other users can't run it, None means the system's. In an image, None means the image's `python3`.
        isolation: With `required`, the sandbox refuses to run if no backend passes its self-test.
        backend: `bubblewrap`, `podman` (with this machine's `/usr`), `podman:IMAGE`, or `module:name` for a function
            that makes a `SandboxBackend` from `Bounds`. None means bubblewrap if it works, otherwise podman.
        """
        if isolation not in ("required", "none"):
            raise ValueError(
                f"isolation is {isolation!r}; write 'required' (the default), or 'none' to run without isolation"
            )
        if isolation == "none" and backend is not None:
            raise ValueError(f"isolation='none' uses no backend: leave out backend={backend!r}")
        if backend is not None and backend not in BACKENDS and ":" not in backend:
            raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}, podman:IMAGE, module:name")
        bounds = {"seconds": seconds, "memory": memory, "processes": processes, "disk": disk}
        for name, value in bounds.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        self._bounds = Bounds(**bounds, limit=limit, paths=tuple(paths), python=python)
        self._limit, self._names, self._files = limit, tuple(tools), dict(files or {})
        for name in self._files:
            _inside(name)
        self._isolation, self._named = isolation, backend
        self._backend: SandboxBackend | None = None
        self._count = 0
        self.described: dict[str, JsonValue] = {}
        """What the tape records about this source: backend, isolation, memory. It is empty before `open`."""

    async def open(self) -> Sequence[Tool]:
        name = "none" if self._isolation == "none" else await _working(self._named)
        self._backend = _make(name, self._bounds)
        await self._backend.start()
        self.described = {
            "sandbox": name,
            "isolation": self._isolation,
            "memory": f"{self._bounds.memory} bytes for {self._backend.memory}",
        }
        for path, content in self._files.items():
            await self.write(path, content)
        offered = {"python": self.python, "shell": self.shell}
        # The tool's timeout is longer than the backend's, so the backend ends a snippet first.
        slack = self._bounds.seconds + 2 * GRACE_SECONDS
        return [tool(offered[name], timeout=slack, limit=self._limit + 1000) for name in self._names]

    async def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.stop()

    async def python(self, code: str) -> str:
        """Run a Python program and give what it prints. Files in the working directory stay for the next call.

        Args:
            code: the whole program
        """
        self._count += 1
        name = f"program_{self._count}.py"
        try:
            await self.write(name, code)
        except OSError as error:  # an earlier snippet is in the way; NoSandbox is an OSError too
            if isinstance(error, NoSandbox):
                raise
            raise ToolFailed(f"{name} can't be written: {error}") from error
        return _text_or_failure(await self.run([self._open().python, "-B", "-s", "-E", name]))

    async def shell(self, command: str) -> str:
        """Run a shell command and give what it prints. Files in the working directory stay for the next call.

        Args:
            command: for /bin/sh
        """
        return _text_or_failure(await self.run(["/bin/sh", "-c", command.replace("\0", "")]))

    async def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a file in the folder. Raises OSError if something created by a snippet is in the way."""
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        await self._open().write(_inside(path), data)

    async def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` bytes of a file written by snippets.

        Raises OSError if the file is missing or isn't a plain file. Links are not followed, and a pipe can't block the
        read.
        """
        return await self._open().read(_inside(path), limit)

    async def run(self, command: Sequence[str]) -> Ran:
        """Run a command. Raises ToolFailed if the command is too long, and NoSandbox if the backend fails."""
        backend = self._open()
        return await backend.run([_sendable(word) for word in command])

    def _open(self) -> SandboxBackend:
        if self._backend is None:
            raise NoSandbox("the sandbox is not open: call the environment's `reset` first")
        return self._backend


def _text_or_failure(ran: Ran) -> str:
    if ran.code != 0:
        raise ToolFailed(str(ran))
    return str(ran)


def _inside(name: str) -> str:
    """Return `name`, a relative path, without empty parts. Raises ValueError if it leaves the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"files: {name!r} is outside the sandbox's folder; use a relative path inside it")
    return path.as_posix()


def _sendable(word: str) -> str:
    """Return an argument in a form that can be sent to another process. Raises ToolFailed if it is too long.

    Lone surrogates, which UTF-8 can't encode, become backslash escapes.
    """
    sent = word.encode("utf-8", "backslashreplace")
    if len(sent) > LONGEST_WORD:
        raise ToolFailed(
            f"the command is too long: {len(sent):,} bytes, and at most {LONGEST_WORD:,} are taken; write "
            "the long part to a file, in pieces or with the tool python, and let the command read that file"
        )
    return sent.decode()


# Which backend


def _make(name: str, bounds: Bounds) -> SandboxBackend:
    """Return a backend by its name. Raises UsageError if `module:name` can't be loaded."""
    if name in ("none", *BACKENDS) or name.startswith("podman:"):
        return LocalBackend(name, bounds)
    return cast("Callable[[Bounds], SandboxBackend]", load_named(name))(bounds)


_tests: dict[str, Future[str]] = {}
"""The self-test of each backend in this process. It is running or has finished."""
_starting = threading.Lock()


async def _working(named: str | None) -> str:
    """Return the name of a backend that passes its self-test: `named`, or one of BACKENDS. Raises NoSandbox if none
    does."""
    tried: list[str] = []
    for name in BACKENDS if named is None else (named,):
        try:
            # The test of podman also holds for images: they change a snippet's files, but not its isolation.
            found = await asyncio.shield(asyncio.wrap_future(_tested("podman" if name[:7] == "podman:" else name)))
        except OSError as error:  # NoSandbox is an OSError too
            found = str(error)
        if not found:
            return name
        tried.append(f"{name}: {found}")
    raise NoSandbox(f"no backend isolates snippets here, and isolation is required ({'; '.join(tried)}); {_INSTALL}")


def _tested(name: str) -> Future[str]:
    """Return the self-test of a backend, which all callers share. If the test couldn't run, the next caller retries it.

    The test runs in a thread with its own event loop, so it continues even if the episode that started it ends.
    """
    with _starting:
        test = _tests.get(name)
        if test is None or (test.done() and test.exception() is not None):
            test = Future()
            threading.Thread(target=_answer, args=(name, test), name="tapereel-sandbox-test", daemon=True).start()
            _tests[name] = test
        return test


def _answer(name: str, test: Future[str]) -> None:
    try:
        with asyncio.Runner() as runner:
            runner.get_loop()  # fails without descriptors, so the coroutine is made only afterwards
            test.set_result(runner.run(_self_test(name)))
    except BaseException as error:
        test.set_exception(error)


_PROBE = """
import ctypes, json, os, socket, sys
found = []
path, port, file = sys.argv[1:]
for family, address in ((socket.AF_UNIX, path), (socket.AF_INET, ("127.0.0.1", int(port)))):
    try:
        socket.socket(family).connect(address)
        found.append("it connects to " + ("a socket in a folder" if family == socket.AF_UNIX else "the network"))
    except OSError:
        pass
if os.path.exists(file):
    found.append("it sees a file outside")
for name in ("keys", "key-users"):
    try:
        if open("/proc/" + name).read():
            found.append("it lists the kernel's keys")
    except OSError:
        pass
number = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
if number is None or ctypes.CDLL(None).syscall(number, 0, -3, 0) >= 0:
    found.append("it reaches the session keyring")
if os.getuid() != 65534:
    found.append("it runs as user %d" % os.getuid())
print(json.dumps(found))
"""


async def _self_test(name: str) -> str:
    """Return how a snippet escaped, or an empty string if none could. Raises NoSandbox if the test can't run."""
    backend = _make(name, Bounds(seconds=30.0, memory=512 << 20, processes=32, disk=16 << 20, limit=4000))
    try:
        with contextlib.ExitStack() as held:
            folder = tempfile.mkdtemp(prefix="tapereel-probe-")
            held.callback(os.rmdir, folder)  # `rmtree` would need descriptors, and there may be none left
            listening = [held.enter_context(socket.socket(family)) for family in (socket.AF_UNIX, socket.AF_INET)]
            os.chmod(folder, 0o755)
            listening[0].bind(f"{folder}/socket")
            held.callback(os.unlink, f"{folder}/socket")
            os.chmod(f"{folder}/socket", 0o777)
            listening[1].bind(("127.0.0.1", 0))
            os.mknod(f"{folder}/file", 0o644)
            held.callback(os.unlink, f"{folder}/file")
            for one in listening:
                one.listen()
            await backend.start()
            await backend.write("probe.py", _PROBE.encode())
            words = [f"{folder}/socket", str(listening[1].getsockname()[1]), f"{folder}/file"]
            ran = await backend.run([backend.python, "probe.py", *words])
            if ran.code != 0:
                raise NoSandbox(f"its self-test failed: {str(ran)[-500:]}")
            return "; ".join(json.loads(ran.output))
    except (OSError, ValueError) as error:
        raise NoSandbox(str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            await backend.stop()
