"""A sandbox: snippets of Python or shell that a model wrote, run in processes with bounds, as tools.

What holds, and what doesn't, is in `Sandbox`; the process side is in `jail.py`. Once a snippet has run, nothing here
touches its folder any more but to delete it: what lies there is the snippet's work, links and pipes among it. This
module knows nothing of agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..environment import Effect
from . import jail
from .tools import CHARACTERS, Tool, ToolFailed, ToolsLost, cut, tool

GRACE_SECONDS = 30.0
"""Beyond its own time, that a jail may take to start and to clear away."""
LONGEST_WORD = (128 << 10) - 1
"""Bytes of one word of a command, a shell command for one: more the system doesn't take."""
_CHUNK = 1 << 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NoSandbox(ToolsLost):
    """The system can't give what was asked of it, or the jail itself failed: the environment's fault. Says why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a snippet."""

    output: str
    """Standard output and errors, as they came, at most `limit` characters and a note."""
    code: int | None
    """Exit code; negative: the signal that killed it. None: it was stopped because its time was up."""
    isolated: bool
    """Whether it had no network, no other process to see and no place to write but its folder."""

    def __str__(self) -> str:
        if self.code is None:
            return f"{self.output}\n[stopped: out of time]".lstrip("\n")
        if self.code < 0:
            name = signal.Signals(-self.code).name if -self.code in list(signal.Signals) else f"signal {-self.code}"
            return f"{self.output}\n[killed by {name}]".lstrip("\n")
        return self.output if self.code == 0 else f"{self.output}\n[exit code {self.code}]".lstrip("\n")


class Sandbox:
    """A source of two tools, `python(code)` and `shell(command)`, for one episode: `ToolEnvironment([Sandbox()])`.

    Everywhere on Linux: a time limit, after which every process of the snippet is killed; an address space limit for
    each process, a limit of files' sizes, of open files and of processes; an empty environment; a folder of its own,
    the same for the whole episode, which is deleted with it, however deep, many or locked its files are; output cut at
    `limit`. Nothing that a snippet leaves in its folder, be it a link to elsewhere, a pipe or a locked directory, makes
    the rest of this process follow it, wait for it or fail: programs are written by a process that has only the rights
    of the snippets before.

    Where the system allows namespaces (as root, or with unprivileged user namespaces; many containers forbid them),
    also: no network, not even loopback; a file system that is read-only but for that folder; no other process to see
    or signal. `isolation="required"` refuses to run without these, `"auto"` does without and says so in `Ran`.

    What it does not guarantee: it is no virtual machine. A hole in the kernel is a hole in it. What this user may read
    can be read (where this process is root, what everybody may read). Memory is bounded for each process, so all of
    them together may take `processes` times as much; disk is bounded for each file only. Without namespaces a snippet
    can reach the network, write wherever this user may (where this process is root: wherever everybody may), and
    signal this user's processes, this one too unless it is root's. Run what is truly hostile in a virtual machine, and
    this in there.
    """

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
        seconds: of one snippet, on the clock. memory: bytes of address space of each of its processes.
        processes: that all of its snippets may have at once. file_size: bytes of one file that it writes.
        limit: characters of output. files: what its folder begins with. python: the interpreter of the tool `python`;
            None: this one where everybody may run it, else the system's, since a sandbox of root has a user of its own.
        """
        self._bounds = {"seconds": seconds, "memory": memory, "processes": processes, "file_size": file_size}
        for name, value in self._bounds.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        self._limit, self._names, self._python = limit, tuple(tools), python or _interpreter()
        self._files = dict(files or {})
        for name in self._files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files: {name!r} lies outside the sandbox's folder; give a path inside it")
        self._isolation = isolation
        self._folder: Path | None = None
        self._uid = 0
        self._count = 0

    @property
    def effect(self) -> Effect:
        """Its folder is all that it changes, and that begins anew with each episode."""
        return "pure"

    async def open(self) -> Sequence[Tool]:
        if sys.platform != "linux":
            raise NoSandbox(f"the sandbox needs Linux, this is {sys.platform}: run it in a container")
        # In a folder that snippets can't write: so theirs can't be moved, nor another thing be put in its place.
        folder = self._folder = Path(tempfile.mkdtemp(prefix="tapereel-sandbox-")) / "work"
        folder.mkdir(0o700)
        for name, content in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        self._uid = jail.FIRST_UID + folder.stat().st_ino % (1 << 30)
        if os.getuid() == 0:
            _hand_over(folder, self._uid)
        offered = {"python": self.python, "shell": self.shell}
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
        return self._told(await self._run([self._python, "-B", "-s", "-E", name], (name, code)))

    async def shell(self, command: str) -> str:
        """Run a shell command and give what it prints. Files in the working directory stay for the next call.

        Args:
            command: for /bin/sh
        """
        return self._told(await self.run(["/bin/sh", "-c", command.replace("\0", "")]))

    def _told(self, ran: Ran) -> str:
        if ran.code != 0:
            raise ToolFailed(str(ran))
        return str(ran)

    def _place(self) -> Path:
        if self._folder is None:
            raise NoSandbox("the sandbox isn't open: it is opened at the environment's `reset`")
        return self._folder

    async def run(self, command: Sequence[str]) -> Ran:
        """One command in the sandbox. ToolFailed where it is too long; NoSandbox where the jail itself fails, or can't
        isolate and must."""
        return await self._run(command, None)

    async def _run(self, command: Sequence[str], file: tuple[str, str] | None) -> Ran:
        """`file`: name and text of one that is written before, by the command's process."""
        words = [_sendable(word) for word in command]
        folder = self._place()
        report, told = os.pipe()
        order = json.dumps(
            {
                **self._bounds,
                "command": words,
                "folder": str(folder),
                "file": file,
                "report": told,
                "isolation": self._isolation,
                "uid": self._uid,
            }
        )
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
                pass_fds=(told,),
                start_new_session=True,
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(told)
        try:
            async with asyncio.timeout(self._bounds["seconds"] + GRACE_SECONDS):
                await _give(process, order.encode())
                output = await _read(process, self._limit)
                await process.wait()
        except TimeoutError as error:
            raise NoSandbox("the jail didn't end in time") from error
        finally:
            await _kill(process)
            said = _rest(report)
        if not said:
            raise NoSandbox(f"the jail failed: it ended with {process.returncode}: {output[-500:]}")
        found: dict[str, Any] = json.loads(said.splitlines()[0])
        if "failed" in found:
            raise NoSandbox(f"the jail failed: {found['failed']}")
        return Ran(output, found["code"], found["isolated"])


def _interpreter() -> str:
    if os.getuid() != 0:
        return sys.executable
    way = (Path(sys.executable).resolve(), *Path(sys.executable).resolve().parents)
    open_to_all = all(place.stat().st_mode & stat.S_IXOTH for place in way)
    return sys.executable if open_to_all else shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable


def _hand_over(folder: Path, uid: int) -> None:
    """The folder and all in it, which no snippet has seen yet, to the sandbox's user, who may pass the one above."""
    folder.parent.chmod(0o711)
    for place, _, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in files)):
            os.chown(path, uid, uid)


def _delete(place: Path) -> None:
    """Delete the folder above the snippets' one, with all in it. No link is followed, and one folder is open at a time:
    depth costs neither stack nor files."""
    here, left = os.open(place, _FOLDER), list[str]()
    path: list[tuple[str, list[str], os.stat_result]] = []
    """(name of a folder, what else is left in the one above, which that is), down to here."""
    try:
        while True:
            if left := left or _folders_of(here):
                name = left.pop()
                _unlock(name, here)
                path.append((name, left, os.fstat(here)))
                here, left = _step(name, here), []
            elif path:
                name, left, above = path.pop()
                here = _step("..", here)
                if not os.path.samestat(os.fstat(here), above):
                    raise OSError(f"{name!r:.80} was moved away meanwhile")
                os.rmdir(name, dir_fd=here)
            else:
                break
    finally:
        os.close(here)
    place.rmdir()


def _step(name: str, here: int) -> int:
    """From one open folder to another."""
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there


def _folders_of(here: int) -> list[str]:
    """The names of some folders in a folder, none where it is empty; what is no folder on the way there is deleted.
    Never all of it at once, which could be too much to hold."""
    while True:
        with os.scandir(here) as entries:
            some = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, 1000)]
        for name, is_folder in some:
            if not is_folder:
                os.unlink(name, dir_fd=here)
        folders = [name for name, is_folder in some if is_folder]
        if folders or not some:
            return folders


def _unlock(name: str, above: int) -> None:
    """To be opened and emptied. Root needs no such thing, and so follows no link that was put there meanwhile."""
    if os.getuid() != 0:
        os.chmod(name, 0o700, dir_fd=above)


def _sendable(word: str) -> str:
    """A word of a command as it can be sent to another process. ToolFailed where it is too long."""
    sent = word.encode("utf-8", "backslashreplace")
    if len(sent) > LONGEST_WORD:
        raise ToolFailed(
            f"the command is too long: {len(sent):,} bytes, and at most {LONGEST_WORD:,} are taken; write "
            "what is long to a file, in pieces or with the tool python, and have the command read that"
        )
    return sent.decode()


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of this process's: it may hold secrets."""
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
    with contextlib.suppress(ConnectionError):  # it failed before it read that, and says why elsewhere
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, limit: int) -> str:
    """What it prints, to the end; beyond four bytes a character nothing is kept, only counted."""
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
    """What is in the pipe now; then it is closed."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _CHUNK)
    except BlockingIOError:
        return b""
    finally:
        os.close(pipe)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # it takes with it what it started
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
