"""Two tiny models on disk, and one small run that trains both beside a judge who stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapereel.envs.load_named import load_named

from .stage import EXAMPLE, WORLD, config


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `guide` and `seeker`."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    load_named(f"{EXAMPLE}:save_models")(str(folder))
    return folder


@pytest.fixture(scope="package")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three updates, each measured; every version has its checkpoint."""
    from tapereel.finetune.run.train_run import train

    out = tmp_path_factory.mktemp("players") / "run"
    measured = {"fraction": 0.0, "tasks": f"{WORLD}:held_out", "every": 1}
    summary = train(config(models, evaluation=measured), out)
    assert summary.books_close
    return out
