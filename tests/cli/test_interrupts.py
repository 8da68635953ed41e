"""Ctrl-C and SIGTERM end a run in order, and the command that they print continues it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes.store import read_metrics

from .lab import MICRO, SCENE, WORLD, settings
from .world import EXAMPLE

pytestmark = pytest.mark.kill

SIGNALLED = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Signalled", "--tasks", f"{EXAMPLE}:tasks")


def _interrupted(folder: Path, at: int, by: signal.Signals, *words: str) -> list[str]:
    """Run a command in `folder`, in a process of its own that gets the signal at step `at` of its world, and return the
    last two lines that it prints."""
    environment = {**os.environ, "SIGNAL_STEP": f"{at} {by}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tapereel.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 130, done.stderr[-2000:]
    assert done.stdout == ""
    return done.stderr.splitlines()[-2:]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_the_printed_command_continues_a_training_run(
    by: signal.Signals, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ("train", *SIGNALLED, "--model", model, "--out", "my runs/first", *settings(*MICRO, "loop.max_lag=0"))
    said, command = _interrupted(tmp_path, 30, by, *words)
    assert said.startswith("tapereel train: interrupted")
    assert command == "  tapereel train --config 'my runs/first/config.yaml' --out 'my runs/first' --resume"
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    lines = read_metrics(tmp_path / "my runs" / "first" / "metrics.jsonl")
    assert [line["update"] for line in lines if line["phase"] == "rl"] == [1, 2, 3]


def test_an_interrupted_resumption_prints_its_own_words(tmp_path: Path):
    scripted = settings('engine.answers=["7"]', "concurrency=1")
    _interrupted(tmp_path, 3, signal.SIGINT, "run", *SIGNALLED, *scripted, "--out", "run")
    again: Sequence[str] = ("run", *SIGNALLED, *scripted, "--out", "run", "--resume")
    _, command = _interrupted(tmp_path, 3, signal.SIGINT, *again, "--take-over")
    assert shlex.split(command) == ["tapereel", *again]


def test_no_command_is_printed_if_no_run_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tapereel.agents.runs.runner.run", interrupted)
    words = ["run", *SCENE, *settings('engine.answers=["7"]'), "--out", str(tmp_path / "run")]
    assert main(words) == 130
    assert capsys.readouterr().err == "tapereel run: interrupted\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")  # another run, which these words would not resume
    assert main(words) == 130
    assert capsys.readouterr().err == "tapereel run: interrupted\n"


def test_sigterm_works_if_sigint_is_ignored(tmp_path: Path):
    """A shell script starts its background jobs like this."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from tapereel.cli.command import main; sys.exit(main())"
    )
    words = ["run", *SIGNALLED, *settings('engine.answers=["7"]'), "--out", "run"]
    environment = {**os.environ, "SIGNAL_STEP": f"3 {signal.SIGTERM}"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "  tapereel run --config run/config.yaml --out run --resume"


def test_an_interrupted_demo_keeps_its_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(config: object, out: Path, **more: object) -> None:
        out.mkdir()
        (out / "demo.yaml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("tapereel.finetune.run.demonstrations.demo", interrupted)
    out = str(tmp_path / "demo")
    assert main(["demo", "--out", out, "--controls"]) == 130
    command = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(command)[1:] == ["demo", "--config", f"{out}/demo.yaml", "--out", out, "--resume", "--controls"]
