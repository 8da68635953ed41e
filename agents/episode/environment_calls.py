"""Calls into an environment: in time, and off the event loop where the environment blocks it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

from ...envs.blocking import EnvironmentThread
from ...envs.environment import Environment


class Caller:
    """`await caller("step", action)`: the environment's method, within `seconds`.

    A TimeoutError of the environment's own stays its own. A blocking environment runs in one daemon thread for the
    whole episode; a call that outlasts its time leaves that thread behind, since Python can't stop it.
    """

    def __init__(self, env: Environment[Any], seconds: float | None) -> None:
        self._env = env
        self._seconds = seconds
        self._thread = EnvironmentThread(type(env).__qualname__) if env.blocking else None

    async def __call__(self, method: str, *args: Any) -> Any:
        coroutine: Coroutine[Any, Any, Any] = getattr(self._env, method)(*args)
        if not inspect.isawaitable(coroutine):
            raise TypeError(f"{type(self._env).__qualname__}.{method} is not async; write `async def {method}`")
        if self._thread is not None:
            coroutine = self._thread.run(coroutine)
        timer = asyncio.timeout(self._seconds)
        try:
            async with timer:
                return await coroutine
        except SystemExit as error:  # would end the process, and every other episode with it
            message = f"the environment raised SystemExit: {error}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error
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
