"""The gymnasium example runs, plays every hand and loses about as much as the rule that it plays by."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from tapereel.tapes import Status

pytest.importorskip("gymnasium")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "gymnasium_blackjack.py")


def test_blackjack():
    play = runpy.run_path(EXAMPLE)["play"]
    tapes = asyncio.run(play(hands=60))
    assert {tape.status for tape in tapes} == {Status.FINISHED}
    assert {tape.reward for tape in tapes} == {-1.0, 0.0, 1.0}
    again = asyncio.run(play(hands=60))
    assert [[str(step) for step in tape] for tape in again] == [[str(step) for step in tape] for tape in tapes]
    # Hitting below 17 loses about 8 % of the stake; the standard error over 60 hands is 0.12.
    assert -0.6 < sum(tape.reward for tape in tapes) / 60 < 0.4
