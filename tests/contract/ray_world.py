"""A world for `ray_run`: three turns, each of which takes a moment, in processes that may end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, agent
from tapereel.envs import Environment, Outcome, Taskset
from tapereel.tapes import Answer, Observation, Tape, Task


class Word(Observation, kind="ray_word"):
    text: str


@agent
async def player(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Answer(text=(await llm(tape)).text)


def _note() -> None:
    if "TURNS" in os.environ:
        with Path(os.environ["TURNS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")


def _exit_once() -> None:
    flag = Path("exited")
    if not flag.exists():
        flag.touch()
        os._exit(7)


class Slow(Environment[Answer]):
    async def reset(self, task: Task) -> Word:
        self.word, self.turns = str(task), 0
        return Word(text=self.word)

    async def step(self, action: Answer) -> Outcome:
        _note()
        await asyncio.sleep(0.5)
        self.turns += 1
        drawn = self.rng.random()
        if self.turns == 3:
            return Outcome(reward=drawn, terminated=True)
        return Outcome(Word(text=f"{self.word} {drawn}"))


class ExitsOnce(Slow):
    async def step(self, action: Answer) -> Outcome:
        _exit_once()
        return await super().step(action)


class Exits(Slow):
    async def step(self, action: Answer) -> Outcome:
        os._exit(7)


def tasks() -> Taskset:
    return Taskset([f"task {k}" for k in range(8)])
