"""Three tasks whose sum of rewards says nothing, or almost nothing, of what was done: only credit per turn learns them.

The turns' returns, less their mean at the same turn of the group, against GRPO's one advantage for an episode.
"""

from __future__ import annotations

import random
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


class Lucky(lab.Letters):
    """The first turn pays 10 or nothing, whatever is said; a right letter pays 1 in the others."""

    luck = random.Random(0)
    falls = False

    async def step(self, action: Answer) -> Outcome:
        first, right = not self.turn, float(action.text.startswith(self.task[self.turn]))
        self.turn += 1
        last = self.turn == len(self.task) or (self.falls and not first and not right)
        seen = None if last else Text(text=self.task[self.turn])
        reward = Lucky.luck.choice([0.0, 10.0]) if first else right
        return Outcome(seen, reward=reward, terminated=last, metrics={"right": 0.0 if first else right})


class Walk(Lucky):
    """The same, and a wrong letter ends it: every turn pays 1 as long as it goes on."""

    falls = True


TASKS = {
    Lent: (("ab+", "bc+", "cd+", "da+"), 0.0),
    Lucky: (("+ab", "+bc", "+cd", "+da"), 1.0),
    Walk: (("+abc", "+bcd", "+cda", "+dab"), 1.0),
}


def right(env: type[lab.Letters], per: str, seed: int, out: Path) -> tuple[float, float]:
    """The share of right letters in the first and in the last four updates."""
    lab.model(seed).save_pretrained(out / "model")
    lab.WORDS.save_pretrained(out / "model")
    tasks, gamma = TASKS[env]
    credit = {"kind": "returns", "clock": "turn", "gamma": gamma}
    changes: dict[str, Any] = {"reward": {"per": "turn"}, "credit": credit} if per == "turn" else {}
    config = TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{env.__module__}:{env.__name__}",
        tasks=tasks,
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
    share = [line["component/right"] / (len(tasks[0]) - 1) for line in lines_of(out / "run")]
    return sum(share[:4]) / 4, sum(share[-4:]) / 4


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("env", TASKS)
def test_only_credit_per_turn_learns(env: type[lab.Letters], seed: int, tmp_path: Path) -> None:
    (first, last), (_, whole) = (
        right(env, "turn", seed, tmp_path / "turn"),
        right(env, "episode", seed, tmp_path / "ep"),
    )
    print(f"| {env.__name__} | {seed} | {first:.2f} | {last:.2f} | {whole:.2f} |")
    assert last > first + 0.15
    assert last > whole + 0.15
