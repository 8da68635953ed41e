"""Calls an environment's methods with a time limit, and in a thread where the environment blocks the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

from ...envs.blocking import EnvironmentThread
from ...envs.environment import Environment


class Caller:
    """`await caller("step", action)` calls the environment's method, for at most `seconds`.

    A TimeoutError that the environment itself raises passes unchanged. A blocking environment runs in one daemon thread
    for the whole episode. A call that exceeds its time leaves that thread running, because Python can't stop a thread.
    """

    def __init__(self, env: Environment[Any], seconds: float | None) -> None:
        self._env = env
        self._seconds = seconds
        self._thread = EnvironmentThread(type(env).__qualname__) if env.blocking else None

    async def __call__(self, method: str, *args: Any) -> Any:
        coroutine: Coroutine[Any, Any, Any] = getattr(self._env, method)(*args)
        if not inspect.isawaitable(coroutine):
            raise TypeError(f"{type(self._env).__qualname__}.{method} is not async: write `async def {method}`")
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
                f"{type(self._env).__qualname__}.{method} did not return within {self._seconds} s "
                "(Limits.environment_seconds)"
            ) from error

    def stop(self) -> None:
        """Let the thread end after its current call. Called when the episode ends."""
        if self._thread is not None:
            self._thread.stop()
