"""What PPO's critic comes to, through `train` itself, on tasks whose values are known in closed form.

No answer earns more than another here, so that the values stay the same while the policy moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Limits
from tapereel.agents.setup import EmbeddedConfig
from tapereel.envs import Environment, Outcome
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.loop import CriticConfig
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.finetune.trainer.options import CriticOptimiserConfig
from tapereel.tapes import Answer, Sampling, Text

from ..finetune.loop import lab
from .test_recipes import Lines, lines_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]
PRICES = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 1.0}


class Steady(Environment[Answer]):
    """Pays 1 each turn, for ever, and is cut off after as many turns as the task says; no state shows how many."""

    truncates = True

    async def reset(self, task: str) -> Text:
        self.left = int(task)
        return Text(text="a")

    async def step(self, action: Answer) -> Outcome:
        self.left -= 1
        return Outcome(Text(text="a"), reward=1.0, truncated=self.truncates and not self.left)


class Endless(Steady):
    """The same without its own end: the rollout's limit of turns cuts it off."""

    truncates = False


class Priced(Environment[Answer]):
    """Shows the task's first letter, and pays the price of its second."""

    async def reset(self, task: str) -> Text:
        self.price = PRICES[task[1]]
        return Text(text=task[0])

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=self.price, terminated=True)


def lines(
    out: Path, env: type[Environment[Answer]], tasks: tuple[str, ...], credit: dict[str, Any], **loop: Any
) -> Lines:
    """The metrics of a run of `ppo` with a learning critic."""
    lab.model(context=128).save_pretrained(out / "model")
    lab.WORDS.save_pretrained(out / "model")
    body = loop.pop("body", "own")
    # A head alone reads the states that the policy has, and needs larger steps.
    lr = 3e-3 if body == "own" else 1e-2
    config = TrainConfig(
        agent=f"{lab.__name__}:Speaker",
        env=f"{env.__module__}:{env.__name__}",
        tasks=tasks,
        engine=EmbeddedConfig(model=str(out / "model"), slots=64),
        evaluation=EvaluationConfig(fraction=0),
        loop=LoopConfig(
            **{
                "recipe": "ppo",
                "changes": {"credit": credit},
                "updates": 40,
                "groups": 8,
                "group_size": 2,
                "limits": Limits(turns=8, agent_seconds=60.0, system_seconds=60.0),
                "optimiser": OptimiserConfig(lr=1e-4),
                "critic": CriticConfig(body=body, clip=None, optimiser=CriticOptimiserConfig(lr=lr), passes=8),
                "sampling": Sampling(max_tokens=2),
                "checkpoint_every": 100,
                **loop,
            }
        ),
    )
    train(config, out / "run")
    return lines_of(out / "run")


def mean(some: Lines, name: str) -> float:
    return sum(line[name] for line in some) / len(some)


TURNS = tuple("12345678")
DISCOUNTED = {"clock": "turn", "gamma": 0.9}
FOREVER = 1 / (1 - 0.9)
AT_MOST = (1 - 0.9**8) / (1 - 0.9)
"""What the first state of the longest episode is worth where nothing comes after a cut."""


@pytest.mark.ledger("F44")
@pytest.mark.parametrize(("env", "body"), [(Steady, "own"), (Steady, "policy"), (Endless, "own")])
def test_cut_off_at_random_a_state_is_worth_what_it_earns_for_ever(
    env: type[Steady], body: str, tmp_path: Path
) -> None:
    found = lines(tmp_path, env, TURNS, DISCOUNTED, body=body)
    assert all(line["episode/bootstrapped"] == 1 for line in found)
    assert mean(found[:1], "value") == 0, "a new critic says 0"
    assert mean(found[-5:], "value") == pytest.approx(FOREVER, rel=0.05)
    assert mean(found[-5:], "value/target") == pytest.approx(FOREVER, rel=0.05)
    assert mean(found[-5:], "value/error") < 0.2


@pytest.mark.ledger("F44")
def test_without_the_bootstrap_it_is_worth_the_truncated_sum(tmp_path: Path) -> None:
    """Over the states of episodes of 1 to 8 turns: with k turns to go (1 - gamma^k) / (1 - gamma)."""
    found = lines(tmp_path, Steady, TURNS, {**DISCOUNTED, "bootstrap": False, "lam": 1.0})
    states = [k for turns in range(1, 9) for k in range(1, turns + 1)]
    biased = sum((1 - 0.9**k) / (1 - 0.9) for k in states) / len(states)
    assert biased < AT_MOST < FOREVER - 4
    assert "episode/bootstrapped" not in found[0]
    assert mean(found[-5:], "value") == pytest.approx(biased, rel=0.1)


@pytest.mark.ledger("F59")
@pytest.mark.parametrize("body", ["own", "policy"])
def test_the_critic_explains_what_the_state_decides_and_nothing_where_it_decides_nothing(
    body: str, tmp_path: Path
) -> None:
    same, shuffled = tuple(x * 2 for x in "abcd"), tuple(x + y for x in "abcd" for y in "abcd")
    for folder in ("state", "shuffled"):
        (tmp_path / folder).mkdir()
    decided = lines(tmp_path / "state", Priced, same, {}, body=body)
    assert decided[0]["value/explained"] < 0.1, "a new critic says 0"
    assert mean(decided[-5:], "value/explained") > 0.8
    control = lines(tmp_path / "shuffled", Priced, shuffled, {}, body=body, groups=16)
    assert mean(control[-5:], "value/explained") < 0.15
