"""Small worlds that the tests of agents share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tapereel.agents import LLM, Agent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Observation, Tape


class Hint(Observation, kind="w_hint"):
    text: str


class Guess(Action, kind="w_guess"):
    number: int


class GuessNumber(Environment[Guess]):
    """The secret is the bare task."""

    def __init__(self) -> None:
        self.closed = 0

    async def reset(self, task: int) -> Hint:
        self.secret = task
        return Hint(text="I think of a number from 1 to 9.")

    async def step(self, action: Guess) -> Outcome:
        if action.number == self.secret:
            return Outcome(reward=1.0, terminated=True)
        return Outcome(Hint(text="higher" if action.number < self.secret else "lower"), reward=-0.1)

    async def close(self) -> None:
        self.closed += 1


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape, system="Guess the number. Answer with one digit.")
        yield Guess(number=int(reply.text))
