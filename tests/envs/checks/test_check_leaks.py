"""check_env finds what an episode leaves behind when it is closed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from tapereel.envs import check_env

from .test_check import Dice, Roll, press

END = threading.Event()
LEFT: list[tuple[int, int]] = []
OLDER: list[tuple[int, int]] = []


class LeavesATask(Dice):
    async def reset(self, task: int) -> Roll:
        self.waiting = asyncio.create_task(asyncio.Event().wait())
        return await super().reset(task)


class LeavesAFile(Dice):
    async def reset(self, task: int) -> Roll:
        LEFT.append(os.pipe())
        return await super().reset(task)


class TakesNumbers(LeavesAFile):
    """Its files get the numbers of older ones, which it closes first."""

    async def reset(self, task: int) -> Roll:
        for end in OLDER.pop():
            os.close(end)
        return await super().reset(task)


class LeavesAThread(Dice):
    async def reset(self, task: int) -> Roll:
        threading.Thread(target=END.wait, daemon=True).start()
        return await super().reset(task)


class ClosesAll(Dice):
    """A control: it has all three, and ends them."""

    async def reset(self, task: int) -> Roll:
        self.ends = os.pipe()
        self.waiting = asyncio.create_task(asyncio.Event().wait())
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.end.wait)
        self.thread.start()
        return await super().reset(task)

    async def close(self) -> None:
        if hasattr(self, "ends"):
            for end in self.ends:
                os.close(end)
            self.waiting.cancel()
            self.end.set()
            self.thread.join()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    END.clear()
    yield
    END.set()
    while LEFT:
        for end in LEFT.pop():
            os.close(end)


@pytest.mark.parametrize(
    ("env", "left"), [(LeavesATask, "4 tasks"), (LeavesAFile, "8 open files"), (LeavesAThread, "4 threads")]
)
def test_what_is_left_behind_is_named_and_counted(env: type[Dice], left: str) -> None:
    report = check_env(env, [1, 2, 3], press, stall=60.0)
    (finding,) = report.findings
    assert (finding.check, report.ok, report.checks["leaks"]) == ("leaks", False, "failed")
    assert left in finding.sentence
    assert "`close`" in finding.sentence


def test_a_file_with_the_number_of_an_older_one_counts() -> None:
    OLDER.extend(os.pipe() for _ in range(60))
    (finding,) = check_env(TakesNumbers, [1, 2, 3], press, stall=60.0).findings
    LEFT.extend(OLDER)
    assert "8 open files" in finding.sentence


def test_who_ends_all_that_it_began_leaks_nothing() -> None:
    report = check_env(ClosesAll, [1, 2, 3], press, stall=60.0)
    assert report.ok, str(report)
    assert report.checks["leaks"] == "ok"
