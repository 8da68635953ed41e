"""What environments, models and tasks say reaches no terminal as a control sequence: not in logs, not in tracebacks."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tapereel.tapes.common.text import logger

HERE = Path(__file__).with_name("hostile_terminal.py")


def said(*words: str) -> str:
    command = [sys.executable, "-m", "tapereel.cli", *words]
    done = subprocess.run(command, capture_output=True, timeout=120)
    return (done.stdout + done.stderr).decode()


def assert_harmless(text: str) -> None:
    assert [c for c in text if not c.isprintable() and c not in "\n\t\r"] == []
    assert "PWNED" in text


@pytest.mark.parametrize("flags", [(), ("--traceback",), ("--json",)])
def test_an_environments_error_in_a_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Evil", "--tasks", f"{HERE}:TASKS")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    assert_harmless(said("run", *names, *engine, "--out", str(tmp_path / "run"), *flags))


@pytest.mark.parametrize("flags", [(), ("--traceback",)])
def test_an_error_that_ends_the_command(tmp_path: Path, flags: tuple[str, ...]) -> None:
    names = ("--agent", f"{HERE}:Asks", "--env", f"{HERE}:Evil", "--tasks", f"{HERE}:tasks")
    engine = ("--set", "engine.kind=scripted", "--set", 'engine.answers=["a"]')
    assert_harmless(said("run", *names, *engine, "--out", str(tmp_path / "run"), *flags))


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
