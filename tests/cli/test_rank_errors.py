"""An error that several processes have is printed once, by rank 0. One that only another process has is printed too."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tapereel.cli import main, rank_errors

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m", "tapereel.cli"]
WRONG = "loop.updates = -1"


def words(updates: int = -1) -> list[str]:
    scene = {"agent": "a:a", "env": "a:e", "tasks": "a:t", "model": "m"}
    return ["train", *(f"--{name}={value}" for name, value in scene.items()), "--set", f"loop.updates={updates}"]


def test_torchrun_prints_a_wrong_setting_once():
    done = subprocess.run([*TORCHRUN, *words()], capture_output=True, text=True, timeout=250)
    assert done.returncode
    assert done.stderr.count(WRONG) == 1, done.stderr
    assert "interrupted" not in done.stderr
    assert {line.split()[2] for line in done.stderr.splitlines() if line.strip().startswith("exitcode")} == {"64"}


def test_a_dry_run_is_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, begins in (("1", ""), ("0", "trackers: [")):
        monkeypatch.setenv("RANK", rank)
        assert main([*words(2), "--dry-run"]) == 0
        assert capsys.readouterr().out[:11] == begins


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores the handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_another_rank_prints_its_own_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(rank_errors, "PATIENCE", 0.2)
    # The store of the launcher.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)

    def told(rank: int, *command: str) -> str:
        monkeypatch.setenv("RANK", str(rank))
        assert main([*command]) == 64
        return capsys.readouterr().err

    assert WRONG in told(1, *words()), "rank 0 has no error"
    assert WRONG in told(0, *words())
    assert told(1, *words()) == ""
    assert "--nothing" in told(1, *words(), "--nothing")
    assert "--nothing" in told(0, *words(), "--nothing")
    assert told(1, *words(), "--nothing") == ""
    assert "loop.updates = -2" in told(1, *words(-2)), "rank 0 has another error"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert WRONG in told(1, *words()), "the launcher started all processes again"
    del store
    monkeypatch.setenv("MASTER_PORT", "1")
    assert WRONG in told(1, *words()), "no store"
