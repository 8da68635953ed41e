"""Worlds whose episodes are always cut off, and which kill their process at the step that DEADLY_STEP counts to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tapereel.envs import Environment, Outcome
from tapereel.envs.load_named import load_named
from tapereel.tapes import Answer, Text

EXAMPLE = f"{Path(__file__).resolve().parents[2]}/examples/two_agents.py"
Hidden: Any = load_named(f"{EXAMPLE}:Hidden")
Letter: Any = load_named(f"{EXAMPLE}:Letter")
steps = 0


def count() -> None:
    global steps
    steps += 1
    if steps == int(os.environ.get("DEADLY_STEP", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


class Steady(Environment[Answer]):
    """Asks for a letter each turn, and is cut off after as many turns as the task says: by itself, or by a limit."""

    async def reset(self, task: str) -> Text:
        self.left = int(task)
        return Text(text="a")

    async def step(self, action: Answer) -> Outcome:
        count()
        self.left -= 1
        return Outcome(Text(text="ab"[self.left % 2]), reward=float("a" in action.text), truncated=not self.left)


class Going(Hidden):
    """The guide and the seeker of the example go on and on."""

    async def step(self, action: Any) -> Outcome:
        count()
        outcome = await super().step(action)
        return Outcome(Letter(text=self.letter), reward=outcome.reward)
