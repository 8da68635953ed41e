"""A teacher improves a small student through `tapereel train`: its KL falls, and the held-out reward rises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tapereel import save_tiny_model
from tapereel.tapes.store import METRICS, read_metrics

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SETTINGS = {
    "loop.sampling.max_tokens": 1,
    "loop.groups": 8,
    "loop.group_size": 8,
    "evaluation.fraction": 0.3,
    "evaluation.attempts": 4,
    "trainer.threads": 1,
}


def train(model: Path, out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    scene = (f"{name}={DIGITS}:{value}" for name, value in (("agent", "player"), ("env", "Digits"), ("tasks", "tasks")))
    words = [*scene, *(f"{name}={value}" for name, value in {**SETTINGS, **settings}.items())]
    command = [sys.executable, "-m", "tapereel.cli", "train", "--model", str(model), "--out", str(out), "--json"]
    done = subprocess.run(
        [*command, *(part for word in words for part in ("--set", word))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.ledger("X13")
def test_a_student_without_rewards_learns_from_its_teacher(tmp_path: Path):
    models = [
        save_tiny_model(tmp_path / name, "0123456789", size="micro", seed=k) for k, name in enumerate(("one", "other"))
    ]
    teacher = train(models[0], tmp_path / "teacher", {"loop.updates": 80, "loop.optimiser.lr": 3e-3})
    assert teacher["held_out"]["after"] > 0.8, "the teacher knows little: the test would show nothing"

    settings = {"loop.recipe": "distill", "loop.teacher": teacher["model"], "loop.updates": 30}
    student = train(models[1], tmp_path / "student", {**settings, "loop.optimiser.lr": 1e-2})
    print(json.dumps(student["held_out"]))
    kl = [line["kl/teacher/k3"] for line in read_metrics(tmp_path / "student" / METRICS) if "kl/teacher/k3" in line]
    assert len(kl) == 30
    assert fmean(kl[-3:]) < fmean(kl[:3]) / 2
    assert student["held_out"]["before"] < 0.3
    assert student["held_out"]["after_change"]["low"] > 0.2
