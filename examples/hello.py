"""The smallest whole episode: an environment, an agent, a scripted model, and the tape that they make."""

import asyncio
from collections.abc import AsyncIterator

from tapereel.agents import LLM, Agent, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Observation, Tape


class Hint(Observation):
    text: str


class Guess(Action):
    number: int


class GuessNumber(Environment[Guess]):
    async def reset(self, task: int) -> Hint:
        self.secret = task
        return Hint(text="I think of a number from 1 to 9.")

    async def step(self, action: Guess) -> Outcome:
        if action.number == self.secret:
            return Outcome(reward=1.0, terminated=True)
        return Outcome(Hint(text="higher" if action.number < self.secret else "lower"), reward=-0.1)


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Guess]:
        reply = await llm(tape, system="Guess the number. Answer with one digit.")
        yield Guess(number=int(reply.text))


if __name__ == "__main__":
    tape = asyncio.run(rollout(Player(), GuessNumber(), task=7, engine=ScriptedEngine(["5", "8", "7"])))
    for step in tape:
        print(f"{step.kind}: {step}")
    print(tape.status, tape.reward)
