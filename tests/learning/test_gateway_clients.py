"""A model learns from what official clients ask through Responses and through Messages, and the run is reproduced.

One seed runs here. docs/project/learning.md has a table of several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..contract.clients_env import DONE

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1500)]
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gateway_learning.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, so that the warm start is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_model_learns_from_an_official_client(out: Path, api: str):
    if not DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.clients_env")
    words = ["--api", api, "--seed", "2", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(BENCHMARK), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((out / f"{api}-2.json").read_text())
    assert found["after"] >= found["before"] + 0.2, found
    assert (found["reproduce"], found["books_close"]) == ("verified", True)
