"""Supervised: random coroutines have the effects that they had, and one that cancels all tasks stops no later call."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys

import pytest

from tapereel.envs import supervised as module
from tapereel.envs.supervised import StrayCancellation, Supervised, TimedOut
from tapereel.tapes.common.shared_loop import SharedLoop

from .supervised_programs import played, virtual

RECORDED = "fa1e2fcd03a1d49d558b359a635bec89b08fa9e622338682e1d477810583ded8"
"""SHA-256 of the logs of 100 programs, by the Supervised of commit cd1c157e and Python 3.11."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(100, "tapereel.supervised")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="recorded with the asyncio of Python 3.11")
@pytest.mark.parametrize("kind", [asyncio.SelectorEventLoop, SharedLoop])
def test_random_coroutines_have_the_recorded_results_and_order_of_effects(
    kind: type[asyncio.SelectorEventLoop],
) -> None:
    logs = [played(Supervised, seed, kind=kind) for seed in range(100)]
    assert sum(map(len, logs)) > 4_000
    assert hashlib.sha256(repr(logs).encode()).hexdigest() == RECORDED


def test_code_that_cancels_every_task_cancels_none_of_the_run() -> None:
    for seed in range(60):
        strays, harmless = (
            played(Supervised, seed, strays=True, harmless=harmless, kind=SharedLoop) for harmless in (False, True)
        )
        assert strays == harmless, seed


async def value(k: int) -> int:
    await asyncio.sleep(0)
    return k


@pytest.mark.timeout(20)
@pytest.mark.parametrize("begun", [False, True])
def test_an_idle_task_that_other_code_cancels_is_replaced(begun: bool) -> None:
    async def main() -> None:
        code, before = Supervised(), asyncio.all_tasks()
        assert await code(value(1), "code") == 1
        (idle,) = asyncio.all_tasks() - before
        idle.cancel()
        if not begun:  # otherwise the cancellation arrives as the next call begins
            await asyncio.sleep(0.01)
        assert [await code(value(k), "code") for k in (2, 3)] == [2, 3]
        code.close()

    asyncio.run(main())


@pytest.mark.timeout(20)
def test_a_call_whose_task_other_code_cancels_ends_with_its_cause() -> None:
    async def main() -> None:
        code, before = Supervised(), asyncio.all_tasks()
        call = asyncio.create_task(code(asyncio.Event().wait(), "code"))
        await asyncio.sleep(0.01)
        (busy,) = asyncio.all_tasks() - before - {call}
        busy.cancel()
        with pytest.raises(StrayCancellation):
            await call
        assert await code(value(2), "code") == 2
        code.close()

    asyncio.run(main())


@pytest.mark.timeout(20)
def test_code_that_was_left_running_gives_no_later_call_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.02)

    async def main() -> None:
        code, release, ended = Supervised(), asyncio.Event(), list[int]()

        async def stubborn() -> int:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            ended.append(1)
            return 1

        async def later() -> int:
            release.set()
            await asyncio.sleep(0.05)
            return 2

        with pytest.raises(TimedOut):
            await code(stubborn(), "code", 0.01)
        assert len(code.left) == 1
        assert await code(later(), "code") == 2
        assert ended == [1]
        code.close()

    asyncio.run(main())


@pytest.mark.timeout(20)
def test_many_calls_with_a_limit_share_one_alarm_and_each_has_its_own_limit() -> None:
    loop = virtual(asyncio.SelectorEventLoop)

    async def main() -> float:
        code, first = Supervised(), loop.call_later(1.0, int)  # behind it, a loop keeps cancelled timers
        for k in range(20):
            assert await code(value(k), "code", 60.0) == k
        assert len(loop._scheduled) == 2  # type: ignore[attr-defined]
        assert not first.cancelled()
        await asyncio.sleep(30.0)
        began = loop.time()
        with pytest.raises(TimedOut):
            await code(asyncio.sleep(1000.0), "code", 60.0)  # the alarm of the first call rings meanwhile
        seconds = loop.time() - began
        with pytest.raises(TimedOut):
            await code(asyncio.sleep(1000.0), "code", 0.5)
        code.close()
        return seconds

    try:
        assert loop.run_until_complete(main()) == pytest.approx(60.0)
        assert loop.time() == pytest.approx(90.5)
    finally:
        loop.close()
