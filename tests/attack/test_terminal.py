"""What environments, models and tasks say reaches no terminal as a control sequence: not in logs, not in tracebacks."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tapereel.tapes.common.text import logger, tell

HERE = Path(__file__).with_name("hostile_terminal.py")


def said(*words: str) -> str:
    command = [sys.executable, "-m", "tapereel.cli", *words]
    done = subprocess.run(command, capture_output=True, timeout=120)
    return (done.stdout + done.stderr).decode()


def assert_harmless(text: str) -> None:
    assert [c for c in text if not c.isprintable() and c not in "\n\t"] == []
    assert "PWNED" in text


@pytest.mark.parametrize("flags", [(), ("--traceback",), ("--json",)])
def test_an_environments_error_in_a_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Evil", "--tasks", f"{HERE}:TASKS")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    assert_harmless(said("run", *names, *engine, "--out", str(tmp_path / "run"), *flags))


@pytest.mark.parametrize("flags", [(), ("--traceback",), ("--json",)])
@pytest.mark.parametrize("env", ["Talks", "Nested"])
def test_all_that_is_said_beside_an_episode(tmp_path: Path, env: str, flags: tuple[str, ...]) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:{env}", "--tasks", f"{HERE}:TASKS")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    text = said("run", *names, *engine, "--out", str(tmp_path / "run"), *flags)
    assert_harmless(text)
    if env == "Talks":
        sources = ("UserWarning", "it says", "broken", "never retrieved", "in thread", "Unraisable.__del__", "callback")
        assert [source for source in sources if source not in text] == []


def test_processes_that_check_tapes(tmp_path: Path) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Talks", "--tasks", f"{HERE}:TASKS")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    said("run", *names, *engine, "--out", str(tmp_path / "run"))
    text = said("replay", "env", str(tmp_path / "run"), "--jobs", "2")
    assert_harmless(text)
    assert "it says" in text


def test_the_process_of_an_environment(tmp_path: Path) -> None:
    script = tmp_path / "pooled.py"
    script.write_text(
        "import asyncio\nfrom tapereel.agents import ScriptedEngine, rollout\nfrom tapereel.envs.remote import Pool\n"
        f"from tapereel.envs.load_named import load_named\nAsks = load_named({str(HERE)!r} + ':Asks')\n"
        "async def main():\n"
        f"    with Pool({str(HERE)!r} + ':Talks', processes=1) as pool:\n"
        "        print((await rollout(Asks(), pool, 1, engine=ScriptedEngine(['a']))).turns)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=120)
    assert_harmless((done.stdout + done.stderr).decode())
    assert b"it says" in done.stderr


@pytest.mark.parametrize("tasks", ["leaves", "grouped"])
def test_a_task_source_that_ends_the_process(tmp_path: Path, tasks: str) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Evil", "--tasks", f"{HERE}:{tasks}")
    assert_harmless(said("run", *names, "--set", 'engine.answers=["a"]', "--out", str(tmp_path / "run")))


@pytest.mark.parametrize("flags", [(), ("--traceback",)])
def test_an_error_that_ends_the_command(tmp_path: Path, flags: tuple[str, ...]) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Evil", "--tasks", f"{HERE}:tasks")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    assert_harmless(said("run", *names, *engine, "--out", str(tmp_path / "run"), *flags))


class Broken:
    """In the place of stderr."""

    def write(self, text: str) -> None:
        raise LookupError(text)


@pytest.mark.parametrize("stream", [None, Broken()])
def test_what_is_said_reaches_the_terminal_although_stderr_was_replaced(
    stream: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    tell("\x1b[2J PWNED")
    assert_harmless(capfd.readouterr().err)


def test_a_handler_of_the_users_own_gets_escaped_records() -> None:
    out = io.StringIO()
    handler, log = logging.StreamHandler(out), logger("test")
    log.addHandler(handler)
    try:
        log.warning("it says %s", "\x1b[2J PWNED")
        try:
            raise ValueError("\x1b[2J again")
        except ValueError:
            log.exception("broken")
    finally:
        log.removeHandler(handler)
    assert_harmless(out.getvalue())
    assert "\\x1b[2J again" in out.getvalue()
