"""An environment, an agent and a tool that go wrong for one task in ten, in a way and at a place of choice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from tapereel.agents import LLM, Agent
from tapereel.envs import Environment, Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Answer, Status, Step, Tape, Task, ToolCall, ToolCalls

TASKS = [Task(id=str(k), public=k, private=k) for k in range(100)]


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Own(BaseException):
    pass


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fault() -> None:
        raise error

    return fault


async def awaits_a_cancelled_task() -> None:
    helper = asyncio.create_task(asyncio.sleep(60))
    helper.cancel()
    await helper


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancels_itself_late() -> None:
    """The cancellation arrives at the next `await`, whose ever that is."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise ValueError("and fails")


async def hangs() -> None:
    await asyncio.Event().wait()


async def swallows() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0.05)


RAISED: dict[str, Callable[[], Awaitable[None]]] = {
    "CancelledError": raising(asyncio.CancelledError()),
    "SystemExit": raising(SystemExit(3)),
    "GeneratorExit": raising(GeneratorExit()),
    "BaseException": raising(BaseException("bare")),
    "Own": raising(Own("own")),
    "StopIteration": raising(StopIteration()),
    "StopAsyncIteration": raising(StopAsyncIteration()),
    "Silent": raising(Silent()),
    "group of CancelledError": raising(BaseExceptionGroup("two", [asyncio.CancelledError(), ValueError()])),
    "group of SystemExit": raising(BaseExceptionGroup("two", [BaseExceptionGroup("in", [SystemExit()])])),
    "a cancelled task": awaits_a_cancelled_task,
    "cancels itself": cancels_itself,
    "cancels itself late": cancels_itself_late,
}
"""Faults that end at once."""
STUCK = {"hangs": hangs, "swallows": swallows}


class Faulty(Environment[Answer]):
    """`place`: the method that goes wrong."""

    place, fault = "", staticmethod(hangs)

    async def _at(self, place: str) -> None:
        if self.place == place and self.k % 10 == 3:
            await self.fault()

    async def reset(self, task: Task) -> str:
        self.k = int(str(task.private))
        await self._at("reset")
        return f"task {self.k}"

    async def step(self, action: Answer) -> Outcome:
        await self._at("step")
        return Outcome(reward=1.0, terminated=True)

    async def finish(self, status: Status) -> Outcome | None:
        await self._at("finish")
        return Outcome(reward=0.0) if status is Status.LIMIT else None

    async def close(self) -> None:
        if hasattr(self, "k"):
            await self._at("close")


class Tools(ToolEnvironment):
    """The agent calls a tool first."""

    fault = staticmethod(hangs)

    def __init__(self) -> None:
        async def look(k: int) -> str:
            """Look."""
            if k % 10 == 3:
                await self.fault()
            return "seen"

        super().__init__([look])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=1.0, terminated=True)

    async def finish(self, status: Status) -> Outcome | None:
        return Outcome(reward=0.0) if status is Status.LIMIT else None


class Player(Agent):
    """`place`: before the answer, or after it, as the generator is closed."""

    def __init__(self, place: str = "", fault: Callable[[], Awaitable[None]] = hangs, *, tool: bool = False) -> None:
        self._place, self._fault, self._tool = place, fault, tool

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        k = int(str(tape.task))
        if self._tool and tape.turns == 0:
            yield ToolCalls(calls=(ToolCall(id="1", name="look", arguments={"k": k}),))
            return
        if self._place == "act" and k % 10 == 3:
            await self._fault()
        try:
            yield Answer(text=(await llm(tape)).text)
        finally:
            if self._place == "aclose" and k % 10 == 3:
                await self._fault()


class Named(Environment[Answer]):
    """The task names the method that goes wrong and how, as `step:SystemExit`."""

    async def reset(self, task: Task) -> str:
        self.place, _, self.name = str(task.private).partition(":")
        return "q"

    async def _at(self, place: str) -> None:
        if self.place == place:
            await (RAISED | STUCK)[self.name]()

    async def step(self, action: Answer) -> Outcome:
        await self._at("step")
        return Outcome(reward=1.0, terminated=True)

    async def close(self) -> None:
        if hasattr(self, "place"):
            await self._at("close")


class Leaving(Environment[Answer]):
    """In a process of its own, each way to leave it."""

    async def reset(self, task: Task) -> str:
        self.k = int(str(task.private))
        return "q"

    async def step(self, action: Answer) -> Outcome:
        if self.k % 10 == 3:
            os._exit(7)
        if self.k % 10 == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(reward=1.0, terminated=True)


player = Player()


def seven(request: object) -> str:
    return "7"
