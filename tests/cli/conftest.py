"""A micro model on disk, and one small training run that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.envs.load_named import load_named

from .lab import MICRO, SCENE, settings
from .world import EXAMPLE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an untrained micro model that knows digits."""
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    load_named(f"{EXAMPLE}:save_model")(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of three updates, with groups large enough that some reward differs."""
    out = tmp_path_factory.mktemp("trained") / "run"
    more = settings(*MICRO, "loop.groups=8", "loop.group_size=8", "evaluation.every=1", "evaluation.greedy=true")
    assert main(["train", *SCENE, "--model", model, "--out", str(out), *more]) == 0
    return out
