"""The demo learns from what it claims to learn from: with two controls, and with pictures.

One seed runs here. `benchmarks/shuffled_control.py` runs ten, and docs/project/measurements.md has their table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.store import METRICS, Store, read_metrics

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1500)]


DEMO = Path(__file__).resolve().parents[2] / "runs" / "demo"
"""Where README's command leaves its run, which CI begins with."""


def demo(out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tapereel.cli", "demo", "--out", str(out), "--json", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_demo_learns_and_its_controls_dont():
    result = demo(DEMO, "--controls", *(["--resume"] if DEMO.exists() else []))
    print(json.dumps(result))
    held_out, controls = result["held_out"], result["controls"]
    assert held_out["before"] < 0.4
    assert held_out["after"] >= 0.85
    assert held_out["greedy_after"] >= 0.8
    for control in controls.values():
        assert control["after"] <= held_out["after"] - 0.2
        # A habit that all tasks share solves a third of them.
        assert control["greedy_after"] <= 0.7
    tokens = result["tokens"]
    for name, control in controls.items():
        # Shuffled rewards may shrink the episodes to nothing; that control then ends at four times the updates.
        if not (name == "shuffled" and _updates(DEMO / "controls" / name) == 4 * _updates(DEMO)):
            assert control["trained_tokens"] == pytest.approx(tokens["applied"] - _imitated(DEMO), rel=0.15)
    with Store.open(DEMO) as store:
        assert store.books().closes
    for name in ("report.html", "metrics.jsonl", "config.yaml"):
        assert (DEMO / name).stat().st_size > 0


def test_pictures_are_learned_from_and_pictures_of_other_walks_are_not(tmp_path):
    seeing = demo(tmp_path / "seeing", "--pictures", "--seed", "0")
    blind = demo(tmp_path / "blind", "--pictures", "--blind", "--seed", "0")
    print(json.dumps([seeing["held_out"], blind["held_out"]]))
    assert seeing["held_out"]["before"] < 0.35
    assert seeing["held_out"]["after"] >= 0.75
    assert max(blind["held_out"]["after"], blind["held_out"]["greedy_after"]) <= 0.4
    with Store.open(tmp_path / "seeing") as store:
        assert store.books().closes


def _updates(run: Path) -> int:
    """Updates of the loop in a run's metrics."""
    return sum(line["phase"] == "rl" for line in read_metrics(run / METRICS))


def _imitated(out: Path) -> int:
    """Token-updates of the warm start."""
    with Store.open(out) as store:
        uses = [use.record for use in store.run_records("use")]
    return sum(end - start for use in uses if use.info["phase"] == "sft" for _, _, start, end, _ in use.items)
