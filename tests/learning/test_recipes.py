"""A small part of docs/project/learning.md, repeated by every run of the tests: each recipe learns, through `train`.

The world of letters, a micro model, seeds that are fixed. With every reward's sign turned the share of right letters
falls, so what climbs is no drift. And the critic that a configuration asks for: it learns, and it outlives a kill.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.setup import EmbeddedConfig
from tapereel.envs import Outcome
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.loop import CriticConfig
from tapereel.finetune.run import EvaluationConfig, TrainSummary, train
from tapereel.finetune.trainer.options import CriticOptimiserConfig
from tapereel.tapes import Answer, Sampling
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import METRICS, Store, read_metrics

from ..finetune.loop import lab

pytestmark = pytest.mark.learning

Lines = list[dict[str, Any]]


class Punished(lab.Letters):
    """The same world; a right letter costs what it would have earned."""

    async def step(self, action: Answer) -> Outcome:
        outcome = await super().step(action)
        assert isinstance(outcome.reward, float)
        return Outcome(outcome.observation, reward=-outcome.reward, terminated=outcome.terminated)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    lab.model().save_pretrained(folder)
    lab.WORDS.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainSummary]:
    """The run of a recipe, which is done once."""
    return functools.cache(lambda recipe: train(config_of(model, recipe), tmp_path_factory.mktemp(recipe) / "run"))


@pytest.fixture(scope="module")
def taught(trained: Callable[[str], TrainSummary]) -> str:
    """A model that knows some of the letters."""
    return trained("grpo").model


def config_of(
    model: str, recipe: str, env: type[lab.Letters] = lab.Letters, tasks: tuple[str, ...] = tuple("abcd"), **loop: Any
) -> TrainConfig:
    return TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{env.__module__}:{env.__name__}",
        tasks=tasks,
        engine=EmbeddedConfig(model=model, slots=64),
        evaluation=EvaluationConfig(fraction=0),
        loop=LoopConfig(
            **{
                "updates": 16,
                "groups": 4,
                "group_size": 16,
                "max_lag": 0,
                "recipe": recipe,
                "limits": lab.LIMITS,
                "optimiser": OptimiserConfig(lr=2e-2),
                "sampling": Sampling(max_tokens=2),
                "checkpoint_every": 100,
                **loop,
            }
        ),
    )


def lines_of(run: Path) -> Lines:
    """A line for each update."""
    return [line for line in read_metrics(run / METRICS) if line["phase"] == "rl"]


def mean_and_variance(lines: Lines) -> tuple[float, float]:
    """Mean reward of the updates' episodes, and the variance of that mean."""
    n = sum(line["episodes"] for line in lines)
    mean = sum(line["reward"] * line["episodes"] for line in lines) / n
    return mean, sum(line["reward/square"] * line["episodes"] for line in lines) / n**2 - mean**2 / n


def climbed(lines: Lines) -> float:
    """How much better the last four updates' episodes are than those of the first four, in standard errors."""
    (first, a), (last, b) = mean_and_variance(lines[:4]), mean_and_variance(lines[-4:])
    return (last - first) / math.sqrt(a + b)


@pytest.mark.parametrize("recipe", ["grpo", "reinforce", "rloo", "ppo", "dapo"])
def test_each_recipe_climbs(trained: Callable[[str], TrainSummary], recipe: str) -> None:
    summary = trained(recipe)
    assert summary.books_close
    lines = lines_of(Path(summary.run))
    assert climbed(lines) > 3
    assert mean_and_variance(lines[-4:])[0] > 0.25, "a constant answer earns no more"


def test_with_the_sign_of_rewards_turned_fewer_letters_are_right(taught: str, tmp_path: Path) -> None:
    train(config_of(taught, "ppo", Punished), tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert mean_and_variance(lines[:1])[0] < -0.25, "it knew them"
    assert climbed(lines) > 3, "what is earned climbs, and here it is minus the share of right letters"


def explained(lines: Lines) -> float:
    """Share of the spread of the critic's targets that its values account for."""
    spread = sum(line["value/target/square"] - line["value/target"] ** 2 for line in lines)
    return 1 - sum(line["value/error"] for line in lines) / spread


def test_the_critic_learns_by_its_own_settings(taught: str, tmp_path: Path) -> None:
    # No letter is right where a sign is asked for, so that the question says much of what will be earned.
    tasks = ("a+", "b-", "++", "--", "cc", "dd", "+a", "-b")
    critic = CriticConfig(optimiser=CriticOptimiserConfig(lr=3e-3), clip=None, first=16)
    train(config_of(taught, "ppo", tasks=tasks, critic=critic), tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert explained(lines[:1]) < 0.1, "a new critic says 0"
    assert explained(lines[-4:]) > 0.3
    assert all("value/clipped" not in line for line in lines), "clip=None"
    with Store.open(tmp_path / "run") as store:
        weights = {stored.record.digest for stored in store.run_records("publish")}
    assert len(weights) == 1, "first=16: the policy stays as it is in the first 16 updates"


def test_a_killed_run_goes_on_with_its_critic(model: str, tmp_path: Path) -> None:
    """Re-applied updates are compared with the weights that were published, which follow from the critic's values."""
    config = config_of(model, "ppo", updates=6, checkpoint_every=2)

    def kill(name: str, done: int, of: int, note: str) -> None:
        if name == "improving by rollouts" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", progress=kill)
    whole, resumed = train(config, tmp_path / "whole"), train(config, tmp_path / "run", resume=True)
    assert (Path(resumed.model) / "model.safetensors").read_bytes() == (
        Path(whole.model) / "model.safetensors"
    ).read_bytes()
    assert resumed.books_close


def test_a_critic_that_nothing_would_use_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loop\.critic\b"):
        train(config_of(model, "grpo", critic=CriticConfig()), tmp_path / "run")
