"""Code that reaches for what it shares with other episodes: their tasks, the event loop, its threads, the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from tapereel.agents import LLM, Agent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Step, Tape, Task, Text

CHILDREN: list[int] = []
"""Exit codes of forked children."""


async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0.01)


async def cancels_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def cancels_again_and_again() -> None:
    for _ in range(10):
        for task in asyncio.all_tasks():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)


async def cancels_from_a_thread() -> None:
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)

    thread = threading.Thread(target=cancel)
    thread.start()
    thread.join()
    await asyncio.sleep(0.01)


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def stops_the_loop_later() -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon_threadsafe(loop.stop)
    await asyncio.sleep(0.01)


async def closes_the_loop() -> None:
    asyncio.get_running_loop().close()


async def ends_the_executor() -> None:
    await asyncio.get_running_loop().shutdown_default_executor()


async def ends_the_executor_by_hand() -> None:
    loop: Any = asyncio.get_running_loop()
    await asyncio.to_thread(int)
    loop._default_executor.shutdown(wait=False, cancel_futures=True)


class _Broken(ThreadPoolExecutor):
    def submit(self, *args: object, **settings: object) -> Future[Any]:  # type: ignore[override]
        raise OSError("broken")


async def breaks_the_executor() -> None:
    asyncio.get_running_loop().set_default_executor(_Broken())


async def closes_the_generators() -> None:
    await asyncio.get_running_loop().shutdown_asyncgens()


def _raising(loop: object, coroutine: Any, **settings: object) -> Any:
    coroutine.close()
    raise ValueError("no task")


async def replaces_the_factory() -> None:
    asyncio.get_running_loop().set_task_factory(_raising)


async def replaces_the_handler() -> None:
    def handler(loop: object, context: object) -> None:
        raise SystemExit(3)

    asyncio.get_running_loop().set_exception_handler(handler)
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)


async def unsets_the_loop() -> None:
    asyncio.set_event_loop(None)


async def lowers_the_recursion_limit() -> None:
    sys.setrecursionlimit(120)
    await asyncio.sleep(0.01)


async def raises_a_long_error() -> None:
    raise ValueError("sk-://a:" * 5_000_000)


HARMLESS: dict[str, Callable[[], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        cancels_all,
        cancels_others,
        cancels_again_and_again,
        cancels_from_a_thread,
        cancels_itself,
        stops_the_loop,
        stops_the_loop_later,
        breaks_the_executor,
        replaces_the_handler,
        unsets_the_loop,
        lowers_the_recursion_limit,
    )
}
"""The episode that does it keeps its result."""
REFUSED: dict[str, Callable[[], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        closes_the_loop,
        ends_the_executor,
        ends_the_executor_by_hand,
        closes_the_generators,
        replaces_the_factory,
        raises_a_long_error,
    )
}
"""The episode that does it ends with an error."""


def _wait_for(child: int) -> None:
    """In the parent: note the child's exit code, also on stderr. The child returns."""
    if child:
        CHILDREN.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # One system call: threads tear what they `print`, and a fork may copy a lock of `sys.stderr` that is held.
        os.write(2, b"child %d\n" % CHILDREN[-1])


async def forks() -> None:
    _wait_for(os.fork())


async def forks_and_raises() -> None:
    child = os.fork()
    _wait_for(child)
    if not child:
        raise SystemExit(0)


async def forks_and_waits() -> None:
    child = os.fork()
    await asyncio.sleep(0.01)
    _wait_for(child)


async def forks_in_a_thread() -> None:
    await asyncio.to_thread(lambda: _wait_for(os.fork()))


async def forks_in_a_helper() -> None:
    await asyncio.create_task(forks_and_waits())


FORKS = (forks, forks_and_raises, forks_and_waits, forks_in_a_thread, forks_in_a_helper)


async def loses_stderr() -> None:
    sys.stderr = None  # type: ignore[assignment]


class _Raises:
    def write(self, text: str) -> None:
        raise LookupError("no stderr")

    def flush(self) -> None:
        raise LookupError("no stderr")


async def breaks_stderr() -> None:
    sys.stderr = _Raises()  # type: ignore[assignment]


LISTED = [*HARMLESS.values(), *REFUSED.values(), *FORKS]
TASKS = [Task(public=k, private=k) for k in range(len(LISTED) + 8)]


class Strays(Environment[Answer]):
    """`does`: task -> what the environment does at `place`."""

    place, kinds = "step", (Text, Answer)
    does: ClassVar[dict[int, Callable[[], Awaitable[None]]]] = dict(enumerate(LISTED))

    async def _at(self, place: str) -> None:
        if place == self.place and self.k in self.does:
            await self.does[self.k]()

    async def reset(self, task: Task) -> str:
        self.k = int(str(task.private))
        await asyncio.to_thread(int)
        await self._at("reset")
        return "q"

    async def step(self, action: Answer) -> Outcome:
        await asyncio.sleep(0.005)
        await self._at("step")
        return Outcome(reward=1.0, terminated=True)

    async def close(self) -> None:
        if hasattr(self, "k"):
            await self._at("close")


class Shell(Strays):
    """It loses stderr too. Rewards differ, so that a run trains."""

    does: ClassVar[dict[int, Callable[[], Awaitable[None]]]] = dict(enumerate([loses_stderr, *LISTED, breaks_stderr]))

    async def step(self, action: Answer) -> Outcome:
        await super().step(action)
        return Outcome(reward=self.rng.random() * len(action.text), terminated=True)


class Forks(Strays):
    """It forks, in the constructor too."""

    does: ClassVar[dict[int, Callable[[], Awaitable[None]]]] = dict(enumerate(FORKS))

    def __init__(self) -> None:
        _wait_for(os.fork())


class BlockingForks(Forks):
    """The same, in a thread."""

    blocking = True


class Player(Agent):
    """`place` and `stray`: where and what it does for task 3."""

    def __init__(self, place: str = "", stray: Callable[[], Awaitable[None]] = cancels_all) -> None:
        self._place, self._stray = place, stray

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        bad = int(str(tape.task)) == 3
        if bad and self._place == "act":
            await self._stray()
        try:
            yield Answer(text=(await llm(tape)).text)
        finally:
            if bad and self._place == "aclose":
                await self._stray()


player = Player()


def seven(request: object) -> str:
    return "7"
