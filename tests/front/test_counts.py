"""Work that is counted and not timed: calls per turn and per record, tokens computed, passes over the logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counts import differences

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the table has the calls of Python 3.11")
@pytest.mark.timeout(300)
def test_the_counts_are_those_of_the_table() -> None:
    """A process of its own, because counts depend on what other tests have imported and cached."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "counts.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_count_that_grew_shrank_or_is_new_differs() -> None:
    table = {"calls": 100.0, "tokens": 50.0, "passes": 9.0}
    assert differences({"calls": 103.0, "tokens": 49.0, "passes": 9.0}, table) == []
    for name, now in (("calls", 104.0), ("calls", 96.0), ("tokens", 0.0), ("passes", 10.0)):
        (found,) = differences({**table, name: now}, table)
        assert found.startswith(f"{name}: {now:g} instead of {table[name]:g}")
    assert differences({**table, "new": 1.0}, table) == ["new is only in the measurement"]
    assert differences({}, {"calls": 1.0}) == ["calls is only in the table"]


def test_the_table_has_no_count_of_zero() -> None:
    assert all(json.loads((ROOT / "benchmarks" / "counts.json").read_text()).values())
