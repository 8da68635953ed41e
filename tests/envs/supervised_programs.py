"""Random coroutines for Supervised, in an event loop whose clock is virtual: two hosts of code, called in turn.

The log of a program has every effect in its order, and the outcome of every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from tapereel.tapes.common import run_async
from tapereel.tapes.common.shared_loop import SharedLoop

seen: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


class Stuck(Exception):
    """Nothing is ready and no timer runs: the program hangs."""


class _Instant(selectors.DefaultSelector):  # type: ignore[misc]
    """Waits for no time: the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise Stuck
        self.now += timeout or 0.0
        return found


def virtual(kind: type[asyncio.SelectorEventLoop]) -> asyncio.AbstractEventLoop:
    """An event loop of that class with a virtual clock."""

    class Virtual(kind):  # type: ignore[valid-type, misc]
        def time(self) -> float:
            return self._selector.now

    if issubclass(kind, SharedLoop):
        loop = Virtual()
        loop._selector.close()
        loop._selector = _Instant()
        loop._add_reader(loop._ssock.fileno(), loop._read_from_self)
        return loop
    return Virtual(_Instant())


class Program:
    """One program, which its seed determines. `strays`: with code that cancels every task that it finds; `harmless`: it
    only says so."""

    def __init__(self, seed: int, *, strays: bool = False, harmless: bool = False) -> None:
        self.rng = random.Random(seed)
        self.strays, self.harmless = strays, harmless
        self.log: list[str] = []
        self.scopes: dict[int, anyio.CancelScope] = {}
        self.helpers: list[asyncio.Task[None]] = []

    def say(self, *words: object) -> None:
        """Log an effect."""
        self.log.append(" ".join(map(str, words)))

    def block(self, who: int, depth: int = 0) -> Callable[[], Awaitable[None]]:
        """A random coroutine function, drawn now: what runs later doesn't change what it does."""
        rng, parts = self.rng, list[Callable[[], Awaitable[None]]]()
        for _ in range(rng.randint(1, 4)):
            kinds = [self._sleep, self._sleep, self._context, self._scope, self._cancel_self, self._raise, self._await]
            kinds += [self._timeout, self._group, self._swallow, self._helper, self._shield] if depth < 3 else []
            kinds += [self._cancel_all, self._cancel_all] if self.strays else []
            parts.append(rng.choice(kinds)(who, depth))

        async def run() -> None:
            for part in parts:
                await part()

        return run

    def _sleep(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        seconds, name = self.rng.choice([0, 0, 0.1, 0.5, 3.0]), self.rng.randrange(1000)

        async def run() -> None:
            self.say(who, "sleeps", name)
            await asyncio.sleep(seconds and seconds + name * 1e-6)  # so that no two timers ring at the same time
            self.say(who, "woke", name)

        return run

    def _context(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            self.say(who, "context", seen.get())
            seen.set(seen.get() + 1)

        return run

    def _scope(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if depth:  # a scope belongs to the task of its host
                return
            scope = self.scopes.pop(who, None)
            if scope is None:
                self.scopes[who] = anyio.CancelScope().__enter__()
                self.say(who, "opens a scope")
            else:
                scope.__exit__(None, None, None)
                self.say(who, "closes its scope")

        return run

    def _cancel_self(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        awaits = self.rng.random() < 0.5

        async def run() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            self.say(who, "cancelled itself")
            if awaits:
                await asyncio.sleep(0)

        return run

    def _cancel_all(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            self.say(who, "cancels all")
            for task in () if self.harmless else asyncio.all_tasks():
                task.cancel()

        return run

    def _raise(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        kind = self.rng.choice([ValueError, asyncio.CancelledError, SystemExit, GeneratorExit, BaseException])
        really = self.rng.random() < 0.3

        async def run() -> None:
            if really:
                self.say(who, "raises", kind.__name__)
                raise kind("own")

        return run

    def _await(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        ended = self.rng.choice(["result", "cancelled", "error"])

        async def run() -> None:
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            if ended == "cancelled":
                future.cancel()
            elif ended == "error":
                future.set_exception(KeyError("late"))
            else:
                future.set_result("result")
            self.say(who, "awaits", ended)
            self.say(who, await future)

        return run

    def _timeout(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        inner, seconds = self.block(who, depth + 1), self.rng.choice([0.05, 0.3, 2.0])

        async def run() -> None:
            try:
                async with asyncio.timeout(seconds):
                    await inner()
            except TimeoutError:
                self.say(who, "timed out after", seconds)

        return run

    def _group(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        inner = [self.block(who, depth + 1) for _ in range(self.rng.randint(1, 3))]
        gathered = self.rng.random() < 0.5

        async def run() -> None:
            self.say(who, "begins", len(inner))
            if gathered:
                found = await asyncio.gather(*(one() for one in inner), return_exceptions=True)
                self.say(who, "gathered", [type(one).__name__ for one in found])
                return
            async with asyncio.TaskGroup() as group:
                for one in inner:
                    group.create_task(one())  # type: ignore[arg-type]
            self.say(who, "ended its group")

        return run

    def _swallow(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        inner, kind = self.block(who, depth + 1), self.rng.choice([Exception, asyncio.CancelledError, BaseException])
        times = self.rng.choice([1, 1, 1, 4])

        async def run() -> None:
            for _ in range(times):
                try:
                    await inner()
                except kind as error:
                    self.say(who, "swallows", type(error).__name__)

        return run

    def _helper(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        inner, cancels = self.block(who, depth + 1), self.rng.random() < 0.3

        async def run() -> None:
            async def quiet() -> None:
                with contextlib.suppress(Exception, GeneratorExit):
                    await inner()

            if cancels and self.helpers:
                self.say(who, "cancels a helper")
                self.helpers.pop(0).cancel()
            self.helpers.append(asyncio.create_task(quiet()))

        return run

    def _shield(self, who: int, depth: int) -> Callable[[], Awaitable[None]]:
        inner = self._sleep(who, depth)
        return lambda: asyncio.shield(asyncio.ensure_future(inner()))  # type: ignore[arg-type, return-value]

    async def play(self, supervised: Callable[[], Any]) -> None:
        """Six calls of two hosts, some with a limit of time, some stopped, and some whose caller is cancelled."""
        rng, hosts = self.rng, (supervised(), supervised())
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        for k in range(6):
            who, block = k % 2, self.block(k % 2)
            seconds, how, after = (
                rng.choice([None, 0.4, 20.0]),
                rng.choice(["", "", "", "stop", "cancel"]),
                rng.random(),
            )

            async def work(block: Callable[[], Awaitable[None]] = block, who: int = who, k: int = k) -> str:
                self.say(who, "call", k, "in", seen.get())
                await block()
                return f"result {k}"

            timer = loop.call_later(after, hosts[who].stop if how == "stop" else me.cancel) if how else None
            try:
                self.say(k, await hosts[who](work(), f"code {who}", seconds if seconds or not self.strays else 20.0))
            except BaseException as error:
                if isinstance(error, Stuck):
                    raise
                self.say(k, type(error).__name__, str(error) if type(error).__name__ == "TimedOut" else "")
            if timer is not None:
                timer.cancel()
            while me.cancelling():
                me.uncancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        for host in hosts:
            self.say("left", host.left)
            host.close()


def played(
    supervised: Callable[[], Any],
    seed: int,
    *,
    strays: bool = False,
    harmless: bool = False,
    kind: type[asyncio.SelectorEventLoop] = asyncio.SelectorEventLoop,
) -> list[str]:
    """The log of a program."""
    loop, program = virtual(kind), Program(seed, strays=strays, harmless=harmless)
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    main = loop.create_task(program.play(supervised))
    while True:
        try:
            loop.run_until_complete(main)
        except Stuck:
            program.say("hangs")
        except (SystemExit, RuntimeError):
            if not main.done():  # a helper's
                continue
            program.say("ends", type(main.exception()).__name__)
        break
    log = list(program.log)  # what is left running logs on
    _end(loop)
    asyncio.set_event_loop(None)
    loop.close()
    return log


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left until it ends: no program swallows more than 4 ** 4 cancellations."""
    for _ in range(300):
        every = {*asyncio.all_tasks(loop), *getattr(loop, "tasks", ()), *run_async._left}
        tasks = [task for task in every if task.get_loop() is loop and not task.done()]
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        with contextlib.suppress(SystemExit, Stuck, RuntimeError, asyncio.CancelledError):
            loop.run_until_complete(asyncio.wait(tasks, timeout=10))
