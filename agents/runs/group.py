"""Attempts and their groups: how many episodes run at once, when a failed episode is retried, and what is compared.

`rollout_group`, `run`, `branch`, the training loop, evaluations and demonstrations all schedule episodes with these
functions. A group consists of the attempts at one task, which are sampled in order to be compared. It closes when each
attempt has either an episode that can be trained on (a usable one) or no retry left. At its deadline, it closes with
the episodes that it has by then. `Closing` names the reason. A group's attempts are found by the group's id, never by
the text of their prompts.
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
from ...tapes import Status, Tape
from ...tapes.errors import StrayCancellation
from ...tapes.journal import Journal
from ..engines.engine import Engine, absence_of
from ..episode.agent import Agent
from ..episode.rollout import rollout
from ..episode.seeds import derive_seed
from ..episode.spec import EpisodeSpec

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

RETRIES = 1
"""Maximum number of retries of an attempt. An attempt is retried if its episode can't be trained on."""


def needs_episode(usable: Sequence[bool], retries: int = RETRIES) -> bool:
    """Return whether an attempt needs another episode, because none of its episodes is usable and at most `retries` of
    them have failed.

    `usable` has one value for each episode of the attempt, which is True if the episode can be trained on. Episodes
    that a crash or a deadline cut off are left out. They say nothing about the attempt, and would use up its retries.
    """
    return not any(usable) and len(usable) <= retries


async def run_attempt(
    usable: list[bool],
    episode: Callable[[], Awaitable[Tape]],
    *,
    retries: int = RETRIES,
    may_retry: Callable[[], bool] = lambda: True,
) -> bool:
    """Run episodes as long as the attempt needs one, and add each result to `usable`.

    Returns False if `may_retry` refused a retry.
    """
    retry = False
    while needs_episode(usable, retries):
        if retry and not may_retry():
            return False
        tape = await episode()
        usable.append(tape.trains)
        if tape.status is Status.CRASHED:  # a worker was lost when an irreversible action may have been running
            return True
        retry = True
    return True


async def run_all(
    items: Iterable[ItemT], work: Callable[[ItemT], Awaitable[ResultT]], *, concurrency: int | None = None
) -> list[ResultT]:
    """Await `work(item)` for each item, and return the results in the order of the items.

    Work starts in this order, at most `concurrency` items at once. None means all items at once. The first error
    cancels the other tasks, and is raised after they have ended. Otherwise, they would continue to sample and to write
    tapes after the caller closed the engine or the store. Further errors aren't raised, because they follow from the
    first: a failing store fails for every episode.
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
    """Open a task group that raises only its first error, without an exception group."""
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
    """At least one attempt has no episode that can be trained on, even after its retries."""
    LATE = "late"
    """At least one attempt has no episode that can be trained on. It wasn't retried, because by then the policy was too
    many updates ahead of the other attempts."""
    DEADLINE = "deadline"
    """The deadline passed, and the episodes in flight were cancelled."""


@dataclass(slots=True)
class Group:
    """The attempts at one task, and the episodes that they have so far."""

    number: int
    """Number of the group in the order of the loop's groups. It determines the group's task."""
    task: object
    size: int
    """Number of attempts."""
    begun: int = 0
    """The policy's number of updates when the group began. After more than the allowed number of further updates, a
    retry would be too stale."""
    tapes: dict[int, list[Tape]] = field(default_factory=dict)
    """The closed tapes of each attempt, including retries."""
    prefixes: dict[int, Tape] = field(default_factory=dict)
    """For each attempt that continues a recorded episode, the part of the tape that it continues. All other attempts
    begin with the task."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of tapes in this process that can't be trained on, by cause."""
    closed: Closing | None = None
    """None while the group is open."""

    @property
    def usable(self) -> list[Tape]:
        """The last tape of each attempt, in the order of the attempts. Tapes that can't be trained on are left out."""
        return [tapes[-1] for _, tapes in sorted(self.tapes.items()) if tapes and comparable(tapes[-1])]

    def usable_episodes(self, attempt: int) -> list[bool]:
        """For each episode of the attempt that ended by itself, return whether it can be trained on (see
        `needs_episode`)."""
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

    `sample` is called with the attempt and the number of its episodes so far. The number is part of the seed. It counts
    only episodes that ended by themselves. So a retry gets another seed, but an episode that a crash or a cancellation
    cut off is sampled again with the same seed.
    `until` is the time at which the group closes, by the event loop's clock. Episodes in flight are then cancelled, and
    recorded as cancelled. While `engine` waits for servers that don't answer, this deadline is postponed.
    `fresh` is called before a retry. If it returns False, a retry would be too stale to compare, and none is made.
    `concurrency` is the maximum number of concurrent episodes, by default all attempts.
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
    """Wait for `work`, but only up to the deadline `until` (event loop time). None means no deadline.

    While no server answers, the deadline is postponed.
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
    journal: Journal | None = None,
    deadline: float | None = None,
) -> list[Tape]:
    """Sample `n` attempts at one task concurrently. They share the task, the group id and the environment's seed.

    `task` is the task, or an `EpisodeSpec` with further settings that the attempts share. Its `seed` is the seed of the
    group, from which each attempt's seed is derived. Without a `group`, the group gets a new id.
    If an episode can't be trained on, the attempt is retried once with a new seed. Causes are a time limit or an error
    of the environment, the model or Tapereel. At `deadline` (seconds from now) the group closes with its episodes so
    far, and episodes in flight are cancelled. Returns every closed tape, including failed ones. Read `tape.trains` to
    find the usable ones.
    """
    if n < 1:
        raise ValueError(f"n is {n}: a group needs at least one attempt")
    check_factory(env)
    shared = EpisodeSpec.of(task)
    name = shared.group or uuid.uuid4().hex
    env_seed = derive_seed(shared.seed, name, "env") if shared.env_seed is None else shared.env_seed
    group = Group(0, shared.task, n)

    async def one(attempt: int, retry: int) -> Tape:
        seed = derive_seed(shared.seed, name, attempt, retry)
        own = {"group": name, "attempt": attempt, "seed": seed, "env_seed": env_seed}
        return await rollout(agent, env, shared.model_copy(update=own), engine=engine, journal=journal)

    until = None if deadline is None else asyncio.get_running_loop().time() + deadline
    await fill(group, one, until=until, engine=engine)
    every = [tape for _, tapes in sorted(group.tapes.items()) for tape in tapes]
    append = None if journal is None else lambda record: journal.append(record.body())
    rewarded = {tape.id: tape for tape in await compared(getattr(env, "rewards", None), group.usable, append)}
    return [rewarded.get(tape.id, tape) for tape in every]
