"""A limit of tokens holds however many questions are under way: none are sampled beyond it, and nobody hangs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents import (
    Agent,
    Completion,
    EngineError,
    EpisodeSpec,
    LimitReached,
    Limits,
    Request,
    ScriptedEngine,
    rollout,
)
from tapereel.agents.episode.limits import TokenBudget
from tapereel.agents.replay import replay
from tapereel.tapes import Answer, Sampling, Step, Tape

from ...toy_envs import Paid
from ..gateway.lab import RENDERER, embedded

pytestmark = pytest.mark.timeout(60)


class Asks(Agent):
    """Asks so many questions at once, each in a conversation of its own."""

    name = "asks"

    def __init__(self, questions: int, *, late: bool = False) -> None:
        self.questions, self.late = questions, late

    async def act(self, tape: Tape, llm: Any) -> AsyncIterator[Step]:
        found = await asyncio.gather(*(self._ask(tape, llm, k) for k in range(self.questions)))
        yield Answer(text=f"{sum(found)} answered")

    async def _ask(self, tape: Tape, llm: Any, k: int) -> bool:
        for _ in range(k if self.late else 0):
            await asyncio.sleep(0)
        try:
            await llm(tape, conversation=str(k))
        except LimitReached:
            return False
        return True


class Uneven(ScriptedEngine):
    """Samples fewer tokens than it may, after some turns of the event loop, and fails now and then."""

    def __init__(self, seed: int, fails: float = 0.0) -> None:
        super().__init__([], renderer=RENDERER)
        self.random, self.fails = random.Random(seed), fails
        self.held = self.most = self.sampled = 0

    async def complete(self, request: Request) -> Completion:
        most, turns, fails = request.sampling.max_tokens, self.random.randrange(9), self.random.random() < self.fails
        n = self.random.randint(1, most)
        self.held += most
        self.most = max(self.most, self.held + self.sampled)
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            if fails:
                raise EngineError("out of order")
            self.sampled += n
        except asyncio.CancelledError:
            n = min(n, 2)
            self.sampled += n
            if request.on_partial is not None:
                request.on_partial(_of(n))
            raise
        finally:
            self.held -= most
        return _of(n)


def _of(n: int) -> Completion:
    ids = array("i", [8] * n)
    return Completion(
        text=RENDERER.decode(ids), ids=ids, logprobs=array("f", [-1.0] * n), spans=(("v", 0, n),), finish="length"
    )


def _sampled(tape: Tape) -> int:
    return sum(len(call.completion or ()) for call in tape.calls if call.engine != "authored")


@pytest.mark.parametrize("late", [False, True])
def test_forty_questions_at_once_sample_what_the_limit_says(late: bool):
    agent, sampling = Asks(40, late=late), Sampling(max_tokens=60)
    tape = asyncio.run(rollout(agent, Paid(), "t", engine=embedded(), limits=Limits(tokens=100), sampling=sampling))
    assert _sampled(tape) == 100
    verdict = asyncio.run(replay(tape, Asks(40, late=late), renderer=RENDERER))
    assert verdict.outcome == "verified", verdict


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 60), questions=st.integers(1, 25), late=st.booleans())
def test_a_tape_within_its_budget_is_replayed(seed: int, limit: int, questions: int, late: bool):
    engine, agent = Uneven(seed), Asks(questions, late=late)
    tape = asyncio.run(
        rollout(agent, Paid(), "t", engine=engine, limits=Limits(tokens=limit), sampling=Sampling(max_tokens=9))
    )
    assert engine.most <= limit
    assert _sampled(tape) == engine.sampled
    answered = [call for call in tape.calls if call.engine != "authored"]
    assert len(answered) == questions or engine.sampled == limit
    verdict = asyncio.run(replay(tape, Asks(questions, late=late), renderer=RENDERER))
    assert verdict.outcome == "verified", verdict


class Fickle(Agent):
    """Asks at random moments, and gives some of its questions up at others."""

    name = "fickle"

    def __init__(self, seed: int, questions: int) -> None:
        self.random, self.questions = random.Random(seed), questions
        self.ends: list[str] = []

    async def act(self, tape: Tape, llm: Any) -> AsyncIterator[Step]:
        await asyncio.gather(*(self._one(tape, llm, k) for k in range(self.questions)))
        yield Answer(text="done")

    async def _one(self, tape: Tape, llm: Any, k: int) -> None:
        await self._turns(self.random.randrange(20))
        asking = asyncio.ensure_future(self._ask(tape, llm, k))
        if self.random.random() < 0.4:
            await self._turns(self.random.randrange(12))
            asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        self.ends.append("given up" if asking.cancelled() else asking.result())

    async def _turns(self, n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)

    async def _ask(self, tape: Tape, llm: Any, k: int) -> str:
        try:
            await llm(tape, conversation=str(k), max_tokens=self.random.randint(1, 30))
        except LimitReached:
            return "refused"
        except Exception as error:
            return type(error).__name__
        return "answered"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 80), questions=st.integers(1, 30))
def test_whatever_fails_or_is_given_up_the_budget_holds_and_nobody_waits(seed: int, limit: int, questions: int):
    engine, agent = Uneven(seed, fails=0.3), Fickle(seed, questions)
    tape = asyncio.run(
        rollout(
            agent,
            Paid(),
            EpisodeSpec.of("t", limits=Limits(tokens=limit), sampling=Sampling(max_tokens=30), retries=0),
            engine=engine,
        )
    )
    assert len(agent.ends) == questions
    assert engine.most <= limit
    assert _sampled(tape) == engine.sampled
    assert "refused" not in agent.ends or engine.sampled == limit


def test_what_is_given_back_goes_to_whoever_waits_in_their_order():
    async def scene() -> None:
        budget = TokenBudget(10)
        assert [await budget.take(6), await budget.take(6)] == [6, 4]
        waiting = [asyncio.ensure_future(budget.take(n)) for n in (3, 5, 7)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        budget.used += 1
        budget.give(4)
        assert await waiting[1] == 3
        await asyncio.sleep(0)
        assert not waiting[2].done()
        budget.used += 3
        budget.give(3)
        budget.used += 6
        budget.give(6)
        assert (await waiting[2], budget.spent) == (0, True)
        assert await budget.take(1) == 0

    asyncio.run(scene())
