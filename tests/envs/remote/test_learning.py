"""A model learns from an environment that runs in another process."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tapereel.envs.remote import RemoteEnvironment

from ...finetune.loop import lab
from ...finetune.loop.test_learning import UPDATES, climbed, late, rewards
from . import spelling
from .process import Served


@pytest.mark.learning
@pytest.mark.timeout(300)
def test_reward_climbs_through_a_remote_environment(tmp_path: Path) -> None:
    with Served(f"{spelling.__file__}:Spelling", tmp_path / "log") as server:
        for seed in (1, 2, 3):
            config = lab.settings_of(updates=UPDATES, groups=8, group_size=8)
            path = tmp_path / f"run{seed}"
            lab.run(
                path,
                config,
                env=lambda: RemoteEnvironment(server.url, spelling.Spelling),
                tasks=lab.tasks(1),
                seed=seed,
                policy=lab.model(seed),
            )
            batches = rewards(path)
            assert climbed(batches) > 3
            assert statistics.fmean(late(batches)) > 0.25, "four letters: a constant answer earns no more"
