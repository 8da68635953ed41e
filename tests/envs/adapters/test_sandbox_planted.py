"""What a snippet leaves in its folder: nothing of it makes the process outside follow a link, wait or fail."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs.adapters import Sandbox, ToolFailed, sandbox_backends
from tapereel.envs.adapters.sandbox import LONGEST_WORD, Ran

from .test_sandbox import MODES, SMALL, interpreter, within

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


@pytest.fixture
def victim() -> Iterator[Path]:
    """A file of this process's own, where a sandbox's user could reach it if it were let."""
    folder = Path("/tmp") / f"tapereel-victim-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o755)
    (folder / "file").write_text("original")
    (folder / "file").chmod(0o644)
    yield folder / "file"
    (folder / "file").unlink()
    folder.rmdir()


async def said(sandbox: Sandbox, code: str) -> str:
    """What an agent reads that runs this program."""
    try:
        return await sandbox.python(code)
    except ToolFailed as error:
        return str(error)


def rights(path: Path) -> tuple[int, int, str]:
    return path.stat().st_uid, stat.S_IMODE(path.stat().st_mode), path.read_text()


PLANTED = {
    "a link to a file": "ln -s {victim} program_1.py",
    "a link to nothing": "ln -s {victim}.new program_1.py",
    "a link to a pipe": "mkfifo pipe; ln -s pipe program_1.py",
    "a link to a device": "ln -s /dev/zero program_1.py",
    "a pipe": "mkfifo program_1.py",
    "a socket": "{python} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"program_1.py\")'",
    "a locked file": "echo x > program_1.py; chmod 000 program_1.py",
    "a hard link": "echo x > other; ln other program_1.py",
    "a locked folder": "chmod 000 .",
}


@MODES
@pytest.mark.parametrize("planted", PLANTED)
def test_a_program_runs_whatever_was_put_in_its_place(planted: str, mode: dict[str, Any], victim: Path):
    before = rights(victim)

    async def use(sandbox: Sandbox) -> str:
        await sandbox.shell(PLANTED[planted].format(victim=victim, python=interpreter(sandbox)))
        return await said(sandbox, "print(6 * 7)")

    assert within(use, **mode) == "42\n"
    assert rights(victim) == before
    assert os.listdir(victim.parent) == ["file"]


@MODES
@pytest.mark.parametrize("planted", ["mkdir program_1.py", "mkdir -p program_1.py/x; chmod 000 program_1.py"])
def test_what_cant_be_replaced_is_told_to_whoever_put_it_there(planted: str, mode: dict[str, Any]):
    async def use(sandbox: Sandbox) -> list[str]:
        await sandbox.shell(planted)
        return [await said(sandbox, "print(1)"), await said(sandbox, "print(2)")]

    told, other = within(use, **mode)
    assert re.search(r"^program_1\.py.*: Is a directory$", told)
    assert other == "2\n"


def test_the_event_loop_goes_on_while_a_snippet_waits_for_its_own_pipe():
    async def use(sandbox: Sandbox) -> Ran:
        turns = 0

        async def turning() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(turning())
        await sandbox.shell("mkfifo pipe")
        before = turns
        ran = await sandbox.run(["/bin/sh", "-c", "cat pipe"])
        assert turns > before + 10
        other.cancel()
        return ran

    assert within(use, seconds=0.5).code is None


LEFT = """
import os, socket
def chain(name, depth):
    top = os.getcwd()
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    open("last", "w").close()
    os.chdir(top)
chain("deep", 1100)
chain("x" * 200, 30)
os.makedirs("locked/in/it")
open("locked/in/file", "w").close()
os.chmod("locked/in", 0)
os.chmod("locked", 0)
os.makedirs("read/only")
os.chmod("read", 0o555)
os.mkdir("many")
for k in range(1500):
    open(f"many/{k}", "w").close()
with open("sparse", "wb") as file:
    file.truncate(LARGEST)
os.mkfifo("pipe")
os.mkfifo("many/pipe")
socket.socket(socket.AF_UNIX).bind("socket")
os.symlink("VICTIM", "link")
os.symlink(os.path.dirname("VICTIM"), "folder")
os.symlink("/", "many/root")
os.symlink("loop", "loop")
open(b"\\xff\\n-rf *", "w").close()
os.link("sparse", "again")
os.chmod(".", 0)
print("left")
"""


@MODES
def test_all_that_a_snippet_leaves_is_deleted_and_nothing_else(mode: dict[str, Any], victim: Path):
    places: list[Path] = []

    async def use(sandbox: Sandbox) -> str:
        places.append(sandbox._backend._box)  # type: ignore[union-attr]
        return await said(sandbox, LEFT.replace("VICTIM", str(victim)).replace("LARGEST", str(32 << 20)))

    assert within(use, **mode) == "left\n"
    assert not places[0].exists()
    assert rights(victim)[2] == "original"


@pytest.mark.skipif(os.getuid() != 0, reason="as another user, which only root can become")
def test_a_user_without_privileges_deletes_locked_folders_too(victim: Path):
    """`_delete` on what root's snippets can't keep from root: run as another user, on what that user left."""
    code = (
        "import os, pathlib, tempfile\n"
        "from tapereel.envs.adapters.sandbox_backends import _delete\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "place = pathlib.Path(tempfile.mkdtemp()); work = place / 'work'; work.mkdir(); os.chdir(work)\n"
        + LEFT.replace("VICTIM", str(victim)).replace("LARGEST", "100")
        + "\nos.chdir('/')\n_delete(place)\nassert not place.exists()\nprint('gone')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "left\ngone\n", done.stderr


def test_what_cant_be_deleted_is_said(monkeypatch: pytest.MonkeyPatch):
    def fails(place: Path) -> None:
        delete(place)
        raise sandbox_backends.NoSandbox("it couldn't be deleted: Input/output error")

    delete = sandbox_backends._delete
    monkeypatch.setattr(sandbox_backends, "_delete", fails)

    async def use(sandbox: Sandbox) -> None:
        await sandbox.shell("true")

    with pytest.raises(sandbox_backends.NoSandbox, match="Input/output error"):
        within(use)


@MODES
def test_a_command_that_is_too_long_reads_so(mode: dict[str, Any]):
    async def use(sandbox: Sandbox) -> list[str]:
        fits = await sandbox.shell("true " + "x" * (LONGEST_WORD - 5))
        with pytest.raises(ToolFailed) as caught:
            await sandbox.shell("true " + "ü" * (LONGEST_WORD // 2))
        long = await sandbox.python(f"print(len({'x' * 300_000!r}))")
        return [fits, str(caught.value), long]

    fits, told, long = within(use, **mode)
    assert (fits, long) == ("", "300000\n")
    assert re.search(r"\b131,07\d bytes.*\b131,071\b", told)
    assert "/" not in told


def test_text_that_is_no_unicode_reaches_a_snippet_escaped():
    async def use(sandbox: Sandbox) -> list[str]:
        return [await sandbox.shell("printf %s 'a\ud800'"), await sandbox.python("print('\ud800' == chr(0xd800))")]

    assert within(use, **SMALL) == ["a\\ud800", "True\n"]
