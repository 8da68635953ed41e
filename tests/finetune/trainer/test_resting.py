"""A rollout that takes longer than the time limit of a collective, and a rank 0 that is gone meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .resting import LIMIT

pytestmark = [pytest.mark.kill, pytest.mark.timeout(300)]


def start(folder: Path, seconds: float) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tapereel.tests.finetune.trainer.resting"]
    return [
        subprocess.Popen([*command, str(rank), str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]


def test_a_rollout_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    leads, follows = start(tmp_path, 2.5 * LIMIT)
    assert follows.communicate(timeout=120)[0] == "the end\n"
    leads.communicate(timeout=60)
    assert (leads.returncode, follows.returncode) == (0, 0)


@pytest.mark.parametrize("gone", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_0_that_gives_no_sign_of_life_is_lost(tmp_path: Path, gone: signal.Signals) -> None:
    leads, follows = start(tmp_path, 1000)
    assert leads.stdout is not None
    assert leads.stdout.readline() == "waits\n"
    leads.send_signal(gone)
    try:
        said, _ = follows.communicate(timeout=120)
    finally:
        leads.kill()
        leads.communicate()
    assert said.startswith("rank 1 of 2 ")
    assert "rank 0" in said
    assert "`resume=True`" in said
