"""Code of others changes the event loop of `run_async` for itself alone, and its end waits for none of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from tapereel.tapes.common import run_async as module
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.common.shared_loop import FORKED, guest
from tapereel.tapes.errors import StrayCancellation

ResultT = TypeVar("ResultT")


@pytest.mark.timeout(30)
def test_the_end_waits_for_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.1)
    kept: list[AsyncIterator[int]] = []

    async def stubborn() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.Event().wait()

    async def main() -> int:
        kept.append(stubborn())
        return await anext(kept[0])

    assert run_async(main()) == 1


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(module, "GRACE", 0.2)
    return caplog


async def as_guest(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """The result of `work`, which runs as the code of an agent or environment."""
    guest.set(True)
    return await work()


@pytest.mark.timeout(30)
def test_a_guest_finds_no_task_and_may_stop_the_loop(short: pytest.LogCaptureFixture) -> None:
    async def rude() -> int:
        found = asyncio.all_tasks()
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(0.01)
        return len(found)

    async def main() -> list[int]:
        return await asyncio.gather(as_guest(rude), as_guest(rude))

    assert run_async(main()) == [0, 0]


def test_a_loop_that_stops_in_its_last_step_has_a_result() -> None:
    async def main() -> int:
        await asyncio.sleep(0)
        asyncio.get_running_loop().stop()
        return 1

    assert run_async(main()) == 1


def test_a_recursion_limit_holds_for_no_one_else() -> None:
    before = sys.getrecursionlimit()

    async def lowers() -> None:
        sys.setrecursionlimit(before - 1)
        await asyncio.sleep(60)

    async def main() -> int:
        task = asyncio.create_task(as_guest(lowers))
        await asyncio.sleep(0.01)
        task.cancel()
        return sys.getrecursionlimit()

    assert run_async(main()) == before


@pytest.mark.timeout(30)
def test_no_callback_of_the_parent_runs_in_a_forked_child() -> None:
    children, (read, write) = list[int](), os.pipe()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: children.append(os.fork()))
        loop.call_soon(lambda: os.write(write, b"called "))
        await asyncio.sleep(0.01)

    run_async(main())
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [FORKED]
    os.close(write)
    with open(read, "rb") as file:
        assert file.read() == b"called "


@pytest.mark.parametrize("method", ["set_task_factory", "shutdown_asyncgens", "shutdown_default_executor"])
def test_a_guest_changes_the_loop_for_no_one(method: str) -> None:
    async def rude() -> None:
        loop: Any = asyncio.get_running_loop()
        found = getattr(loop, method)(*([lambda *_, **__: None] if method == "set_task_factory" else []))
        await found

    async def main() -> int:
        with pytest.raises(RuntimeError):
            await as_guest(rude)
        return await asyncio.create_task(asyncio.to_thread(lambda: 1))

    assert run_async(main()) == 1


@pytest.mark.timeout(30)
def test_the_threads_of_guests_are_not_those_of_tapereel(short: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    async def fills() -> None:
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, release.wait)

    async def named() -> str:
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    async def chooses() -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="own"))
        return await named()

    async def main() -> list[str]:
        names = [await asyncio.create_task(as_guest(work)) for work in (chooses, named)]
        await asyncio.create_task(as_guest(fills))
        return [*names, await named()]

    try:
        assert [name.startswith("own") for name in run_async(main())] == [True, False, False]
    finally:
        release.set()


@pytest.mark.timeout(30)
def test_only_guests_leave_tasks_behind(short: pytest.LogCaptureFixture) -> None:
    async def worker() -> None:
        await asyncio.Event().wait()

    async def main(kind: str) -> None:
        task = asyncio.create_task(worker())
        made = asyncio.create_task(as_guest(lambda: asyncio.sleep(0, asyncio.create_task(worker()))))
        if kind == "guest":
            await made
        else:
            made.cancel()
        await asyncio.sleep(0)
        assert not task.done()

    run_async(main("ours"))
    assert "worker" not in short.text
    run_async(main("guest"))
    assert short.text.count("<coroutine object") == short.text.count(".worker at") == 1


@pytest.mark.timeout(30)
def test_a_generator_that_a_task_was_left_inside_is_no_error_at_the_end(short: pytest.LogCaptureFixture) -> None:
    release = False

    async def stubborn() -> AsyncIterator[int]:
        while not release:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        yield 1

    async def main() -> None:
        generator = stubborn()
        task = asyncio.create_task(anext(generator))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        module.leave(task)

    run_async(main())
    release = True
    assert [record for record in short.records if record.name == "asyncio"] == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_end_cleans_up_after_an_error_that_ends_the_loop(
    short: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    ended = list[str]()

    async def worker() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("worker")

    async def main() -> None:
        task = asyncio.create_task(worker())
        await asyncio.sleep(0)
        assert not task.done()
        raise error

    with pytest.raises(error):
        run_async(main())
    assert ended == ["worker"]
    assert short.text == "", "no warning: no guest ended the loop"


def test_a_run_that_its_own_code_cancels_says_so() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(StrayCancellation):
        run_async(main())
