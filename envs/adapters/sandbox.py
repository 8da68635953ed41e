"""A sandbox: tools that run a model's Python and shell snippets in processes with resource limits.

`Sandbox` documents the guarantees and their gaps. `jail.py` is the code of the child process. After the first snippet
this process never opens files in the folder, it only deletes the folder: a file may be a link or pipe of the snippet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..environment import Effect
from . import jail
from .tools import CHARACTERS, Tool, ToolFailed, ToolsLost, cut, tool

GRACE_SECONDS = 30.0
"""Seconds that a jail may need, in addition to the snippet's time, to start and to clean up."""
LONGEST_WORD = (128 << 10) - 1
"""The system's size limit for one argument of a command (for example a shell command), in bytes."""
_CHUNK = 1 << 16
"""Bytes of one read from a pipe."""


class NoSandbox(ToolsLost):
    """The system can't provide the required isolation, or the jail failed: an error of the environment."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a snippet."""

    output: str
    """Standard output and standard error, interleaved as written: at most `limit` characters and a note."""
    code: int | None
    """Exit code; a negative code is the signal that killed the process. None if it reached its time limit."""
    isolated: bool
    """Whether it had no network, saw no other process and could write only to its folder."""

    def __str__(self) -> str:
        if self.code is None:
            return f"{self.output}\n[stopped: out of time]".lstrip("\n")
        if self.code < 0:
            name = signal.Signals(-self.code).name if -self.code in list(signal.Signals) else f"signal {-self.code}"
            return f"{self.output}\n[killed by {name}]".lstrip("\n")
        return self.output if self.code == 0 else f"{self.output}\n[exit code {self.code}]".lstrip("\n")


class Sandbox:
    """A source of two tools, `python(code)` and `shell(command)`, for one episode: `ToolEnvironment([Sandbox()])`.

    On every Linux: a time limit, after which all processes of the snippet are killed; limits of address space for each
    process, of file size, of open files and of processes; an empty environment; one folder for the episode, which is
    deleted at its end; output cut at `limit`. This process doesn't follow links in the folder, and pipes or locked
    directories there can't block it or make it fail: a process with the rights of the snippets writes the programs.

    If the system allows namespaces (as root, or with unprivileged user namespaces; many containers forbid them), also:
    no network, not even loopback; a file system that is read-only except for the folder; other processes are invisible.
    `isolation="required"` refuses to run without namespaces. `"auto"` runs without them and reports it in `Ran`.

    Not guaranteed: the sandbox is not a virtual machine, so a flaw in the kernel breaks it. A snippet can read what
    this user can read (if this process is root: files that all users can read). The memory limit is for each process,
    so all processes together may use `processes` times as much. Disk is limited for each file only. Without namespaces
    a snippet can reach the network, write where this user can write (if this process is root: where all users can
    write), and signal this user's processes, including this one unless it is root. Run hostile code in a virtual
    machine, with this sandbox inside it.
    """

    effect: Effect = "pure"
    """A snippet changes its folder only, and each episode has a new one."""

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory: int = 512 << 20,
        processes: int = 32,
        file_size: int = 32 << 20,
        limit: int = CHARACTERS,
        tools: Sequence[Literal["python", "shell"]] = ("python", "shell"),
        files: Mapping[str, str | bytes] | None = None,
        python: str | None = None,
        isolation: Literal["auto", "required", "none"] = "auto",
    ) -> None:
        """
        seconds: time limit of a snippet (wall clock). memory: address space of each process, in bytes.
        processes: concurrent processes of all snippets. file_size: size limit of a written file, in bytes.
        limit: characters of output. files: the initial files of the folder. python: the interpreter of the tool
            `python`; None takes the current one if all users may run it, else the system's: as root, the sandbox uses
            another user.
        """
        self._bounds = jail.Bounds(seconds=seconds, memory=memory, processes=processes, file_size=file_size)
        for name in ("seconds", "memory", "processes", "file_size"):
            if not self._bounds[name] > 0:
                raise ValueError(f"{name} must be above 0, not {self._bounds[name]}")
        self._limit, self._names, self._python = limit, tuple(tools), python or _interpreter()
        self._files = dict(files or {})
        for name in self._files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files: {name!r} is outside the sandbox's folder; use a relative path inside it")
        self._isolation = isolation
        self._folder: Path | None = None
        self._uid = 0
        self._count = 0

    async def open(self) -> Sequence[Tool]:
        if sys.platform != "linux":
            raise NoSandbox(f"the sandbox needs Linux, but this system is {sys.platform}: run it in a Linux container")
        # The parent of the snippets' folder isn't writable for snippets: they can't move the folder or replace it by a
        # link, so the path still means the same folder when `close` deletes it.
        folder = self._folder = Path(tempfile.mkdtemp(prefix="tapereel-sandbox-")) / "work"
        folder.mkdir(0o700)
        for name, content in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        self._uid = jail.FIRST_UID + folder.stat().st_ino % (1 << 30)
        # One user id per sandbox, from the inode, because the limit of processes counts all processes of a user.
        if os.getuid() == 0:
            _hand_over(folder, self._uid)
        offered = {"python": self.python, "shell": self.shell}
        # The tool's own timeout is the outermost one: the jail ends a snippet first, and `run` ends a jail that hangs.
        slack = self._bounds["seconds"] + 2 * GRACE_SECONDS
        return [tool(offered[name], timeout=slack, limit=self._limit + 1000) for name in self._names]

    async def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            await asyncio.to_thread(_delete, folder.parent)
        except OSError as error:
            raise NoSandbox(f"the sandbox's folder {folder.parent} couldn't be deleted: {error}") from error

    async def python(self, code: str) -> str:
        """Run a Python program and give what it prints. Files in the working directory stay for the next call.

        Args:
            code: the whole program
        """
        self._count += 1
        name = f"program_{self._count}.py"
        return _text_or_failure(await self.run([self._python, "-B", "-s", "-E", name], (name, code)))

    async def shell(self, command: str) -> str:
        """Run a shell command and give what it prints. Files in the working directory stay for the next call.

        Args:
            command: for /bin/sh
        """
        return _text_or_failure(await self.run(["/bin/sh", "-c", command.replace("\0", "")]))

    def _place(self) -> Path:
        if self._folder is None:
            raise NoSandbox("the sandbox is not open: call the environment's `reset` first")
        return self._folder

    async def run(self, command: Sequence[str], file: tuple[str, str] | None = None) -> Ran:
        """Run one command in the sandbox. file: name and text of a file that the command's process writes first.

        ToolFailed if the command is too long; NoSandbox if the jail fails or can't provide the required isolation.
        """
        words = [_sendable(word) for word in command]
        folder = self._place()
        report, write_end = os.pipe()
        order: jail.Order = {
            **self._bounds,
            "command": words,
            "folder": str(folder),
            "file": file,
            "report": write_end,
            "isolation": self._isolation,
            "uid": self._uid,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                jail.__file__,
                cwd="/",
                env=_environment(folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            # Only the jail keeps the write end; otherwise each command would leak a descriptor here.
            os.close(write_end)
        try:
            async with asyncio.timeout(self._bounds["seconds"] + GRACE_SECONDS):
                await _give(process, json.dumps(order).encode())
                output = await _read(process, self._limit)
                await process.wait()
        except TimeoutError as error:
            raise NoSandbox("the jail did not end within its time limit") from error
        finally:
            await _kill(process)
            said = _rest(report)
        if not said:
            raise NoSandbox(f"the jail failed with exit code {process.returncode}: {output[-500:]}")
        # The first line counts: a later one can only report a consequence of the first.
        found: dict[str, Any] = json.loads(said.splitlines()[0])
        if "failed" in found:
            raise NoSandbox(f"the jail failed: {found['failed']}")
        return Ran(output, found["code"], found["isolated"])


def _text_or_failure(ran: Ran) -> str:
    if ran.code != 0:
        raise ToolFailed(str(ran))
    return str(ran)


def _interpreter() -> str:
    """The current interpreter, or the system's if this process is root and not all users may run the current one."""
    if os.getuid() != 0:
        return sys.executable
    way = (Path(sys.executable).resolve(), *Path(sys.executable).resolve().parents)
    open_to_all = all(place.stat().st_mode & stat.S_IXOTH for place in way)
    return sys.executable if open_to_all else shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable


def _hand_over(folder: Path, uid: int) -> None:
    """Make the sandbox's user the owner of the folder and its content, and let the user pass the parent folder.

    Called before the first snippet, so no path can be a link that a snippet made.
    """
    folder.parent.chmod(0o711)
    for place, _, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in files)):
            os.chown(path, uid, uid)


def _delete(place: Path) -> None:
    """Delete `place`, a tree that untrusted snippets made. Raises OSError if something of it is left.

    `find` and `rm` follow no link, and neither a deep path nor many files stop them. Root needs no `find`; others must
    be able to read and write a folder before they can empty it.
    """
    unlock = ["find", place, "-type", "d", "!", "-perm", "-700", "-execdir", "chmod", "700", "{}", ";"]
    if os.getuid() != 0:
        subprocess.run(unlock, env=_environment(place), capture_output=True)
    done = subprocess.run(["rm", "-rf", "--", place], capture_output=True, text=True, errors="replace")
    if place.exists():
        raise OSError(done.stderr[-500:])


def _sendable(word: str) -> str:
    """An argument in a form that can be sent to another process. Raises ToolFailed if it is too long.

    Lone surrogates, which UTF-8 can't encode, become backslash escapes.
    """
    sent = word.encode("utf-8", "backslashreplace")
    if len(sent) > LONGEST_WORD:
        raise ToolFailed(
            f"the command is too long: {len(sent):,} bytes, and at most {LONGEST_WORD:,} are taken; write "
            "what is long to a file, in pieces or with the tool python, and have the command read that"
        )
    return sent.decode()


def _environment(folder: Path) -> dict[str, str]:
    """The environment of the snippets. It has no variable of this process, because those may hold secrets."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


async def _give(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # the jail failed before it read the order; the report pipe says why
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, limit: int) -> str:
    """Read the output to its end. At most 4 * `limit` bytes are kept (UTF-8 has at most 4 bytes per character).

    The rest is read and counted: a full pipe would block the snippet until its time limit.
    """
    assert process.stdout is not None
    kept, more = bytearray(), 0
    while chunk := await process.stdout.read(_CHUNK):
        room = 4 * limit - len(kept)
        kept += chunk[:room]
        more += max(0, len(chunk) - room)
    text = kept.decode("utf-8", "replace")
    if more:
        return f"{text[:limit]}\n[cut here: about {len(text) - limit + more:,} more characters were printed]"
    return cut(text, limit)


def _rest(pipe: int) -> bytes:
    """Read the bytes that are in the pipe now, without waiting, and close the pipe."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _CHUNK)
    except BlockingIOError:
        return b""
    finally:
        os.close(pipe)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the jail if it still runs. SIGTERM first: after SIGKILL, a jail without namespaces leaves its descendants."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # the jail kills all processes that it started, then ends
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
