"""What the tests of players name in configurations, and import no other way: the pair of the example with a judge
beside it, and a world that kills its process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, Agent, delegate
from tapereel.envs import Outcome
from tapereel.envs.load_named import load_named
from tapereel.tapes import Tape, Task, Thought

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "two_agents.py")
Hidden: Any = load_named(f"{EXAMPLE}:Hidden")
Pair: Any = load_named(f"{EXAMPLE}:Pair")


class Remark(Thought):
    text: str


class Judge(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Remark(text=(await llm(tape, messages=[{"role": "user", "content": "a"}])).text)


class Judged(Agent):
    """A judge has a word ahead of the pair; nobody minds it."""

    name = "pair"

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for step in delegate("judge", Judge(), tape, llm):
            yield step
        async for step in Pair().act(tape, llm):
            yield step


class Deadly(Hidden):
    """Kills its process at the step that the environment variable DEADLY_STEP counts to."""

    steps = 0

    async def step(self, action: Any) -> Outcome:
        Deadly.steps += 1
        if Deadly.steps == int(os.environ.get("DEADLY_STEP", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(action)


def held_out() -> list[Task]:
    """Not those that are trained on, and yet the same."""
    return [Task(public=letter, private="held out") for letter in "abcd"]
