"""An environment that a micro model learns in seconds, and a process serves without loading torch."""

from __future__ import annotations

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text


class Spelling(Environment[Answer]):
    """A task is a word; each turn shows one more of its letters, which should be said. A turn earns its share."""

    async def reset(self, task: str) -> Text:
        self.left = list(task)
        self.share = 1.0 / len(task)
        return Text(text=self.left[0])

    async def step(self, action: Answer) -> Outcome:
        earned = self.share if action.text.startswith(self.left.pop(0)) else 0.0
        seen = Text(text=self.left[0]) if self.left else None
        return Outcome(seen, reward=earned, terminated=seen is None)
