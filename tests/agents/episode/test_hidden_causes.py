"""What ended an episode is named, also if something else fails after it or because of it."""

from __future__ import annotations

import asyncio
from typing import Any

import tapereel as tr
from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome, Rewards
from tapereel.tapes import Action, CauseType, Status, Tape


def last(tape: Tape) -> float:
    return float(len(tape.actions[-1].text))


class Once(Environment):
    rewards = Rewards([last])

    async def reset(self, task: Any) -> str:
        return "?"

    async def step(self, action: Any) -> Outcome:
        return Outcome(terminated=True)


@tr.agent
async def broken(tape: Any, llm: Any) -> Any:
    raise LookupError("no such book")
    yield


class Number(Action):
    number: int


class Typed(Environment[Number]):
    async def reset(self, task: Any) -> str:
        return "?"

    async def step(self, action: Number) -> Outcome:
        return Outcome(reward=float(action.number), terminated=True)


def play(agent: Any, env: Any) -> Tape:
    return asyncio.run(rollout(agent, env, None, engine=ScriptedEngine(["7"])))


def test_a_reward_that_fails_after_an_error_of_the_agent_does_not_hide_it() -> None:
    tape = play(broken, Once)
    assert tape.cause is not None
    assert tape.end is not None
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.ENVIRONMENT, "RewardFailed")
    assert f"{__file__}:" in str(tape.cause.frame)
    assert str(tape.cause.frame).endswith("in last")
    assert [(one.type, one.error, one.message) for one in tape.end.beside] == [
        (CauseType.AGENT, "LookupError", "no such book")
    ]


def test_an_action_of_another_type_than_the_environment_takes() -> None:
    tape = play(ChatAgent(), Typed)
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "AttributeError")
    assert str(tape.cause.message).endswith(
        "Typed takes Number, and the agent gave it Answer: ChatAgent(actions=[Number])"
    )
    assert str(tape.cause.frame).endswith("in step")
