"""LoopWatch: a loop that stands still is noticed and the line is named; one that works is left in peace."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from traceback import FrameSummary

import pytest

from tapereel.envs import LoopWatch, Stall, loop_watch


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


LOOP = FrameSummary(asyncio.base_events.__file__, 1, "_run_once")
OURS = FrameSummary(loop_watch.__file__.replace("envs", "tapes"), 63, "new_tape_id")
LIBRARY = FrameSummary(asyncio.__file__, 1, "add")
USERS = FrameSummary("/home/me/game.py", 7, "step")


@pytest.mark.parametrize(
    ("stack", "computed", "waits", "busy"),
    [
        ((USERS, LOOP, OURS, LIBRARY), 1.0, False, True),  # our line, which can't have computed for so long
        ((USERS, LOOP, OURS, LIBRARY), 4.5, False, False),
        ((LOOP, OURS, USERS), 0.1, True, True),  # the machine has no time for this thread
        ((LOOP, OURS, USERS, LIBRARY), 0.1, False, False),  # it sleeps in the user's code
        ((LOOP, OURS, USERS), 4.5, True, False),
        ((LOOP, OURS), None, False, False),  # a system that doesn't tell
    ],
)
def test_a_busy_machine_is_not_blamed_on_the_line_that_ran(
    stack: tuple[FrameSummary, ...],
    computed: float | None,
    waits: bool,
    busy: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    stall = Stall(5.0, stack, computed, waits)
    assert stall.busy_machine == busy
    monkeypatch.setattr(loop_watch.log, "propagate", True)
    loop_watch._stalled(stall)
    assert len(caplog.records) == (not busy)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_watch_knows_what_the_thread_computed():
    async def main() -> list[Stall]:
        watch, clock, stalls = _attached()
        watch.sample()
        began = time.thread_time()
        while time.thread_time() < began + 0.2:
            pass
        clock.now = 1.0
        watch.sample()
        return stalls

    (stall,) = asyncio.run(main())
    assert stall.computed is not None
    assert stall.computed >= 0.1


def test_a_stall_lasts_some_time():
    with pytest.raises(ValueError, match=r"seconds.*\b0\b"):
        LoopWatch(lambda stall: None, seconds=0)
