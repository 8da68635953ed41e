"""Schedules attempts: how many episodes run at once, and when an attempt that failed is retried.

`rollout_group`, `run`, the training loop, evaluations and demonstrations all roll out with these functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from ...tapes import Tape

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

RETRIES = 1
"""Further episodes of an attempt whose episode can't be trained on."""


def needs_episode(usable: Sequence[bool], retries: int = RETRIES) -> bool:
    """Whether an attempt needs another episode: until one is usable, or `retries` episodes after the first failed too.

    usable: for each episode of the attempt that ended by itself, whether it can be trained on. Episodes that a crash or
    a deadline cut off don't count: they say nothing of the attempt, and counting them would use up its retries.
    """
    return not any(usable) and len(usable) <= retries


async def run_attempt(
    usable: list[bool],
    episode: Callable[[], Awaitable[Tape]],
    *,
    retries: int = RETRIES,
    may_retry: Callable[[], bool] = lambda: True,
) -> bool:
    """Run episodes until the attempt needs no more, and append to `usable`. False where `may_retry` refused a retry."""
    retry = False
    while needs_episode(usable, retries):
        if retry and not may_retry():
            return False
        tape = await episode()
        usable.append(tape.trains)
        retry = True
    return True


async def run_all(
    items: Iterable[ItemT], work: Callable[[ItemT], Awaitable[ResultT]], *, concurrency: int | None = None
) -> list[ResultT]:
    """`await work(item)` for each item, started in order, at most `concurrency` at once (None: all). Results in order.

    The first error cancels the rest and is raised alone, after every task has ended. Without that wait the rest would
    go on to sample and to write tapes after the caller closed the engine or the store. The other errors follow from the
    first: a store that fails, fails for every episode.
    """
    todo = list(items)
    results: dict[int, ResultT] = {}
    places = iter(range(len(todo)))

    async def worker() -> None:
        for place in places:
            results[place] = await work(todo[place])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency or len(todo), len(todo))):
                workers.create_task(worker())
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [results[place] for place in range(len(todo))]
