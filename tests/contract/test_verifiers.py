"""VerifiersEnvironment with the real package, against verifiers' own rollout of the same answers.

`tests/contract/verifiers_env.py` makes its environment.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .verifiers_env import DONE, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["same", "functions", "failing", "refused", "commands"])
def test_environments_of_verifiers_run_here_as_there(part: str, tmp_path: Path) -> None:
    if not DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.verifiers_env")
    home = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, HERE / "verifiers_run.py", part]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **home}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
