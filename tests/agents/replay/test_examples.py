"""Every example's agent replays its own episodes, and its environment executes them again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .scenes import EXAMPLES, SCENES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.docs
@pytest.mark.parametrize("name", SCENES)
def test_an_example_replays_and_is_executed_again(name: str):
    for needed in ("torch", "gymnasium", "mcp"):
        pytest.importorskip(needed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.agents.replay.scenes", name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 8


def test_each_example_with_an_agent_is_here():
    texts = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert {name for name, text in texts.items() if re.search(r"rollout\(|@agent|\(Agent\)", text)} == set(SCENES)
