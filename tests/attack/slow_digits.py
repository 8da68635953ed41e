"""The digits of the example, a fifth of a second a step: a second process finds the first one at work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tapereel.envs import Outcome
from tapereel.envs.load_named import load_named

Digits: Any = load_named(f"{Path(__file__).resolve().parents[2]}/examples/digits.py:Digits")


class Slow(Digits):
    async def step(self, action: Any) -> Outcome:
        await asyncio.sleep(0.2)
        return await super().step(action)
