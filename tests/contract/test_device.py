"""Training where the CPU's tensors are not: on a device made for that, and next to the same training on the CPU.

No GPU is needed, and none of its kernels is tried; see `standin/elsewhere.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .elsewhere_device import library

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.mark.ledger("F91")
def test_what_trains_on_another_device_comes_to_the_same(tmp_path: Path) -> None:
    if not library().exists():
        pytest.fail(f"there is no {library()}; make it: python -m tests.contract.elsewhere_device")
    package = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.device_run", str(tmp_path)],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "TAPEREEL_ELSEWHERE": str(library())},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for case in found["compared"]:
        near = 0.1 if case["narrow"] else 1e-9
        assert case["there"] == pytest.approx(case["here"], rel=near, abs=near), case["case"]
        assert case["off"] < near, case["case"]
    for device, run in {**found["runs"], "ppo": found["critic"]}.items():
        assert (run["books"], run["updates"], run["reproduce"], run["requery"]) == (True, 4, 0, 0), device
    assert found["runs"]["elsewhere"]["devices"] == found["critic"]["devices"] == ["elsewhere"]
    assert found["runs"]["elsewhere"]["reward"] == pytest.approx(found["runs"]["cpu"]["reward"])
    assert found["off"] < 1e-4
    here, there = found["served"]
    assert there == pytest.approx(here, abs=1e-4)
