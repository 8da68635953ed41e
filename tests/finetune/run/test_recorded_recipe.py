"""A run goes on, and is reproduced, with the recipe that it recorded; a later version may have other constants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.setup import EmbeddedConfig
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.recipes import RECIPES, Recipe, get_recipe, read_recipes
from tapereel.finetune.run import EvaluationConfig, train, training
from tapereel.tapes import Sampling
from tapereel.tapes.store import METRICS, read_metrics

from ...attack import cut_off_world
from ..loop import lab


def config_of(folder: Path) -> TrainConfig:
    lab.model().save_pretrained(folder / "model")
    lab.WORDS.save_pretrained(folder / "model")
    return TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{cut_off_world.__name__}:Steady",
        tasks=("1", "2", "3", "4"),
        engine=EmbeddedConfig(model=str(folder / "model"), slots=32),
        evaluation=EvaluationConfig(fraction=0),
        loop=LoopConfig(
            recipe="ppo",
            updates=4,
            groups=4,
            group_size=2,
            max_lag=0,
            checkpoint_every=10,
            sampling=Sampling(max_tokens=2),
            limits=lab.LIMITS,
            optimiser=OptimiserConfig(lr=1e-2),
        ),
    )


def old_file(directory: Path, recipes: Mapping[str, Recipe]) -> None:
    """`recipes.json` as a version without `Credit.bootstrap` wrote it."""
    plain: dict[str, Any] = {phase: recipe.model_dump(mode="json") for phase, recipe in recipes.items()}
    for recipe in plain.values():
        del recipe["credit"]["bootstrap"]
    (directory / "recipes.json").write_text(json.dumps(plain))


@pytest.mark.ledger("F44", "P9")
def test_a_run_from_before_the_bootstrap_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = config_of(tmp_path), tmp_path / "run"

    def kill(name: str, done: int, of: int, note: str) -> None:
        if name == "improving by rollouts" and done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as then:
        then.setitem(RECIPES, "ppo", get_recipe("ppo", {"credit": {"bootstrap": False}}))
        then.setattr(training, "write_recipes", old_file)
        with pytest.raises(KeyboardInterrupt):
            train(config, run, progress=kill)
    train(config, run, resume=True)  # updates are applied again and compared with their records
    assert reproduce(run).outcome == "verified"
    recorded = read_recipes(run)["rl"]
    assert isinstance(recorded, Recipe)
    assert not recorded.credit.bootstrap
    new = train(config, tmp_path / "new")
    assert reproduce(new.run).outcome == "verified"
    for path, bootstraps in ((run, False), (Path(new.run), True)):
        lines = [line for line in read_metrics(path / METRICS) if line["phase"] == "rl"]
        assert {"episode/bootstrapped" in line for line in lines} == {bootstraps}
    (run / "recipes.json").write_text("no recipes")
    broken = reproduce(run)
    assert (broken.outcome, "recipes.json" in str(broken.reason)) == ("unverifiable", True)
