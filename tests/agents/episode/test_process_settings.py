"""Settings of the process that differ while an episode or a loop runs, and are as before afterwards."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, rollout
from tapereel.agents.episode.process_settings import RARE, SWITCH, quick_switches
from tapereel.tapes import Answer, Tape

from ..worlds import GuessNumber


class Sees(Agent):
    """Notes the thresholds of its turn, after `wait` returned."""

    def __init__(self, wait: Any = None) -> None:
        self.seen = list[tuple[int, int, int]]()
        self._wait = wait

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
        if self._wait is not None:
            await self._wait()
        self.seen.append(gc.get_threshold())
        yield Answer(text="0")


@pytest.fixture(autouse=True)
def python_s_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def run(agent: Agent) -> None:
    asyncio.run(rollout(agent, GuessNumber(), 3))


def test_collections_are_rare_within_an_episode_and_as_before_after_it() -> None:
    agent = Sees()
    run(agent)
    assert set(agent.seen) == {RARE}
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_overlapping_episodes_restores_the_thresholds() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def outlive() -> None:
        begun.set()
        await asyncio.to_thread(ended.wait, 60)

    long, short = Sees(outlive), Sees()
    other = threading.Thread(target=run, args=(long,))
    other.start()
    assert begun.wait(60)
    run(short)
    assert gc.get_threshold() == RARE, "an episode in another thread still runs"
    ended.set()
    other.join()
    assert set(long.seen) == set(short.seen) == {RARE}
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (100_000, 5, 5)])
def test_a_user_s_rarer_collections_stay(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    agent = Sees()
    run(agent)
    assert set(agent.seen) == {own}
    assert gc.get_threshold() == own


def test_thresholds_that_an_agent_sets_stay() -> None:
    class Sets(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
            gc.set_threshold(1_000, 10, 10)
            yield Answer(text="0")

    run(Sets())
    assert gc.get_threshold() == (1_000, 10, 10)


@pytest.mark.parametrize("own", [0.005, 0.0001])
def test_threads_switch_quickly_within_overlapping_contexts(own: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(own)
    try:
        with quick_switches.changed():
            with quick_switches.changed():
                pass
            assert sys.getswitchinterval() == pytest.approx(min(own, SWITCH), abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(own, abs=2e-6)
        with quick_switches.changed():
            sys.setswitchinterval(0.01)
        assert sys.getswitchinterval() == pytest.approx(0.01, abs=2e-6), "other code has set it meanwhile"
    finally:
        sys.setswitchinterval(before)
