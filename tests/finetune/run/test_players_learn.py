"""The example in which two agents learn, by its configuration: both climb, whatever the seed."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import TrainSummary, train
from tapereel.tapes.common import load_config
from tapereel.tapes.store import Store, read_metrics

from .stage import EXAMPLE, GUIDE, SEEKER

CONFIG = Path(EXAMPLE).with_suffix(".yaml")


def settings_of(models: Path) -> list[str]:
    """What makes the example's own file run from anywhere, with the models of the tests."""
    return [
        f"engine.model={models / 'guide'}",
        f"players.seeker.engine.model={models / 'seeker'}",
        *(f"{key}={EXAMPLE}:{name}" for key, name in (("agent", "Pair"), ("env", "Hidden"), ("tasks", "tasks"))),
    ]


def learned(models: Path, out: Path, seed: int, *more: str) -> TrainSummary:
    return train(load_config(TrainConfig, CONFIG, [*settings_of(models), f"seed={seed}", *more]), out)


def earned(path: Path, agent: str, lineage: str) -> list[list[float]]:
    """Rewards of that agent in each update's episodes, as the tapes have them."""
    with Store.open(path) as store:
        uses: list[Any] = list(store.ledger(lineage).uses)
        return [
            [
                reward.value
                for name in use.info["tapes"]
                for reward in store.tape(name, refresh=False).rewards
                if reward.name.endswith(f"@{agent}")
            ]
            for use in uses
        ]


def climbed(batches: list[list[float]]) -> float:
    """How far the last five updates are above the first five, in standard errors."""
    first, last = ([reward for batch in part for reward in batch] for part in (batches[:5], batches[-5:]))
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    return (statistics.fmean(last) - statistics.fmean(first)) / error


def test_the_example_runs_as_its_file_says(models: Path, tmp_path: Path) -> None:
    summary = learned(models, tmp_path / "run", 0, "loop.updates=2")
    assert (summary.updates, summary.players["seeker"].updates, summary.books_close) == (2, 2, True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= line[f"reward/agent/{path}"] <= 1 for line in lines for path in (GUIDE, SEEKER))


def test_people_read_of_each(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [*settings_of(models), "loop.updates=1"]
    words = [word for text in sets for word in ("--set", text)]
    assert main(["train", "--config", str(CONFIG), "--out", str(tmp_path / "run"), *words]) == 0
    out = capsys.readouterr().out
    assert f"first and last five updates of {GUIDE}" in out
    assert f"first and last five updates of {SEEKER}" in out
    assert f"{tmp_path / 'run'}/checkpoints/seeker/update-000001/hf" in out


def test_one_policy_may_speak_for_both(models: Path, tmp_path: Path) -> None:
    summary = learned(models, tmp_path / "run", 0, "loop.updates=1", "players={}", "loop.agents=null")
    assert (summary.updates, summary.players, summary.books_close) == (1, {}, True)
    with Store.open(tmp_path / "run") as store:
        (use,) = store.ledger(summary.lineage).uses
        by = {(tape.id, call.call): call.by for tape in store.tapes() for call in tape.calls}
    assert {by[item[0], item[1]] for item in use.items} == {GUIDE, SEEKER}


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_learn(models: Path, tmp_path: Path, seed: int) -> None:
    summary = learned(models, tmp_path / "run", seed)
    for path in (GUIDE, SEEKER):
        assert climbed(earned(tmp_path / "run", path, summary.lineage)) > 3, path
        found = summary.agents[path]
        assert found["first"] is not None
        assert found["last"] is not None
        assert found["last"] > found["first"]
