"""Attempts and their groups: how many episodes run at once, when a failed episode is retried, and what is compared.

`rollout_group`, `run`, `branch`, the training loop, evaluations and demonstrations all schedule episodes with these
functions. A group consists of the attempts at one task, which are sampled in order to be compared. It closes when each
attempt has a usable episode or no retry left, or at its deadline with the episodes that it has by then. `Closing` names
the reason. Attempts belong to a group by its id, never by the text of their prompts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ...envs.environment import EnvironmentFactory, check_factory
from ...envs.rewards.relative import comparable, compared
from ...tapes import Sampling, Status, Tape, Task
from ...tapes.errors import StrayCancellation
from ...tapes.journal import Journal
from ..engines.engine import Engine, absence_of
from ..episode.agent import Agent
from ..episode.limits import Limits
from ..episode.rollout import rollout
from ..episode.seeds import derive_seed

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

RETRIES = 1
"""Maximum number of further episodes for an attempt whose episode can't be trained on."""


def needs_episode(usable: Sequence[bool], retries: int = RETRIES) -> bool:
    """Return whether an attempt needs another episode: none is usable, and at most `retries` episodes have failed.

    `usable` says, for each episode of the attempt that ended by itself, whether it can be trained on. Episodes that a
    crash or a deadline cut off don't count, because they say nothing about the attempt and would use up its retries.
    """
    return not any(usable) and len(usable) <= retries


async def run_attempt(
    usable: list[bool],
    episode: Callable[[], Awaitable[Tape]],
    *,
    retries: int = RETRIES,
    may_retry: Callable[[], bool] = lambda: True,
) -> bool:
    """Run episodes until the attempt needs no more, and note each in `usable`. Return False if `may_retry` refused."""
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
    """Await `work(item)` for each item, started in order, at most `concurrency` at once. Return the results in order.

    If `concurrency` is None, all run at once. The first error cancels the other tasks and is raised after they have
    ended. Otherwise they would continue to sample and to write tapes after the caller closed the engine or the store.
    Further errors aren't raised, because they follow from the first: a failing store fails for every episode.
    """
    todo = list(items)
    results: dict[int, ResultT] = {}
    places = iter(range(len(todo)))

    async def worker() -> None:
        for place in places:
            results[place] = await work(todo[place])

    async with _first_error() as workers:
        for _ in range(min(concurrency or len(todo), len(todo))):
            workers.create_task(worker())
    if len(results) < len(todo):  # a task group ignores a task that was cancelled
        raise StrayCancellation("a task of the run was cancelled by code that it called, and not by the run's caller")
    return [results[place] for place in range(len(todo))]


@asynccontextmanager
async def _first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """Run a task group that raises the first error alone."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


class Closing(StrEnum):
    """Why a group closed."""

    COMPLETE = "complete"
    """Every attempt has an episode that can be trained on."""
    FAILED = "failed"
    """Some attempt has no episode that can be trained on, although it was retried."""
    LATE = "late"
    """Some attempt has no episode that can be trained on, and wasn't retried, because the policy is too many updates
    ahead of the other attempts."""
    DEADLINE = "deadline"
    """The deadline passed, and the episodes in flight were cancelled."""


@dataclass(slots=True)
class Group:
    """The attempts at one task, and the episodes that they have so far."""

    number: int
    """Place in the order of a loop's groups. It determines the task."""
    task: object
    size: int
    """Number of attempts."""
    begun: int = 0
    """The policy's number of updates when the group began. A retry may be at most the allowed staleness ahead of it."""
    tapes: dict[int, list[Tape]] = field(default_factory=dict)
    """The closed tapes of each attempt, including retries."""
    prefixes: dict[int, Tape] = field(default_factory=dict)
    """The prefix that each attempt continues. An attempt without a prefix begins with the task."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of tapes in this process that can't be trained on, by cause."""
    closed: Closing | None = None
    """None while the group is open."""

    @property
    def usable(self) -> list[Tape]:
        """The last tape of each attempt, if it may be trained on, in the order of the attempts."""
        return [tapes[-1] for _, tapes in sorted(self.tapes.items()) if tapes and comparable(tapes[-1])]

    def usable_episodes(self, attempt: int) -> list[bool]:
        """Return, for each episode that ended by itself, whether it can be trained on. See `needs_episode`."""
        tapes = self.tapes.get(attempt, ())
        return [comparable(tape) for tape in tapes if tape.status not in (Status.CRASHED, Status.CANCELLED)]

    @property
    def open(self) -> list[int]:
        """The numbers of the attempts that need an episode."""
        return [k for k in range(self.size) if needs_episode(self.usable_episodes(k))]


async def fill(
    group: Group,
    sample: Callable[[int, int], Awaitable[Tape]],
    *,
    until: float | None = None,
    fresh: Callable[[], bool] = lambda: True,
    concurrency: int | None = None,
    engine: Engine | None = None,
) -> Closing:
    """Sample the episodes that the group needs, and set `group.closed`.

    `sample` is called with the attempt and the number of its episodes so far that ended by themselves. This number is
    part of the seed. So a retry has another seed, but an episode that was cut off by a crash or a cancellation is
    sampled again with the same seed.
    `until` is the event loop's time at which the group closes. Episodes in flight end as cancelled, on the tape too.
    `fresh` is called before a retry. If it returns False, the attempt would be too stale to compare and isn't retried.
    `concurrency` is the maximum number of concurrent episodes, by default all attempts.
    The time in which `engine` waits for servers that don't answer is added to `until`.
    """

    async def attempt(k: int) -> bool:
        tapes = group.tapes.setdefault(k, [])
        usable = group.usable_episodes(k)

        async def episode() -> Tape:
            tape = await sample(k, len(usable))
            tapes.append(tape)
            if not tape.trains:
                group.lost[tape.cause.type.value if tape.cause is not None else str(tape.status)] += 1
            return tape

        return await run_attempt(usable, episode, may_retry=fresh)

    async with _first_error() as tasks:
        work = tasks.create_task(run_all(group.open, attempt, concurrency=concurrency))
        await _until(work, until, engine)
        work.cancel()
    if work.cancelled():
        group.closed = Closing.DEADLINE
    else:
        in_time, whole = all(work.result()), len(group.usable) == group.size
        group.closed = Closing.COMPLETE if whole else Closing.FAILED if in_time else Closing.LATE
    return group.closed


async def _until(work: asyncio.Future[list[bool]], until: float | None, engine: Engine | None) -> None:
    """Wait for `work`. If `until` isn't None, it is the deadline, in the event loop's time.

    Time in which no server answers postpones the deadline.
    """
    loop = asyncio.get_running_loop()
    absence = absence_of(engine)
    before = absence.seconds if absence is not None else 0.0
    while not work.done():
        if until is None:
            await asyncio.wait([work])
            continue
        away = absence.seconds - before if absence is not None else 0.0
        left = until + away - loop.time()
        if left <= 0:
            return
        # The minimum of 0.1 s keeps this loop from spinning while the deadline is being postponed.
        await asyncio.wait([work], timeout=max(left, 0.1))


async def rollout_group(
    agent: Agent,
    env: EnvironmentFactory,
    task: object,
    *,
    n: int,
    engine: Engine,
    seed: int = 0,
    group: str | None = None,
    split: str = "train",
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    journal: Journal | None = None,
    deadline: float | None = None,
    concurrency: int | None = None,
) -> list[Tape]:
    """Sample `n` attempts at one task concurrently. They share the task, the group id and the environment's seed.

    An attempt whose episode can't be trained on (because of an error of the environment, the model or Tapereel, or a
    time limit) is retried once with a new seed. At `deadline` (seconds from now) the group closes with its episodes so
    far, and episodes in flight are cancelled. `concurrency` limits the episodes in flight. Returns every closed tape,
    including failed ones. Read `tape.trains` to find the usable ones.
    """
    if n < 1:
        raise ValueError(f"n is {n}: a group needs at least one attempt")
    check_factory(env)
    name = group or uuid.uuid4().hex
    made = Group(0, Task.of(task), n)
    env_seed = derive_seed(seed, name, "env")

    async def one(attempt: int, retry: int) -> Tape:
        return await rollout(
            agent,
            env,
            made.task,
            engine=engine,
            seed=derive_seed(seed, name, attempt, retry),
            env_seed=env_seed,
            group=name,
            attempt=attempt,
            split=split,
            limits=limits,
            sampling=sampling,
            journal=journal,
        )

    until = None if deadline is None else asyncio.get_running_loop().time() + deadline
    await fill(made, one, until=until, concurrency=concurrency, engine=engine)
    every = [tape for _, tapes in sorted(made.tapes.items()) for tape in tapes]
    append = None if journal is None else lambda record: journal.append(record.body())
    rewarded = {tape.id: tape for tape in await compared(getattr(env, "rewards", None), made.usable, append)}
    return [rewarded.get(tape.id, tape) for tape in every]
