"""The digits of the example, a fifth of a second a step: a second process finds the first one at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, agent
from tapereel.envs import Outcome
from tapereel.envs.load_named import load_named
from tapereel.tapes import Tape

_EXAMPLE = f"{Path(__file__).resolve().parents[2]}/examples/digits.py"
Digits: Any = load_named(f"{_EXAMPLE}:Digits")
Said: Any = load_named(f"{_EXAMPLE}:Said")


class Slow(Digits):
    async def step(self, action: Any) -> Outcome:
        await asyncio.sleep(0.2)
        return await super().step(action)


@agent
async def wordy(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    """Some tokens, of which the first counts, and a moment of its own."""
    text = (await llm(tape, max_tokens=6)).text
    await asyncio.sleep(0.1)
    yield Said(text=text[:1])
