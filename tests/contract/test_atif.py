"""The models of the `atif` package read every trajectory, and have a field for each of its fields."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tapereel.finetune.interchange import write

from ..finetune.interchange.trajectories import KINDS
from .clients_env import DONE, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


def test_the_models_of_atif_read_every_kind_of_tape(tmp_path: Path):
    if not DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.clients_env")
    tapes = [make() for make in KINDS.values()]
    assert write(tapes, tmp_path / "out", "atif").records == len(KINDS)
    files = sorted((tmp_path / "out").glob("*/trajectory.json"))
    assert len(files) == len(KINDS)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(["atif", json.loads(file.read_bytes())]) + "\n" for file in files))
    script = Path(__file__).with_name("clients_run.py")
    done = subprocess.run([PYTHON, script, "parse", lines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
