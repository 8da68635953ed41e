"""Calls into an environment: in time, and off the event loop where the environment blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine
from typing import Any

from ..envs.base import Environment


class Caller:
    """`await caller("step", action)`: the environment's method, within `seconds`.

    A TimeoutError of the environment's own stays its own. A blocking environment runs in one daemon thread for the
    whole episode; a call that outlasts its time leaves that thread behind, since Python can't stop it.
    """

    def __init__(self, env: Environment[Any], seconds: float | None) -> None:
        self._env = env
        self._seconds = seconds
        self._thread = _Thread(type(env).__qualname__) if env.blocking else None

    async def __call__(self, method: str, *args: Any) -> Any:
        coroutine = getattr(self._env, method)(*args)
        if self._thread is not None:
            coroutine = self._thread.run(coroutine)
        timer = asyncio.timeout(self._seconds)
        try:
            async with timer:
                return await coroutine
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise TimeoutError(
                f"{type(self._env).__qualname__}.{method} gave no answer in {self._seconds} s "
                "(Limits.environment_seconds)"
            ) from error

    def stop(self) -> None:
        """The episode is over; the thread ends when its call does."""
        if self._thread is not None:
            self._thread.stop()


class _Thread:
    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tapereel-env-{name}", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._work.put((coroutine, loop, done))
        return await done

    def stop(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (item := self._work.get()) is not None:
                coroutine, loop, done = item
                try:
                    result, error = runner.run(coroutine), None
                except BaseException as raised:  # handed to the waiting episode, which types it
                    result, error = None, raised
                if not loop.is_closed():  # else nobody waits any more; what is left to do, `close` above all, is done
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        done.set_exception(RuntimeError(f"the environment raised {type(error).__name__}: {error}"))
    else:
        done.set_exception(error)
