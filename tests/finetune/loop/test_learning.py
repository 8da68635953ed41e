"""The loop learns what it is rewarded for: reward climbs, and with the sign of the rewards flipped it falls."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune import Loop
from tapereel.tapes.store import Store

from .lab import model, run, settings_of, tasks

UPDATES = 24


class Flipped(Loop):
    """Every advantage has the other sign."""

    def _plan(self, taken: Any) -> Any:
        tapes = [tape for group in taken.groups for tape in group.usable]
        rewards = tuple(None if tape.reward is None else -tape.reward for tape in tapes)
        return super()._plan(taken).model_copy(update={"rewards": rewards})


def rewards(path: Path) -> list[list[float]]:
    """Episode rewards of each update's batch, as the tapes have them."""
    store = Store.open(path)
    uses = [stored.record for stored in store.run_records("use")]
    found = [[store.tape(name, refresh=False).reward or 0.0 for name in use.info["tapes"]] for use in uses]
    store.close()
    return found


def late(batches: list[list[float]]) -> list[float]:
    """Episode rewards of the last five updates."""
    return [reward for batch in batches[-5:] for reward in batch]


def climbed(batches: list[list[float]]) -> float:
    """How much better the last five updates' episodes are than the first five's, in standard errors."""
    first, last = [r for batch in batches[:5] for r in batch], late(batches)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    return (statistics.fmean(last) - statistics.fmean(first)) / error


def taught(path: Path, recipe: str, cls: type[Loop], seed: int, **changes: Any) -> list[list[float]]:
    config = settings_of(updates=UPDATES, groups=8, group_size=8, recipe=recipe, **changes)
    _, reports = run(path, config, tasks=tasks(1), cls=cls, seed=seed, policy=model(seed))
    batches = rewards(path)
    assert [statistics.fmean(batch) for batch in batches] == [report.reward for report in reports]
    return batches


@pytest.mark.parametrize(("recipe", "lag"), [("grpo", 1), ("reinforce", 1), ("grpo", 0)])
def test_reward_climbs(tmp_path: Path, recipe: str, lag: int) -> None:
    batches = taught(tmp_path / "run", recipe, Loop, 0, max_lag=lag)
    assert climbed(batches) > 3
    assert statistics.fmean(late(batches)) > 0.25, "four letters: a constant answer earns no more"


@pytest.mark.parametrize("recipe", ["grpo", "reinforce"])
def test_with_flipped_advantages_reward_falls(tmp_path: Path, recipe: str) -> None:
    batches = taught(tmp_path / "run", recipe, Flipped, 0)
    assert climbed(batches) < 0
    assert statistics.fmean(late(batches)) < 0.04, "an untrained model earns 0.06"


@pytest.mark.learning
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["grpo", "reinforce"])
def test_reward_climbs_and_falls_whatever_the_seed(tmp_path: Path, recipe: str, seed: int) -> None:
    assert climbed(taught(tmp_path / "up", recipe, Loop, seed)) > 3
    assert climbed(taught(tmp_path / "down", recipe, Flipped, seed)) < 0
