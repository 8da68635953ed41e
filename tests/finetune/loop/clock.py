"""An event loop whose time jumps to the next timer when there is nothing to do: deadlines without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """For what runs in the event loop alone; a thread's result would be overtaken by every timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None) -> Any:
            events = select(timeout if timeout is None else 0)
            if not events and timeout:
                self.now += timeout
            return events

        selector.select = jump

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in jumping time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
