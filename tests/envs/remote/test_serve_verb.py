"""`tapereel serve env` as users run it."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.cli import command as cli
from tapereel.cli.console import Exit
from tapereel.envs.load_named import load_named
from tapereel.envs.remote import OpenEnvironment, Refused, RemoteEnvironment
from tapereel.tapes import Status

from .process import Served
from .test_pool import Simulator, mover
from .worlds import SIMULATOR


def test_it_serves_in_processes_with_a_token_and_ends_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = "a-token-of-some-length"
    monkeypatch.setenv("SERVED_TOKEN", token)
    options = ["--processes", "2", "--key", "SERVED_TOKEN", "--tasks", "[5]", "--call-seconds", "30"]
    with Served(SIMULATOR, tmp_path / "log", *options) as server:
        assert server.told == {"url": server.url, "environment": "Simulator", "places": 2, "token_file": None}

        async def check() -> None:
            def client(**more: Any) -> RemoteEnvironment:
                return RemoteEnvironment(server.url, Simulator, **more)

            engine = ScriptedEngine(["4", "9"])
            tape = await rollout(mover, lambda: client(key_variable="SERVED_TOKEN"), 0, engine=engine)
            assert (tape.status, tape.reward) == (Status.FINISHED, 13.0)
            with pytest.raises(Refused, match="401"):
                await client().reset(0)
            env = OpenEnvironment(server.url, key_variable="SERVED_TOKEN")
            await env.reset(None)
            data = load_named(SIMULATOR.replace("Simulator", "Move"))(number=4).model_dump()
            shown = (await env.step(env.action(data=data))).observation
            assert shown is not None
            assert shown.data["text"] == "9"  # type: ignore[attr-defined]
            await env.close()

        asyncio.run(check())
        assert server.end(signal.SIGTERM) == Exit.HOLDS
    log = (tmp_path / "log").read_text()
    assert token not in log
    assert log.splitlines()[-1] == "stopping"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--key", "NOT_SET_ANYWHERE"], "'NOT_SET_ANYWHERE'"),
        (["--tasks", "[]"], r"--tasks\b.*\[\]"),
        (["--tasks", "nowhere"], r"'nowhere'.*package\.module:name"),
        (["--processes", "0"], r"--processes: .*\b0\b.*\b1\b"),
        (["--sessions", "0"], r"--sessions: .*\b0\b.*\b1\b"),
        (["--call-seconds", "-1"], r"--call-seconds: .*-1\b.*\b0\b"),
        (["--message-bytes", "3"], r"--message-bytes: .*\b3\b.*\b1,024\b"),
        (["--port", "99999"], r"--port: .*\b99999\b.*\b0\b.*\b65535\b"),
        (["--port", "-1"], r"--port: .*-1\b"),
        (["--tasks", "[3"], r"'\[3'.*JSON"),
    ],
)
def test_what_can_not_be_meant_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "env", SIMULATOR, *words]) == Exit.USAGE
    assert re.search(told, capsys.readouterr().err)


def test_what_declares_nothing_is_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "env", f"{SIMULATOR.rpartition(':')[0]}:hang"]) == Exit.USAGE
    assert "Declared.of(" in capsys.readouterr().err
