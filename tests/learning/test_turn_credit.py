"""Tasks whose sum of rewards says little or nothing of what was done: only credit per turn learns them.

The turns' returns, less their mean at the same turn of the group, against GRPO's one advantage for an episode.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.setup import EmbeddedConfig
from tapereel.envs import Outcome
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.tapes import Answer, Sampling, Text

from ..finetune.loop import lab
from .test_recipes import lines_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]


class Paid(lab.Letters):
    """Each turn but the last asks for a letter."""

    async def reset(self, task: str) -> Text:
        self.right: list[float] = []
        return await super().reset(task)

    async def step(self, action: Answer) -> Outcome:
        right = float(action.text.startswith(self.task[self.turn]))
        self.turn, last = self.turn + 1, self.turn + 1 == len(self.task)
        reward = self.at_the_end() if last else self.for_letter(right)
        self.right.append(right)
        seen = None if last else Text(text=self.task[self.turn])
        return Outcome(seen, reward=reward, terminated=last, metrics={"right": 0.0 if last else right})

    def for_letter(self, right: float) -> float:
        return right

    def at_the_end(self) -> float:
        raise NotImplementedError


class Lent(Paid):
    """The last turn takes back what was paid: every sum is 0."""

    def at_the_end(self) -> float:
        return -sum(self.right)


class Raffle(Paid):
    """The last turn draws a prize that is far larger than what the letters pay."""

    prizes = random.Random(0)

    def at_the_end(self) -> float:
        return self.prizes.choice([-100.0, 100.0])


class Risen(Paid):
    """A turn pays what it is better than the turn before, and the end returns to 0: every sum is 0."""

    def for_letter(self, right: float) -> float:
        return right - (self.right[-1] if self.right else 0.0)

    def at_the_end(self) -> float:
        return -self.right[-1]


TASKS = ("ab+", "bc+", "cd+", "da+")


def right(world: type[Paid], per: str, seed: int, out: Path) -> tuple[float, float]:
    """The share of right letters in the first and in the last four updates."""
    lab.model(seed).save_pretrained(out / "model")
    lab.WORDS.save_pretrained(out / "model")
    credit = {"kind": "returns", "clock": "turn", "gamma": 0.0}
    changes: dict[str, Any] = {"reward": {"per": "turn"}, "credit": credit} if per == "turn" else {}
    config = TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{world.__module__}:{world.__name__}",
        tasks=TASKS,
        engine=EmbeddedConfig(model=str(out / "model"), slots=64),
        evaluation=EvaluationConfig(fraction=0),
        seed=seed,
        loop=LoopConfig(
            recipe="grpo",
            changes=changes,
            updates=24,
            groups=4,
            group_size=16,
            max_lag=0,
            limits=lab.LIMITS,
            optimiser=OptimiserConfig(lr=1e-2),
            sampling=Sampling(max_tokens=2),
            checkpoint_every=100,
        ),
    )
    train(config, out / "run")
    share = [line["component/right"] / 2 for line in lines_of(out / "run")]
    return sum(share[:4]) / 4, sum(share[-4:]) / 4


@pytest.mark.parametrize("world", [Lent, Raffle, Risen])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_only_credit_per_turn_learns(world: type[Paid], seed: int, tmp_path: Path) -> None:
    first, last = right(world, "turn", seed, tmp_path / "turn")
    _, whole = right(world, "episode", seed, tmp_path / "episode")
    print(world.__name__, seed, first, last, whole)
    assert last > first + 0.25
    assert last > whole + 0.25
