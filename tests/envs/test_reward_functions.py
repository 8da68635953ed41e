"""Fifty functions that score an answer, each declared in every way: the reward is what plain Python computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome, Rewards, RewardSource
from tapereel.envs.adapters import ToolEnvironment, TRLEnvironment, trl_reward, trl_row
from tapereel.envs.environment import EnvironmentFactory, NotAnEnvironment
from tapereel.envs.rewards import rewarded
from tapereel.envs.rewards.sources import ensemble
from tapereel.tapes import Status, Tape, Task
from tapereel.tapes.errors import BadArgument

from ..contract.reward_functions import ANSWER, FUNCTIONS, TEXTS, Function


def stated(task: Any) -> str:
    return Task.of(task).private["answer"]  # type: ignore[index,call-overload,return-value]


def of_tape(function: Function) -> Callable[[Tape], Any]:
    return lambda tape: function(str(tape.actions[-1]), stated(tape.begin.task))


def of_batch(function: Function) -> Callable[..., list[Any]]:
    return lambda completions, answer, **_: [function(c, a) for c, a in zip(completions, answer, strict=True)]


class Once(Environment):
    """One turn; `_function` scores it at its place."""

    _function: Function
    place = "nowhere"

    async def reset(self, task: Any) -> str:
        self.answer, self.text = stated(task), ""
        return "6 * 7?"

    async def step(self, action: Any) -> Outcome:
        self.text = action.text
        return Outcome(reward=self.score("step"), terminated=True)

    async def finish(self, status: Status) -> Outcome | None:
        return Outcome(reward=self.score("finish"))

    def score(self, place: str) -> Any:
        if self.place == f"a component of {place}":
            found = type(self)._function(self.text, self.answer)
            return None if found is None else {"right": found}
        return type(self)._function(self.text, self.answer) if self.place == place else None


class Asked(ToolEnvironment):
    _function: Function

    def __init__(self) -> None:
        super().__init__([])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=type(self)._function(text, stated(self.task)), terminated=True)


class Got:
    """A class as for GRPOTrainer. It can't see the answer of the model, so it scores the row's."""

    _function: Function

    def reset(self, **row: Any) -> None:
        self.answer = row["answer"]

    def get_reward(self) -> Any:
        return type(self)._function(self.answer, self.answer)


def kind(cls: type, function: Function, **more: Any) -> Any:
    return type(cls.__name__, (cls,), {"_function": staticmethod(function), **more})


WAYS: dict[str, Callable[[Function], EnvironmentFactory]] = {
    "step": lambda f: kind(Once, f, place="step"),
    "finish": lambda f: kind(Once, f, place="finish"),
    "a component of step": lambda f: kind(Once, f, place="a component of step"),
    "an attribute of the class": lambda f: kind(Once, f, rewards=Rewards([of_tape(f)])),
    "a source of a run": lambda f: rewarded(Once, Rewards([of_tape(f)])),
    "actions": lambda f: rewarded(
        Once, Rewards([RewardSource(score=lambda tape: [of_tape(f)(tape)], name="each", per="step")])
    ),
    "answered": lambda f: kind(Asked, f),
    "TRLEnvironment": lambda f: lambda: TRLEnvironment(rewards=[of_batch(f)]),
    "trl_reward": lambda f: rewarded(Once, Rewards([trl_reward(of_batch(f))])),
}


def played(env: EnvironmentFactory, text: str) -> Tape:
    task = trl_row({"prompt": "6 * 7?", "answer": ANSWER})
    return asyncio.run(rollout(ChatAgent(), env, task, engine=ScriptedEngine([text])))


@pytest.mark.parametrize("way", WAYS)
def test_a_reward_is_the_number_that_the_function_returns(way: str) -> None:
    wrong = {}
    for name, function in FUNCTIONS.items():
        for text in TEXTS:
            tape, found = played(WAYS[way](function), text), function(text, ANSWER)
            want = None if found is None else pytest.approx(float(found), rel=0, abs=1e-12)
            if tape.cause is not None or tape.reward != want:
                wrong[name, text] = (want, tape.reward, tape.cause)
    assert wrong == {}
    assert len(FUNCTIONS) >= 50


def test_get_reward_returns_the_same_numbers() -> None:
    for name, function in FUNCTIONS.items():
        tape, found = played(lambda f=function: TRLEnvironment(kind(Got, f)), "?"), function(ANSWER, ANSWER)
        assert tape.reward == (None if found is None else pytest.approx(float(found), rel=0, abs=1e-12)), name
    tape = played(lambda: TRLEnvironment(kind(Got, lambda t, a: "1")), "?")
    assert (tape.reward, tape.cause and tape.cause.error) == (None, "BadArgument")


def test_scalars_of_torch_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    for function in (lambda t, a: torch.tensor(t == a), lambda t, a: torch.tensor(0.5, dtype=torch.float64)):
        for way, made in WAYS.items():
            assert played(made(function), "42").reward == float(function("42", ANSWER)), way


@pytest.mark.parametrize(("score", "value"), [(True, 2.0), (np.bool_(True), 2.0), (np.float64(0.25), 0.5), ("1", None)])
def test_a_part_of_an_ensemble_may_be_any_number(score: Any, value: float | None) -> None:
    whole = ensemble({"part": lambda tape: score}, {"easy": {"part": 2.0}}, label=lambda tape: "easy")
    assert played(rewarded(Once, Rewards([whole])), "42").reward == value


@pytest.mark.parametrize("given", [[of_tape(FUNCTIONS["equal"])], of_tape(FUNCTIONS["equal"]), RewardSource(score=len)])
def test_rewards_that_are_no_rewards_are_refused_with_the_remedy(given: Any) -> None:
    with pytest.raises(NotAnEnvironment, match=r"Once\.rewards is .*`rewards = Rewards\(\[\.\.\.\]\)`"):
        played(kind(Once, FUNCTIONS["equal"], rewards=given), "42")


def punishment(most: int) -> Callable[..., list[float]]:
    def too_long(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(one) > most) for one in completions]

    return too_long


def test_reward_functions_of_trl_have_weights_and_may_share_a_name() -> None:
    exact = partial(of_batch(FUNCTIONS["equal"]))
    rewards = [exact, punishment(1), punishment(5), trl_reward(punishment(0), weight=4.0)]
    tape = played(lambda: TRLEnvironment(rewards=rewards), "42")
    assert {r.name: r.value * r.weight for r in tape.rewards} == {
        "<lambda>": 1.0,
        "too_long": -1.0,
        "too_long_2": 0.0,
        "too_long_3": -4.0,
    }
    tape = played(lambda: TRLEnvironment(rewards=rewards, reward_weights=[2.0, 0.5, 1.0, 1.0]), "42")
    assert tape.reward == 2.0 - 0.5 - 1.0
    with pytest.raises(BadArgument, match=r"\[1\.0\].*\b4\b"):
        TRLEnvironment(rewards=rewards, reward_weights=[1.0])
    with pytest.raises(BadArgument, match=r"2\.0.*`reward_weights`"):
        TRLEnvironment(rewards=[(rewards[0], 2.0)])  # type: ignore[list-item]
    for alone in (rewards[0], trl_reward(rewards[0])):
        assert played(lambda alone=alone: TRLEnvironment(rewards=alone), "42").reward == tape.rewards[0].value
