"""Runs that need less memory: the optimiser's state in main memory. They train, resume and reproduce."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.finetune.inspect.reproducer import reproduce
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.finetune.run.train_run import train
from tapereel.tapes.common.config import dump_config
from tapereel.tapes.store.run_directory import METRICS, read_metrics

from . import lab
from .lab import WORDS, assert_books_close, model, settings_of

pytestmark = pytest.mark.timeout(120)


def config_of(folder: Path, trainer: dict[str, Any], updates: int = 4) -> TrainConfig:
    """A run whose episodes and weights are the same each time, since it is synchronous."""
    if not folder.exists():
        model().save_pretrained(folder)
        WORDS.save_pretrained(folder)
    scene = Path(lab.__file__)
    return TrainConfig.model_validate(
        {
            "agent": f"{scene}:Speaker",
            "env": f"{scene}:Letters",
            "tasks": ["a", "b", "c", "d"],
            "evaluation": {"fraction": 0.25},
            "engine": {"kind": "embedded", "model": str(folder)},
            "trainer": trainer,
            "loop": settings_of(updates=updates, max_lag=0, checkpoint_every=2).model_dump(),
        }
    )


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / f"update-{update:06d}" / "policy.pt", weights_only=True)


def assert_same_weights(one: Path, other: Path, update: int) -> None:
    ours, theirs = weights(one, update), weights(other, update)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def killed(config: TrainConfig, folder: Path) -> Path:
    """A run that was killed with SIGKILL after an update behind its newest checkpoint."""
    folder.mkdir()
    (folder / "train.yaml").write_text(dump_config(config))
    words = ["train", "--config", str(folder / "train.yaml"), "--out", str(folder / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "tapereel.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while process.poll() is None and not _behind_a_checkpoint(folder / "run"):
            try:
                process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        _, said = process.communicate()
    assert process.returncode == -9, said.decode()
    return folder / "run"


def _behind_a_checkpoint(run: Path) -> bool:
    lines = read_metrics(run / METRICS) if (run / METRICS).exists() else []
    return any(line.get("phase") == "rl" and line.get("update", 0) >= 3 for line in lines)  # type: ignore[operator]


@pytest.mark.ledger("F91")
def test_a_run_may_move_its_optimiser_to_main_memory_when_it_is_resumed(tmp_path: Path) -> None:
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    assert train(config_of(tmp_path / "model", {}), plain).books_close
    train(config_of(tmp_path / "model", {}, updates=2), moved)
    summary = train(config_of(tmp_path / "model", {"offload": True}), moved, resume=True)
    assert (summary.updates, summary.books_close) == (4, True)
    assert_same_weights(plain, moved, update=4)
    assert reproduce(moved).outcome == "verified"


@pytest.mark.kill
@pytest.mark.ledger("F91")
@pytest.mark.parametrize("trainer", [{"offload": True}], ids=["offload"])
def test_a_run_that_was_killed_ends_with_the_same_weights(tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = config_of(tmp_path / "model", trainer, updates=20)
    died = killed(config, tmp_path / "died")
    assert train(config, died, resume=True).books_close
    train(config, tmp_path / "whole")
    assert_same_weights(died, tmp_path / "whole", update=20)
    assert reproduce(died).outcome == "verified"
    assert_books_close(died)
