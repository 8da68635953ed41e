"""Where a fault is told to be: the line of the user's code, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tapereel.agents import LLM, ScriptedEngine
from tapereel.envs import Outcome
from tapereel.tapes import CauseType, Status, Tape
from tapereel.tapes.common import REWARD_LIMIT

from ..worlds import Guess, GuessNumber, Player
from .test_rollout import Raising, acting, fault_of, run


def test_what_the_library_refuses_is_blamed_on_the_line_of_the_environment():
    class Right(GuessNumber):
        async def step(self, action: Guess) -> Outcome:
            return Outcome(reward=str(action.number == self.secret))  # type: ignore[arg-type]

    tape = run(Player(), Right(), 7, engine=ScriptedEngine(["7"]))
    assert "'reward'" in tape.cause.message
    assert "True" in tape.cause.message
    assert tape.cause.frame.startswith(f"{__file__}:")
    assert tape.cause.frame.endswith(" in step")


def test_a_step_without_an_observation_and_without_an_end_is_an_error_of_the_environment():
    class Forgets(GuessNumber):
        async def step(self, action: Guess) -> Outcome:
            return Outcome(reward=1.0, truncated=action.number == 3)

    tape = run(Player(), Forgets(), 7, engine=ScriptedEngine(["7", "7"]))
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "EnvironmentFault")
    assert "terminated=True" in tape.cause.message
    assert (tape.reward, len(tape.actions)) == (None, 1)
    assert run(Player(), Forgets(), 7, engine=ScriptedEngine(["3"])).reward == 1.0


def test_a_method_that_is_not_async_is_named_with_the_remedy():
    class Sync(GuessNumber):
        def step(self, action: Guess) -> Any:
            return Outcome(reward=1.0, terminated=True)

    tape = run(Player(), Sync(), 7, engine=ScriptedEngine(["7"]))
    assert "Sync.step" in tape.cause.message
    assert "`async def step`" in tape.cause.message


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("where", ["reset", "step", "finish", "close"])
def test_an_environment_that_would_end_the_process_ends_its_episode(where, blocking):
    env = type("Exits", (Raising,), {"blocking": blocking})(where, SystemExit("bye"))
    tape = run(Player(), env, 7, engine=ScriptedEngine(["7"]))
    cause = fault_of(tape, where)
    assert cause.type is CauseType.ENVIRONMENT
    assert f"{cause.error}: {cause.message}".endswith("SystemExit: bye")


@pytest.mark.parametrize("score", [None, 0.5])
def test_an_agents_error_is_told_where_nothing_can_be_learned_from_it(caplog, score):
    class Scored(GuessNumber):
        async def finish(self, status: Status) -> Outcome | None:
            return None if score is None else Outcome(reward=score)

    async def fails(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        raise LookupError(f"no answer for {score}")
        yield

    run(acting(fails), Scored(), 7)
    told = [r.getMessage() for r in caplog.records if f"no answer for {score}" in r.getMessage()]
    assert len(told) == (score is None)


def past_the_check(value: float) -> Outcome:
    outcome = Outcome(reward=0.5, terminated=True)
    object.__setattr__(outcome, "reward", value)
    return outcome


def changed_later(value: float) -> Outcome:
    outcome = Outcome(reward={"exact": 0.5}, terminated=True)
    assert isinstance(outcome.reward, dict)
    outcome.reward["exact"] = value
    return outcome


class Unchecked(Outcome):
    def __init__(self, value: float) -> None:
        object.__setattr__(self, "observation", None)
        object.__setattr__(self, "reward", value)
        object.__setattr__(self, "terminated", True)
        object.__setattr__(self, "truncated", False)
        object.__setattr__(self, "metrics", {})


WAYS = {
    "a number": lambda value: Outcome(reward=value, terminated=True),
    "a component": lambda value: Outcome(reward={"fine": 1.0, "exact": value}, terminated=True),
    "past the check": past_the_check,
    "changed later": changed_later,
    "a class of its own": Unchecked,
}


@pytest.mark.parametrize("place", ["step", "finish"])
@pytest.mark.parametrize("value", [1.1 * REWARD_LIMIT, -1e200, 1e308, math.inf, math.nan, 10**400])
@pytest.mark.parametrize("way", WAYS)
def test_a_reward_beyond_the_limit_is_an_error_of_the_environment(way: str, value: float, place: str):
    class Scored(GuessNumber):
        async def step(self, action: Guess) -> Outcome:
            return WAYS[way](value) if place == "step" else Outcome(terminated=True)

        async def finish(self, status: Status) -> Outcome | None:
            return WAYS[way](value) if place == "finish" else None

    tape = run(Player(), Scored(), 7, engine=ScriptedEngine(["7"]))
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "BadArgument")
    assert not tape.trains
    assert not tape.rewards
    assert ("integer" if isinstance(value, int) else repr(value)) in tape.cause.message


def test_rewards_at_the_limit_and_larger_metrics_are_recorded():
    class Scored(GuessNumber):
        async def step(self, action: Guess) -> Outcome:
            return Outcome(reward=-REWARD_LIMIT, metrics={"nanoseconds": 1.7e18, "most": 1e308}, terminated=True)

    tape = run(Player(), Scored(), 7, engine=ScriptedEngine(["7"]))
    assert (tape.status, tape.reward) == (Status.FINISHED, -REWARD_LIMIT)
    assert {r.name: r.value for r in tape.rewards if not r.weight} == {"nanoseconds": 1.7e18, "most": 1e308}
