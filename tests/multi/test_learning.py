"""The example in which two agents learn: both climb, whatever the seed."""

from __future__ import annotations

import math
import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.store import Store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_agents.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return runpy.run_path(str(EXAMPLE), run_name="two_agents")


def earned(path: Path, agent: str) -> list[list[float]]:
    """Rewards of that agent in each update's episodes, as the tapes have them."""
    with Store.open(path) as store:
        uses = [stored.record for stored in store.run_records("use") if stored.record.lineage == "guide"]
        return [[reward.value for name in use.info["tapes"] for reward in store.tape(name, refresh=False).rewards
                 if reward.name.endswith(f"@{agent}")] for use in uses]  # fmt: skip


def climbed(batches: list[list[float]]) -> float:
    """How far the last five updates are above the first five, in standard errors."""
    first, last = ([reward for batch in part for reward in batch] for part in (batches[:5], batches[-5:]))
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    return (statistics.fmean(last) - statistics.fmean(first)) / error


@pytest.mark.parametrize("shared", [False, True])
def test_the_example_runs(example: dict[str, Any], tmp_path: Path, shared: bool) -> None:
    lines = example["train"](tmp_path / "run", 2, shared=shared)
    assert [line["update"] for line in lines] == [1, 2]
    assert all(0 <= line[f"reward/{path}"] <= 1 for line in lines for path in (example["GUIDE"], example["SEEKER"]))


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_learn(example: dict[str, Any], tmp_path: Path, seed: int) -> None:
    example["train"](tmp_path / "run", 40, seed=seed)
    for path in (example["GUIDE"], example["SEEKER"]):
        assert climbed(earned(tmp_path / "run", path)) > 3, path
