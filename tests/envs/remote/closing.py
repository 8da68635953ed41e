"""An environment whose `close` leaves a file, and whose `step` waits or blocks for ever."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text


class Closing(Environment[Answer]):
    folder = ""

    async def reset(self, task: str) -> Text:
        self.folder = task
        return Text(text="go")

    async def step(self, action: Answer) -> Outcome:
        (Path(self.folder) / "stepping").touch()
        if action.text == "block":
            time.sleep(60)  # noqa: ASYNC251 - as users' code does
        await asyncio.sleep(60)
        return Outcome(terminated=True)

    async def close(self) -> None:
        if self.folder:
            (Path(self.folder) / "closed").touch()
