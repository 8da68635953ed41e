"""The sandbox: what snippets can do, and what the hostile ones can't."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs.adapters import Sandbox, ToolEnvironment, ToolFailed, sandbox_backends
from tapereel.envs.adapters import sandbox as sandbox_module
from tapereel.envs.adapters.sandbox import NoSandbox, Ran
from tapereel.envs.adapters.sandbox_backends import Bounds, LocalBackend
from tapereel.tapes import Answer, CauseType, Status, Task, ToolCalls, ToolOffer, ToolResults

from ...attack import plain_user
from ...attack.sandbox_limits import BOMB

pytestmark = pytest.mark.sandbox
SLEEP = f"sleep 1000.{os.getpid()}"
"""What snippets leave behind. It tells them from those of other tests, which have sandboxes at the same time."""
SMALL = {"seconds": 30.0, "memory": 300 << 20, "processes": 20, "limit": 2000}


def within(use: Callable[[Sandbox], Awaitable[Any]], **options: Any) -> Any:
    """What `use` gives of an open sandbox."""

    async def whole() -> Any:
        sandbox = Sandbox(**{**SMALL, **options})
        await sandbox.open()
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(whole())


def python(code: str, **options: Any) -> Ran:
    return within(lambda sandbox: sandbox.run([interpreter(sandbox), "-c", code]), **options)


def interpreter(sandbox: Sandbox) -> str:
    assert sandbox._backend is not None
    return sandbox._backend.python


def shell(command: str, **options: Any) -> Ran:
    return within(lambda sandbox: sandbox.run(["/bin/sh", "-c", command]), **options)


MODES = pytest.mark.parametrize(
    "mode",
    [
        {"backend": "bubblewrap"},
        {"isolation": "none"},
        {"backend": "podman"},
    ],
    ids=["bubblewrap", "none", "podman"],
)


@MODES
def test_a_program_runs_and_its_files_stay_for_the_next_one(mode: dict[str, Any]):
    async def use(sandbox: Sandbox) -> list[str]:
        await sandbox.python("import helper; open('made', 'w').write(helper.WORD)")
        return [await sandbox.shell("cat made; cat data/in.txt"), await sandbox.python("print(open('made').read())")]

    files = {"helper.py": "WORD = 'grüß'\n", "data/in.txt": b"given"}
    assert within(use, files=files, **mode) == ["grüßgiven", "grüß\n"]


@MODES
def test_it_ends_when_its_time_is_up(mode: dict[str, Any]):
    ran = python("print('begun', flush=True)\nwhile True: pass", seconds=0.5, **mode)
    assert ran.code is None
    assert "[stopped" in str(ran)


@MODES
def test_a_fork_bomb_stays_within_its_number_and_ends_with_its_time(mode: dict[str, Any]):
    ran = python(f"# {SLEEP}\n{BOMB}", seconds=2.0, **mode)
    assert ran.code is None
    if ran.output.strip():  # it got as far as that in its time
        assert int(ran.output) < 20
    assert running_as_sandbox() == []


@MODES
def test_processes_that_go_into_the_background_end_with_the_snippet(mode: dict[str, Any]):
    ran = shell(f"(setsid {SLEEP} &) ; ({SLEEP} &) ; echo done", **mode)
    assert (ran.code, ran.output) == (0, "done\n")
    assert running_as_sandbox() == []


@MODES
def test_a_snippet_that_is_given_up_leaves_nothing_behind(mode: dict[str, Any]):
    async def give_up(sandbox: Sandbox) -> None:
        snippet = asyncio.ensure_future(sandbox.shell(f"echo x > begun; (setsid {SLEEP} &) ; {SLEEP}"))
        while True:
            assert not snippet.done()
            await asyncio.sleep(0.01)
            with contextlib.suppress(OSError):
                if await sandbox.read("begun"):
                    break
        snippet.cancel()
        with pytest.raises(asyncio.CancelledError):
            await snippet

    within(give_up, **mode)
    assert running_as_sandbox() == []


@pytest.mark.parametrize("backend", ["bubblewrap", "podman"])
def test_a_fork_bomb_disturbs_no_call_beside_it(backend: str):
    async def use(sandbox: Sandbox) -> str:
        bomb = asyncio.ensure_future(sandbox.run(["/bin/sh", "-c", "f(){ f|f& }; f; sleep 1000"]))
        await asyncio.sleep(1)
        said = await asyncio.gather(*(sandbox.shell(f"sh -c 'echo {k}'; true") for k in range(4)))
        bomb.cancel()
        return "".join(said)

    assert within(use, backend=backend) == "0\n1\n2\n3\n"


@MODES
def test_a_call_that_ends_disturbs_none_that_begins(mode: dict[str, Any]):
    """A call that ends removes the cgroups that are left. That of a call whose snippet has not joined it yet is empty
    as well."""

    async def use(sandbox: Sandbox) -> list[str]:
        async def one(k: int) -> str:
            for _ in range(k % 7):
                await asyncio.sleep(0)
            return "".join([await sandbox.shell(f"echo {k}") for _ in range(4)])

        return list(await asyncio.gather(*(one(k) for k in range(10))))

    assert within(use, **mode) == [f"{k}\n" * 4 for k in range(10)]


HELD = """
import asyncio, sys
from tapereel.envs.adapters.sandbox import Sandbox
async def hold():
    sandbox = Sandbox(seconds=1000, backend=sys.argv[1])
    await sandbox.open()
    print(sandbox._backend._box, flush=True)
    await sandbox.shell(sys.stdin.read())
asyncio.run(hold())
"""


@pytest.mark.parametrize("backend", ["bubblewrap", "podman"])
def test_a_run_that_is_killed_leaves_no_process_and_no_file(backend: str):
    command = [sys.executable, "-c", HELD, backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        runner.stdin.write(f"(setsid {SLEEP} &) ; {SLEEP}")
        runner.stdin.close()
        box = Path(runner.stdout.readline().strip())
        for _ in range(600):
            if asleep() == 2:
                break
            time.sleep(0.05)
        assert asleep() == 2
        runner.kill()
    for _ in range(600):
        if not running_as_sandbox():
            break
        time.sleep(0.05)
    assert running_as_sandbox() == []
    assert list(box.iterdir()) == []
    box.rmdir()


def asleep() -> int:
    return sum(line.startswith("sleep ") for line in running_as_sandbox())


def running_as_sandbox() -> list[str]:
    """The command lines of what snippets of this file left behind: `SLEEP` is in each of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if SLEEP in line]


@MODES
def test_memory_files_and_output_have_their_bounds(mode: dict[str, Any]):
    ran = python("x = []\nwhile True: x.append(bytearray(1 << 24))", **mode)
    assert (ran.code, "MemoryError" in ran.output) == (1, True)
    ran = python("open('big', 'wb').write(bytes(1 << 20))", **mode, disk=1 << 16)
    assert "File too large" in ran.output or "No space left" in ran.output
    ran = python("print('x' * 3_000_000)", **mode)
    assert ran.output.startswith("x" * 2000 + "\n[cut here: about ")
    assert len(ran.output) < 2100
    ran = shell("yes", **mode, seconds=0.5)
    assert ran.code is None
    assert len(ran.output) < 2100


@MODES
def test_nothing_of_this_processs_environment_reaches_it(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "sk-very-secret")
    ran = shell("env; cat /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n'", **mode)
    assert "HOME=" in ran.output
    assert "very-secret" not in ran.output


def test_how_it_ended_is_told():
    assert str(shell("echo out; exit 3")) == "out\n\n[exit code 3]"
    assert str(shell("kill -9 $$")) == "[exit code 137, killed by SIGKILL]"
    assert str(Ran("", 250)) == "[exit code 250]"
    with pytest.raises(ToolFailed, match="NameError: name 'x' is not defined"):
        within(lambda sandbox: sandbox.python("x"))


@MODES
@pytest.mark.parametrize("code", [1, 125, 126, 127, 137])
def test_no_exit_code_of_a_snippet_is_taken_for_a_failure_of_the_sandbox(mode: dict[str, Any], code: int):
    assert shell(f"exit {code}", **mode).code == code


def test_what_it_cant_do_is_said_at_once():
    with pytest.raises(NoSandbox, match=r"bubblewrap.*No such file"):
        within(lambda sandbox: sandbox.run(["/no/such"]))
    with pytest.raises(NoSandbox, match="`reset`"):
        asyncio.run(Sandbox().python("1"))
    with pytest.raises(ValueError, match=r"memory.*\b0\b"):
        Sandbox(memory=0)
    for name in ("/etc/x", "a/../../x"):
        with pytest.raises(ValueError, match=f"files.*'{re.escape(name)}'"):
            Sandbox(files={name: "x"})
    with pytest.raises(ValueError, match=r"isolation.*'auto'.*'required'"):
        Sandbox(isolation="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"isolation='none'.*backend='podman'"):
        Sandbox(isolation="none", backend="podman")
    with pytest.raises(ValueError, match=r"'docker'.*bubblewrap, podman"):
        shell("true", backend="docker")


@pytest.mark.parametrize("path", ["/", "/tmp", "/run", "/proc", "/dev/shm", "/run/user", str(Path.home()), "/var"])
def test_a_path_that_holds_sockets_or_all_files_of_the_user_is_refused(path: str):
    with pytest.raises(NoSandbox, match=f"'{path}'"):
        shell("true", paths=[path])


@MODES
def test_a_path_that_the_user_names_is_there_to_read_only(mode: dict[str, Any]):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "data").write_text("given")
        ran = shell(f"cat {folder}/data; echo x > {folder}/new", paths=[str(folder)], **mode)
        assert ran.output.startswith("given")
        assert ran.code != 0
        assert not (folder / "new").exists()
    finally:
        shutil.rmtree(folder)


OWN = """
import asyncio, pathlib, subprocess, sys, tempfile
from tapereel.envs.adapters.sandbox import Sandbox

own = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))
venv, given = own / "venv", own / "given"
given.mkdir()
subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)

async def main():
    sandbox = Sandbox(backend="bubblewrap", python=str(venv / "bin" / "python"), paths=[str(given)], seconds=30.0)
    await sandbox.open()
    try:
        for folder in (venv, venv / "bin", given):
            (folder / "mine").write_text("the user may")
            code = f"print(open('{folder}/mine').read()); open('{folder}/new', 'w')"
            ran = await sandbox.run([str(venv / "bin" / "python"), "-c", code])
            assert "the user may" in ran.output and "Read-only" in ran.output, ran
            assert not (folder / "new").exists()
    finally:
        await sandbox.close()
        subprocess.run(["rm", "-rf", own], check=True)

asyncio.run(main())
print("held")
"""


def test_a_plain_users_own_interpreter_and_paths_are_read_only():
    """Root's snippets run as another user, so they couldn't write there even if the folders were writable."""
    package = Path(sandbox_module.__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    as_nobody = [sys.executable, str(Path(plain_user.__file__)), "nobody"] if os.getuid() == 0 else []
    command = [*as_nobody, sys.executable, "-c", OWN]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.stdout == "held\n", done.stderr[-2000:]


def test_where_no_backend_passes_its_self_test_it_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox_module, "_tests", {})
    monkeypatch.setattr(sandbox_backends, "_program", missing)
    with pytest.raises(NoSandbox, match=r"bubblewrap: .*bwrap.*; podman: .*apt install bubblewrap"):
        shell("true")


def test_podman_runs_snippets_in_an_image_with_none_of_the_machines_folders(tmp_path: Path):
    """The image holds a shell, cat and their libraries, nothing else."""
    files = {"/bin/sh", "/bin/cat"}
    for line in subprocess.run(["ldd", "/bin/sh", "/bin/cat"], capture_output=True, text=True).stdout.splitlines():
        files |= {word for word in line.split() if word.startswith("/") and not word.endswith(":")}
    for file in files:
        (tmp_path / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file[1:])
    packed = tmp_path.parent / "image.tar"
    subprocess.run(["tar", "-C", tmp_path, "-cf", packed, "."], check=True)
    subprocess.run(["podman", "import", "-q", packed, "tapereel-test:1"], check=True, capture_output=True)
    try:
        ran = shell("cat /etc/hostname; echo /usr/*; python3", backend="podman:localhost/tapereel-test:1")
        assert ran.code == 127
        assert "/usr/*" in ran.output
    finally:
        subprocess.run(["podman", "rmi", "-f", "tapereel-test:1"], check=True, capture_output=True)


def missing(name: str) -> str:
    raise NoSandbox(f"the program {name} is missing")


class Open(LocalBackend):
    """A backend without isolation that a user names as one with it."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__("none", bounds)


def test_a_backend_that_does_not_isolate_fails_its_self_test():
    found = "socket.*network.*file"
    with pytest.raises(NoSandbox, match=found):
        shell("true", backend=f"{__name__}:Open")


class Counted(LocalBackend):
    """Counts its sandboxes, including the self-test's. The first start fails, as without descriptors."""

    starts = 0
    asked = threading.Event()
    """Set when every caller has asked for the first self-test. A caller that came after it would begin another one."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__("bubblewrap", bounds)

    async def start(self) -> None:
        type(self).starts += 1
        if type(self).starts == 1:
            self.asked.wait(20)
            raise OSError("Too many open files")
        await super().start()


def test_all_share_one_self_test_and_one_that_can_not_be_made_is_made_again(monkeypatch: pytest.MonkeyPatch):
    tested, callers = sandbox_module._tested, itertools.count(1)

    def counted(name: str) -> Future[str]:
        test = tested(name)
        if next(callers) == 8:
            Counted.asked.set()
        return test

    monkeypatch.setattr(sandbox_module, "_tested", counted)

    async def begin(n: int) -> list[bool]:
        sandboxes = [Sandbox(backend=f"{__name__}:Counted") for _ in range(n)]
        opened = await asyncio.gather(*(one.open() for one in sandboxes), return_exceptions=True)
        await asyncio.gather(*(one.close() for one in sandboxes))
        assert all(isinstance(one, list | NoSandbox) for one in opened)
        return [isinstance(one, list) for one in opened]

    assert asyncio.run(begin(8)) == [False] * 8
    assert Counted.starts == 1
    assert asyncio.run(begin(8)) == [True] * 8
    assert Counted.starts == 1 + 1 + 8
    assert asyncio.run(begin(2)) == [True] * 2
    assert Counted.starts == 1 + 1 + 8 + 2


@pytest.mark.timeout(30)
def test_a_self_test_outlives_the_episode_that_asked_first(monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()

    async def probes(name: str) -> str:
        await asyncio.to_thread(release.wait)
        return ""

    async def main() -> None:
        first, second = (asyncio.create_task(sandbox_module._working("bubblewrap")) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        release.set()
        assert first.cancelled()
        assert await second == "bubblewrap"

    monkeypatch.setattr(sandbox_module, "_tests", {})
    monkeypatch.setattr(sandbox_module, "_self_test", probes)
    try:
        asyncio.run(main())
    finally:
        release.set()


SHORT_OF_DESCRIPTORS = """
import asyncio, os, resource, tempfile
from tapereel.envs.adapters.sandbox import NoSandbox, Sandbox

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    refused = 0
    for room in range(0, 12, 2):
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for handle in held[:room]:
            os.close(handle)
        try:
            await Sandbox(backend="bubblewrap").open()
        except NoSandbox:
            refused += 1
        for handle in held[room:]:
            os.close(handle)
        assert os.listdir(tempfile.gettempdir()) == [], room
    assert refused > 3
    sandbox = Sandbox(backend="bubblewrap")
    await sandbox.open()
    assert await sandbox.shell("echo works") == "works\\n"
    await sandbox.close()
    assert os.listdir(tempfile.gettempdir()) == []

asyncio.run(main())
"""


def test_what_fails_for_want_of_descriptors_leaves_nothing_and_says_nothing_of_later():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # the sandbox's user passes it
        environment = {**os.environ, "TMPDIR": folder}
        script = [sys.executable, "-c", SHORT_OF_DESCRIPTORS]
        done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Hosted(LocalBackend):
    """A backend of the user's own."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__("bubblewrap", bounds)


def test_a_backend_can_be_named():
    assert shell("echo hosted", backend=f"{__name__}:Hosted").output == "hosted\n"


@MODES
def test_what_a_snippet_wrote_is_read_back_and_nothing_else(mode: dict[str, Any]):
    async def use(sandbox: Sandbox) -> list[str]:
        made = (
            "mkdir -p a/b; printf hello > a/b/c; ln -s /etc/passwd l; ln -s c a/b/l; mkfifo p; ln -s / root; ln -s a x"
        )
        await sandbox.shell(made)
        found = []
        for name in ("a/b/c", "l", "a/b/l", "p", "root/etc/passwd", "x/b/c", "a", "missing"):
            try:
                found.append((await sandbox.read(name)).decode())
            except OSError as error:
                found.append(str(error))
        await sandbox.write("a/b/c", "again")
        return [*found, (await sandbox.read("a/b/c", 3)).decode()]

    loops = "Too many levels of symbolic links"
    assert within(use, **mode) == [
        "hello",
        loops,
        loops,
        "Not a plain file",
        "Not a directory",
        "Not a directory",
        "Not a plain file",
        "No such file or directory",
        "aga",
    ]


@pytest.mark.ledger("X11")
def test_an_agent_programs_in_it_and_its_folder_goes_with_the_episode():
    folders: list[Path] = []

    class Programming(ToolEnvironment):
        def __init__(self) -> None:
            self.sandbox = Sandbox(**SMALL)  # type: ignore[arg-type]
            super().__init__([self.sandbox])

        async def step(self, action: ToolCalls | Answer) -> Any:
            folders.append(self.sandbox._backend._box)  # type: ignore[union-attr]
            return await super().step(action)

    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    wrong = json.dumps({"name": "shell", "arguments": {"command": "exit 2"}})
    tape = asyncio.run(
        rollout(
            ChatAgent(actions=[ToolCalls], plain=Answer),
            Programming,
            Task(public="6*7?"),
            engine=ScriptedEngine([f"<tool_call>{call}</tool_call><tool_call>{wrong}</tool_call>", "42"]),
        )
    )
    (seen,) = [step for step in tape if isinstance(step, ToolResults)]
    assert [(r.content, r.error) for r in seen.results] == [("42\n", False), ("[exit code 2]", True)]
    assert tape.status is Status.FINISHED
    assert isinstance(tape[0], ToolOffer)
    (said,) = tape[0].sources
    assert said["sandbox"] in ("bubblewrap", "podman")
    assert said["isolation"] == "required"
    assert said["memory"] in [f"{300 << 20} bytes for {which}" for which in ("all processes", "each process")]
    assert folders
    assert not folders[0].exists()


def test_a_launcher_that_fails_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch):
    shell("true")  # the self-test passes first
    monkeypatch.setattr(sandbox_backends.sandbox_launcher, "__file__", "/no/such/launcher.py")
    call = json.dumps({"name": "shell", "arguments": {"command": "true"}})
    tape = asyncio.run(
        rollout(
            ChatAgent(actions=[ToolCalls], plain=Answer),
            lambda: ToolEnvironment([Sandbox(**SMALL)]),
            Task(public=""),  # type: ignore[arg-type]
            engine=ScriptedEngine([f"<tool_call>{call}</tool_call>", "42"]),
        )
    )
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "NoSandbox")
