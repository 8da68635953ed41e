"""Time, randomness and ids from `llm` are repeated in a replay; an agent that takes its own diverges."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, ScriptedEngine, rollout
from tapereel.agents.replay import replay
from tapereel.tapes import Answer, Reasoning, Tape
from tapereel.tapes.audit import Likely

from .worlds import Counting, Given, record


class Uses(Agent):
    """Puts a value that no tape holds into its prompt or its action."""

    name = "uses"

    def __init__(self, value: Callable[[], object], where: str) -> None:
        self.value, self.where = value, where

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        value = str(self.value())
        reply = await llm(tape, system=value if self.where == "prompt" else None)
        yield Answer(text=value if self.where == "action" else reply.text)


@pytest.mark.parametrize("value", [time.time_ns, random.SystemRandom().random, uuid.uuid4])
@pytest.mark.parametrize(("where", "cause"), [("prompt", Likely.PROMPT), ("action", Likely.CODE)])
def test_an_agent_that_takes_its_own_time_or_randomness_diverges(value: Any, where: str, cause: Likely):
    engine = ScriptedEngine(lambda request: "a word")
    tape = asyncio.run(rollout(Uses(value, where), Counting, 3, engine=engine))
    divergence = asyncio.run(replay(tape, Uses(value, where))).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.cause) == (0, cause)
    assert "llm.now" in divergence.sentence
    unused = asyncio.run(replay(asyncio.run(rollout(Uses(value, ""), Counting, 3, engine=engine)), Uses(value, "")))
    assert unused.outcome == "verified", "what changes no request and no step is no divergence"


def test_llm_gives_time_randomness_and_ids_that_a_replay_repeats():
    tape = record("time and chance")
    again = asyncio.run(replay(tape, Given()))
    assert again.outcome == "verified", again
    thoughts = [str(step) for step in tape if isinstance(step, Reasoning)]
    times, ids = zip(*(text.split() for text in thoughts), strict=True)
    begun = tape.begin.at
    assert all(begun <= datetime.fromisoformat(text).timestamp() for text in times)
    assert sorted(times) == list(times)
    assert len(set(ids)) == len(ids)
    assert all(uuid.UUID(text).version == 4 for text in ids)
    other = record("time and chance", seed=8)
    assert str(other[1]).split()[1] != ids[0], "attempts of a group draw differently"


def test_the_clock_moves_with_each_answer():
    seen: list[datetime] = []

    class Clock(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            seen.append(llm.now(tape))
            await llm(tape)
            seen.append(llm.now(tape))
            yield Answer(text="x")

    tape = asyncio.run(rollout(Clock(), Counting, 1, engine=ScriptedEngine(["a"])))
    assert [at.timestamp() for at in seen] == [
        pytest.approx(tape.entries[0].at, abs=1e-5),
        pytest.approx(tape.calls[0].at, abs=1e-5),
    ]
    assert seen[0].tzinfo is not None
