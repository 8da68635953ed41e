"""An agent, an environment and tasks for test_terminal.py: every exception holds sequences that a terminal obeys."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import warnings
from collections.abc import AsyncIterator
from typing import Any

from tapereel.agents import LLM, Agent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Tape

EVIL = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\x7f\x85\u202egnp\u2066\u200b\u2028\ufeff\r\x08"
"""A title, a cleared screen, C1 bytes, a reversed direction, isolates, invisible characters and a line drawn over."""
TASKS = [1, 2, 3]


class Evil(Environment):
    async def reset(self, task: Any) -> str:
        raise ValueError(EVIL)

    async def step(self, action: Any) -> Outcome:
        raise AssertionError


class Asks(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield (await llm(tape)).text


class Unraisable:
    def __del__(self) -> None:
        raise ValueError(EVIL)


class Talks(Environment):
    """Says it by every road that Python has besides its own `print`, and works."""

    async def reset(self, task: Any) -> str:
        warnings.warn(EVIL, stacklevel=1)
        logging.getLogger("another.library").warning("it says %s", EVIL)
        logging.getLogger("another.library").error("broken", exc_info=ValueError(EVIL))
        thread = threading.Thread(target=self._raise, name=EVIL)
        thread.start()
        thread.join()
        Unraisable()
        lost = asyncio.ensure_future(self._fail())  # nothing awaits it: asyncio reports its exception
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del lost
        gc.collect()
        asyncio.get_running_loop().call_soon(self._raise)
        await asyncio.sleep(0)
        return EVIL

    async def step(self, action: Any) -> Outcome:
        return Outcome(EVIL, reward=1.0, terminated=True)

    def _raise(self) -> None:
        raise ValueError(EVIL)

    async def _fail(self) -> None:
        self._raise()


class Nested(Environment):
    """Fails with a group of exceptions that have notes, causes and names of frames."""

    async def reset(self, task: Any) -> str:
        inner = type(EVIL, (ValueError,), {})(EVIL)
        inner.add_note(EVIL)
        raise ExceptionGroup(EVIL, [inner, ExceptionGroup(EVIL, [KeyError(EVIL)])]) from OSError(EVIL)

    async def step(self, action: Any) -> Outcome:
        raise AssertionError


def leaves() -> list[int]:
    """A task source that ends the process with a message."""
    sys.exit(EVIL)


def grouped() -> list[int]:
    """A task source that fails outside of every handler."""
    raise BaseExceptionGroup(EVIL, [RuntimeError(EVIL), KeyboardInterrupt(EVIL)])


def tasks() -> list[int]:
    """A task source that breaks with a hostile message."""
    raise RuntimeError(EVIL)
