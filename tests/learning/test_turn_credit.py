"""A task whose sum of rewards says nothing of what was done: only credit per turn learns it.

The turns' returns, less their mean at the same turn of the group, against GRPO's one advantage for an episode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.setup.engine_config import EmbeddedConfig
from tapereel.envs import Outcome
from tapereel.finetune.loop.loop_config import LoopConfig, OptimiserConfig
from tapereel.finetune.run.train_config import EvaluationConfig, TrainConfig
from tapereel.finetune.run.train_run import train
from tapereel.tapes import Answer, Sampling, Text

from ..finetune.loop import lab
from .test_recipes import lines_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]


class Lent(lab.Letters):
    """A right letter pays 1, and the last turn takes back what was paid: every sum is 0."""

    async def reset(self, task: str) -> Text:
        self.paid = 0.0
        return await super().reset(task)

    async def step(self, action: Answer) -> Outcome:
        right = float(action.text.startswith(self.task[self.turn]))
        self.turn, last = self.turn + 1, self.turn + 1 == len(self.task)
        reward, self.paid = (-self.paid, 0.0) if last else (right, self.paid + right)
        seen = None if last else Text(text=self.task[self.turn])
        return Outcome(seen, reward=reward, terminated=last, metrics={"right": 0.0 if last else right})


TASKS = ("ab+", "bc+", "cd+", "da+")


def right(per: str, seed: int, out: Path) -> tuple[float, float]:
    """The share of right letters in the first and in the last four updates."""
    lab.model(seed).save_pretrained(out / "model")
    lab.WORDS.save_pretrained(out / "model")
    credit = {"kind": "returns", "clock": "turn", "gamma": 0.0}
    changes: dict[str, Any] = {"reward": {"per": "turn"}, "credit": credit} if per == "turn" else {}
    config = TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{Lent.__module__}:{Lent.__name__}",
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_only_credit_per_turn_learns_what_is_taken_back_later(seed: int, tmp_path: Path) -> None:
    first, last = right("turn", seed, tmp_path / "turn")
    _, whole = right("episode", seed, tmp_path / "episode")
    assert last > first + 0.25
    assert last > whole + 0.25
