"""LoopWatch: a loop that stands still is noticed and the line is named; one that works is left in peace."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tapereel.envs import LoopWatch, Stall


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _attached() -> tuple[LoopWatch, Clock, list[Stall]]:
    clock, stalls = Clock(), []
    watch = LoopWatch(stalls.append, seconds=1.0, clock=clock)
    watch.attach()
    return watch, clock, stalls


def test_a_silence_is_told_once_and_the_next_one_again():
    async def main() -> list[Stall]:
        watch, clock, stalls = _attached()
        assert watch.sample()  # asks for a sign of life, which this loop gives only when it is awaited
        for clock.now in (0.5, 0.99):
            watch.sample()
        assert stalls == []
        for clock.now in (1.0, 2.0, 3.0):
            watch.sample()
        assert len(stalls) == 1
        await asyncio.sleep(0)
        for clock.now in (3.5, 4.0, 5.0):
            watch.sample()
        return stalls

    first, second = asyncio.run(main())
    assert (first.seconds, second.seconds) == (1.0, 1.5)
    assert first.where().endswith("in sample")  # it was called from the loop's own thread
    assert first.where(__file__).startswith(__file__)
    assert first.where(__file__).endswith("in main")
    assert first.where("no such file") == first.where()


def test_a_loop_that_lives_is_left_in_peace():
    async def main() -> list[Stall]:
        watch, clock, stalls = _attached()
        for clock.now in range(20):
            watch.sample()
            await asyncio.sleep(0)
        return stalls

    assert asyncio.run(main()) == []


def test_a_loop_that_has_closed_ends_the_watch():
    async def main() -> LoopWatch:
        return _attached()[0]

    assert asyncio.run(main()).sample() is False


def test_the_thread_names_the_line_that_holds_the_loop():
    noticed = threading.Event()
    stalls: list[Stall] = []

    def told(stall: Stall) -> None:
        # On a machine with too much to do, the loop may also rest somewhere else.
        if stall.where(__file__).endswith("in hold"):
            stalls.append(stall)
            noticed.set()

    def hold() -> bool:
        return noticed.wait(1.0)

    async def main() -> None:
        with LoopWatch(told, seconds=0.02):
            for _ in range(60):
                if hold():
                    return
                await asyncio.sleep(0)

    asyncio.run(main())
    (stall,) = stalls
    assert "threading.py" in stall.where()
    assert stall.seconds >= 0.02


def test_a_stall_lasts_some_time():
    with pytest.raises(ValueError, match=r"seconds.*\b0\b"):
        LoopWatch(lambda stall: None, seconds=0)
