"""Episodes in real Ray actors. `tests/contract/ray_env.py` makes the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .ray_env import DONE, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["same", "killed", "stopped", "node", "lead", "refused"])
def test_episodes_run_in_ray_as_here(part: str, tmp_path: Path) -> None:
    if not DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.ray_env")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, HERE / "ray_run.py", part], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
