"""An agent, an environment and tasks for test_terminal.py: every exception holds sequences that a terminal obeys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tapereel.agents import LLM, Agent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Tape

EVIL = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\x7f"
TASKS = [1, 2, 3]


class Evil(Environment):
    async def reset(self, task: Any) -> str:
        raise ValueError(EVIL)

    async def step(self, action: Any) -> Outcome:
        raise AssertionError


class Asks(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield (await llm(tape)).text


def tasks() -> list[int]:
    """A task source that breaks with a hostile message."""
    raise RuntimeError(EVIL)
