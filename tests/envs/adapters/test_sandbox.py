"""The sandbox: what snippets can do, and what the hostile ones can't."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs.adapters import jail
from tapereel.envs.adapters.sandbox import NoSandbox, Ran, Sandbox
from tapereel.envs.adapters.tools import ToolEnvironment, ToolFailed
from tapereel.tapes import Answer, CauseType, Status, Task, ToolCalls, ToolResults

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
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
    return within(lambda sandbox: sandbox.run([sandbox._python, "-c", code]), **options)


def shell(command: str, **options: Any) -> Ran:
    return within(lambda sandbox: sandbox.run(["/bin/sh", "-c", command]), **options)


@pytest.fixture(scope="module")
def isolated() -> None:
    if not shell("true").isolated:
        pytest.skip("this system gives no namespaces")


MODES = pytest.mark.parametrize("isolation", ["auto", "none"])


@MODES
def test_a_program_runs_and_its_files_stay_for_the_next_one(isolation: str):
    async def use(sandbox: Sandbox) -> list[str]:
        await sandbox.python("import helper; open('made', 'w').write(helper.WORD)")
        return [await sandbox.shell("cat made; cat data/in.txt"), await sandbox.python("print(open('made').read())")]

    files = {"helper.py": "WORD = 'grüß'\n", "data/in.txt": b"given"}
    assert within(use, files=files, isolation=isolation) == ["grüßgiven", "grüß\n"]


@MODES
def test_it_ends_when_its_time_is_up(isolation: str):
    ran = python("print('begun', flush=True)\nwhile True: pass", seconds=0.5, isolation=isolation)
    assert ran.code is None
    assert "[stopped: out of time]" in str(ran)


@MODES
def test_a_fork_bomb_stays_within_its_number_and_ends_with_its_time(isolation: str):
    bomb = """
import os, time
made = 0
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        made += 1
    except OSError:
        print(made, flush=True)
        time.sleep(1000)
"""
    ran = python(bomb, seconds=2.0, isolation=isolation)
    assert ran.code is None
    if ran.output.strip():  # it got as far as that in its time
        assert int(ran.output) < 20
    assert running_as_sandbox() == []


@MODES
def test_processes_that_go_into_the_background_end_with_the_snippet(isolation: str):
    ran = shell("(setsid sleep 1000 &) ; (sleep 1000 &) ; echo done", isolation=isolation)
    assert (ran.code, ran.output) == (0, "done\n")
    assert running_as_sandbox() == []


@MODES
def test_a_snippet_that_is_given_up_leaves_nothing_behind(isolation: str):
    async def give_up(sandbox: Sandbox) -> None:
        snippet = asyncio.ensure_future(sandbox.shell("touch begun; (setsid sleep 1000 &) ; sleep 1000"))
        while not (sandbox._place() / "begun").exists():
            assert not snippet.done()
            await asyncio.sleep(0.01)
        snippet.cancel()
        with pytest.raises(asyncio.CancelledError):
            await snippet

    within(give_up, isolation=isolation)
    assert running_as_sandbox() == []


def running_as_sandbox() -> list[str]:
    """Processes left over, told by their user where this is root, else by what they sleep."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes()
            if (os.getuid() == 0 and path.stat().st_uid >= jail.FIRST_UID) or line == b"sleep\x001000\x00":
                found.append(f"{path.name}: {line!r}")
        except OSError:
            continue
    return found


@MODES
def test_memory_files_and_output_have_their_bounds(isolation: str):
    ran = python("x = []\nwhile True: x.append(bytearray(1 << 24))", isolation=isolation)
    assert (ran.code, "MemoryError" in ran.output) == (1, True)
    ran = python("open('big', 'wb').write(bytes(1 << 20))", isolation=isolation, file_size=1000)
    assert ran.code == -25 or "File too large" in ran.output
    ran = python("print('x' * 3_000_000)", isolation=isolation)
    assert ran.output.startswith("x" * 2000 + "\n[cut here: about ")
    assert len(ran.output) < 2100
    ran = shell("yes", isolation=isolation, seconds=0.5)
    assert ran.code is None
    assert len(ran.output) < 2100


@MODES
def test_nothing_of_this_processs_environment_reaches_it(isolation: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "sk-very-secret")
    ran = shell("env; cat /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n'", isolation=isolation)
    assert "HOME=" in ran.output
    assert "very-secret" not in ran.output


@pytest.mark.usefixtures("isolated")
def test_it_cant_write_outside_its_folder():
    name = f"/tmp/outside-{uuid.uuid4().hex}"
    ran = shell(
        f"echo x > {name}; echo x > /dev/shm/{Path(name).name}; echo x > ../up; echo in > here; cat here; "
        f"touch {Path(__file__)}; ln -s /tmp up; echo x > up/{Path(name).name}; mount -o remount,rw /"
    )
    assert "Read-only file system" in ran.output
    assert "in\n" in ran.output
    assert not Path(name).exists()
    assert not Path("/dev/shm", Path(name).name).exists()


@pytest.mark.usefixtures("isolated")
def test_it_has_no_network():
    ran = python("""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 80)), (socket.AF_INET, ("1.1.1.1", 53))):
    try:
        socket.socket(family).connect(address)
        print("reached", address)
    except OSError as error:
        print(error.strerror)
""")
    assert ran.output == "Network is unreachable\n" * 2


@pytest.mark.usefixtures("isolated")
def test_it_sees_and_signals_no_other_process():
    ran = python(
        f"""
import os, signal
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) or "none")
for pid in (os.getppid(), {os.getpid()}):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("still here")
"""
    )
    assert ran.code == 0
    assert ran.output.endswith("still here\n")
    assert str(os.getpid()) not in ran.output.splitlines()[0].strip("[]").split(", ")


def test_how_it_ended_is_told():
    assert str(shell("echo out; exit 3")) == "out\n\n[exit code 3]"
    assert str(shell("kill -9 $$")) == "[killed by SIGKILL]"
    assert str(Ran("", -64, True)) == "[killed by SIGRTMAX]"
    with pytest.raises(ToolFailed, match="NameError: name 'x' is not defined"):
        within(lambda sandbox: sandbox.python("x"))


def test_what_it_cant_do_is_said_at_once():
    with pytest.raises(NoSandbox, match=r"the jail failed: /no/such: .*No such file"):
        within(lambda sandbox: sandbox.run(["/no/such"]))
    with pytest.raises(NoSandbox, match="is not open"):
        asyncio.run(Sandbox().python("1"))
    with pytest.raises(ValueError, match="memory must be above 0, not 0"):
        Sandbox(memory=0)
    for name in ("/etc/x", "a/../../x"):
        with pytest.raises(ValueError, match="is outside the sandbox's folder"):
            Sandbox(files={name: "x"})


def test_where_namespaces_are_refused_it_says_so_or_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    refusing = tmp_path / "refusing.py"
    source = Path(jail.__file__).read_text(encoding="utf-8")
    refusing.write_text(
        source.replace("def unshare() -> None:", "def unshare() -> None:\n    raise OSError('no')\n"), encoding="utf-8"
    )
    monkeypatch.setattr(jail, "__file__", str(refusing))
    ran = shell("echo free")
    assert (ran.output, ran.isolated) == ("free\n", False)
    with pytest.raises(NoSandbox, match="gives no namespaces"):
        shell("true", isolation="required")


@pytest.mark.skipif(os.getuid() != 0, reason="as another user, which only root can become")
@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_a_user_without_privileges_has_it_too(isolation: str, tmp_path: Path):
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("needs an interpreter that everybody may run")
    folder = Path("/tmp") / f"tapereel-test-{uuid.uuid4().hex}"
    folder.mkdir()
    script = folder / "jail.py"
    script.write_text(Path(jail.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    for path in (folder, script):
        os.chown(path, 65534, 65534)
    report, told = os.pipe()
    order = {
        "command": ["/bin/sh", "-c", "echo x > in; cat in; id -u; f(){ f|f& }; f; exec sleep 1000"],
        "folder": str(folder),
        "seconds": 2,
        "memory": 300 << 20,
        "processes": 20,
        "file_size": 1000,
        "file": None,
        "report": told,
        "isolation": isolation,
        "uid": 0,
    }
    try:
        done = subprocess.run(
            [python, "-I", "-S", script],
            input=json.dumps(order),
            pass_fds=(told,),
            user=65534,
            group=65534,
            extra_groups=[],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        os.close(told)
        said = json.loads(os.read(report, 1000).splitlines()[0])
        assert said["code"] is None, (said, done.stderr)
        assert done.stdout.startswith("x\n65534")
        assert said["isolated"] is (isolation == "auto") or isolation == "auto"
        assert running_as_sandbox() == []
    finally:
        os.close(report)
        subprocess.run(["rm", "-rf", folder], check=True, timeout=60)


@pytest.mark.ledger("X11")
def test_an_agent_programs_in_it_and_its_folder_goes_with_the_episode():
    folders: list[Path] = []

    class Programming(ToolEnvironment):
        def __init__(self) -> None:
            self.sandbox = Sandbox(**SMALL)  # type: ignore[arg-type]
            super().__init__([self.sandbox])

        async def step(self, action: ToolCalls | Answer) -> Any:
            folders.append(self.sandbox._place())
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
    assert folders
    assert not folders[0].exists()


def test_a_jail_that_fails_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jail, "__file__", "/no/such/jail.py")
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
