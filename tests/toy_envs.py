"""Toy environments of one turn that several tests use. A test that needs more has an environment of its own."""

from __future__ import annotations

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text


class Paid(Environment[Answer]):
    """Shows the task. Any answer earns 1."""

    async def reset(self, task: object) -> Text:
        return Text(text=str(task))

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


class Echo(Environment[Answer]):
    """Shows the task. An answer that repeats it earns 1."""

    async def reset(self, task: str) -> Text:
        self.task = task
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == self.task), terminated=True)
