"""The agents, environments, tasks and models of the recorded runs.

`record.py` imports this module at the commit that recorded the runs, and the tests with the present code: it uses the
public interface alone. All code is `async`, since the order in which threads end would change the batches.
"""

from __future__ import annotations

import re
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tapereel as tr
from tapereel.agents.vision import save_tiny_vision
from tapereel.envs.adapters import ToolEnvironment
from tapereel.envs.adapters.tools import tool
from tapereel.tapes import Answer, ToolCall, ToolCalls


class Question(tr.Observation):
    text: str


class Scene(tr.Observation):
    question: str
    pictures: tuple[tr.Picture, ...] = ()


def score(text: str) -> float:
    """A reward in [0, 1] that untrained models earn too, and differently in each attempt."""
    return sum(map(ord, text)) % 7 / 6


class Echo(tr.Environment):
    """Two turns: the second question is the task with the first answer."""

    async def reset(self, task: str) -> Question:
        self.task, self.heard = str(task), list[str]()
        return Question(text=self.task)

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.heard.append(str(action))
        if len(self.heard) == 2:
            return tr.Outcome(reward=score("".join(self.heard)), terminated=True)
        return tr.Outcome(observation=Question(text=f"{self.task}{self.heard[0]}"))


async def divide(a: int, b: int) -> float:
    """Divide a by b.

    Args:
        a: the dividend
        b: the divisor
    """
    return a / b


def call_or_answer(text: str) -> ToolCalls | Answer:
    """A text with digits divides the first one by the last one, and any other text is an answer."""
    digits = [int(digit) for digit in re.findall("[0-3]", text)]
    if not digits:
        return Answer(text=text)
    return ToolCalls(calls=(ToolCall(id="1", name="divide", arguments={"a": digits[0], "b": digits[-1]}),))


class Division(ToolEnvironment):
    """Divides digits, by 0 too, until the answer or the last turn."""

    def __init__(self) -> None:
        super().__init__([divide])

    async def prompt(self, task: object) -> str:
        return "null"  # what commit 9dc43d5 showed for a string

    async def answered(self, text: str) -> tr.Outcome:
        return tr.Outcome(reward=score(text), terminated=True)


class Scenes(tr.Environment):
    """Task k shows k pictures in each of two turns; task 0 shows none."""

    async def reset(self, task: str) -> Scene:
        self.n, self.turn, self.random = int(task), 0, np.random.default_rng(int(task))
        return await self.look()

    async def look(self) -> Scene:
        sides = self.random.integers(8, 24, (self.n, 2))
        pixels = [self.random.integers(0, 256, (int(h), int(w), 3), dtype="uint8") for h, w in sides]
        return Scene(question="Where?", pictures=tuple([await tr.Picture.read(one) for one in pixels]))

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        return tr.Outcome(observation=await self.look(), reward=score(str(action)), terminated=self.turn == 2)


@dataclass(frozen=True)
class World:
    """What a run trains on, without its settings."""

    agent: Any
    env: Any
    tasks: tuple[str, ...]
    save_model: Any
    """Called with a folder."""


WORLDS = {
    "text": World(
        tr.ChatAgent(),
        Echo,
        ("3", "14", "159", "26", "53", "58", "97", "93"),
        partial(tr.save_tiny_model, alphabet="0123456789", size="micro"),
    ),
    "tools": World(
        tr.ChatAgent("Divide.", parse=call_or_answer, tools=[tool(divide).schema]),
        Division,
        ("12", "30"),
        partial(tr.save_tiny_model, alphabet="0123 Ddeivor.", size="micro"),
    ),
    "pictures": World(tr.ChatAgent(), Scenes, ("0", "1", "2"), partial(save_tiny_vision, family="qwen2_vl")),
}
"""Name of a run -> its world."""


def train(name: str, folder: Path, settings: dict[str, Any]) -> Path:
    """Train the run of that name in `folder`; gives the run directory. settings: those of `tapereel.train`."""
    world = WORLDS[name]
    with chdir(folder):  # so that the run holds no path of this machine
        world.save_model("model")
        tr.train(world.agent, world.env, list(world.tasks), "model", out="run", seed=7, settings=settings)
    return folder / "run"
