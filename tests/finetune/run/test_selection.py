"""`select` in the settings of `train`: a few of each group are kept before they are compared, groups by their mean."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

import tapereel as tr
from tapereel.finetune.recipes import read_recipes
from tapereel.tapes.store import Store, read_metrics

REWARDS = (1.0, 1.0, 0.0, 1.0)


class Paid(tr.Environment):
    """Each episode of a group earns the next of `REWARDS`, whatever the answer."""

    begun: ClassVar[count[int]] = count()

    async def reset(self, task: str) -> str:
        self.number = next(Paid.begun)
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=REWARDS[self.number % 4] + (self.number // 4 % 2) * 10, terminated=True)


def trained(folder: Path, select: dict[str, Any], **more: Any) -> tuple[tr.Run, dict[str, Any], list[Any]]:
    """(run, its line of metrics, rewards of the episodes that were trained on) of one update."""
    Paid.begun = count()
    model = tr.save_tiny_model(folder / "model", alphabet="ab", size="micro")
    settings = {
        "loop.groups": 1,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.max_concurrent": 4,
        "loop.sampling.max_tokens": 2,
        "loop.changes": {"select": select},
        "evaluation.fraction": 0,
        **more,
    }
    run = tr.train(tr.ChatAgent(), Paid, ["a"], model, updates=1, recipe="grpo", out=folder / "run", settings=settings)
    (line,) = read_metrics(folder / "run" / "metrics.jsonl")
    with Store.open(folder / "run") as store:
        (use,) = (stored.record for stored in store.run_records("use"))
        return run, dict(line), sorted(store.tape(tape).reward or 0.0 for tape in {item[0] for item in use.items})


@pytest.mark.ledger("X5")
def test_the_baseline_is_of_the_episodes_that_are_kept(tmp_path: Path) -> None:
    run, line, kept = trained(tmp_path, {"keep": 2, "keep_how": "spread"})
    assert kept == [0.0, 1.0]
    # As TorchRL's selection of candidates: (1 - 0.5) / sqrt(0.5), not (1 - 0.75) / 0.5 over all four.
    assert (line["advantage/min"], line["advantage/max"]) == pytest.approx((-0.7071, 0.7071), abs=1e-4)
    assert line["reward"] == 0.75, "of all that was sampled"
    assert run.reproduce().outcome == "verified"


@pytest.mark.ledger("X5")
def test_a_run_of_before_keeps_its_order(tmp_path: Path) -> None:
    run, line, kept = trained(tmp_path, {"keep": 2, "keep_how": "spread", "keep_when": "after_baseline"})
    assert kept == [0.0, 1.0]
    assert (line["advantage/min"], line["advantage/max"]) == pytest.approx((-1.5, 0.5), abs=1e-4)
    config, recipes = (run.path / name for name in ("config.yaml", "recipes.json"))
    config.write_text(re.sub(r"\n *keep_when: after_baseline", "", config.read_text()))
    recorded = json.loads(recipes.read_text())
    for recipe in recorded.values():
        del recipe["select"]["keep_when"], recipe["select"]["mean_bounds"]
    recipes.write_text(json.dumps(recorded))
    assert "keep_when" not in config.read_text() + recipes.read_text()
    found = read_recipes(run.path)["rl"]
    assert getattr(found, "select").keep_when == "after_baseline"  # noqa: B009
    assert run.reproduce().outcome == "verified"


@pytest.mark.ledger("X5")
@pytest.mark.parametrize(("bounds", "kept"), [([0.1, 0.9], [0.0, 1.0, 1.0, 1.0]), ([None, 0.7], []), ([11, None], [])])
def test_a_group_enters_by_the_mean_of_its_rewards(tmp_path: Path, bounds: list[float | None], kept: list[float]):
    _, line, found = trained(tmp_path, {"mean_bounds": bounds})
    assert found == kept
    assert line["episode/mean_outside"] == (not kept)


def test_the_mean_is_of_the_episodes_that_are_kept(tmp_path: Path) -> None:
    _, _, kept = trained(tmp_path, {"keep": 2, "keep_how": "spread", "mean_bounds": [None, 0.6]})
    assert kept == [0.0, 1.0], "their mean is 0.5, that of all 0.75"


def test_what_is_kept_lies_within_the_bounds(tmp_path: Path) -> None:
    _, line, kept = trained(tmp_path, {"keep": 2, "bounds": [None, 10.5]}, **{"loop.group_size": 8})
    assert kept == [1.0, 10.0], "the best two of 1 1 0 1 10, not of 1 1 0 1 11 11 10 11"
    assert line["advantage/max"] == pytest.approx(0.7071, abs=1e-4)
    assert line["episode/outside"] == 3 / 8
