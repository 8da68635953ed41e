"""Groups: the attempts at one task, sampled in order to be compared.

A group closes when each attempt has a usable episode, when retries failed too, or at its deadline with what it has. So
it always closes, and `Closing` says how. The group id connects attempts, never the text of a prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...envs.environment import Environment, check_factory
from ...envs.rewards.relative import compared
from ...tapes import Sampling, Status, Tape, Task
from ...tapes.journal import Journal
from ..engines.engine import Engine
from ..episode.agent import Agent
from ..episode.limits import Limits
from ..episode.rollout import rollout
from ..episode.seeds import derive_seed
from .scheduler import needs_episode, run_all, run_attempt


class Closing(StrEnum):
    """Why a group closed."""

    COMPLETE = "complete"
    """Every attempt has an episode that can be trained on."""
    FAILED = "failed"
    """Some attempt has none, and its retries failed."""
    LATE = "late"
    """Some attempt has none and was not retried: the policy is too many updates ahead of the group's other attempts."""
    DEADLINE = "deadline"
    """The deadline passed; the episodes in flight were cancelled."""


@dataclass(slots=True)
class Group:
    """The attempts at one task, and the episodes that they have so far."""

    number: int
    """Place in the order of a loop's groups; the task follows from it."""
    task: Any
    size: int
    """Attempts."""
    begun: int = 0
    """The policy's version (updates) when the group began: attempts are only compared within the allowed staleness."""
    tapes: dict[int, list[Tape]] = field(default_factory=dict)
    """attempt -> its closed tapes, retries included."""
    prefixes: dict[int, Tape] = field(default_factory=dict)
    """attempt -> the prefix that it continues; an attempt without one begins with the task."""
    lost: Counter[str] = field(default_factory=Counter)
    """Cause -> tapes of this process that can't be trained on."""
    closed: Closing | None = None
    """None while the group is open."""

    @property
    def usable(self) -> list[Tape]:
        """The attempts that may be trained on, in order."""
        return [tapes[-1] for _, tapes in sorted(self.tapes.items()) if tapes and tapes[-1].trains]

    def usable_episodes(self, attempt: int) -> list[bool]:
        """For each episode of the attempt that ended by itself, whether it can be trained on; see `needs_episode`."""
        tapes = self.tapes.get(attempt, ())
        return [tape.trains for tape in tapes if tape.status not in (Status.CRASHED, Status.CANCELLED)]

    @property
    def open(self) -> list[int]:
        """The attempts that need an episode."""
        return [k for k in range(self.size) if needs_episode(self.usable_episodes(k))]


async def fill(
    group: Group,
    sample: Callable[[int, int], Awaitable[Tape]],
    *,
    until: float | None = None,
    fresh: Callable[[], bool] = lambda: True,
) -> Closing:
    """Sample the episodes that the group needs, all attempts at once, and set `group.closed`.

    sample: called with (attempt, number of its tapes so far); the number is part of the seed, so a retry has another.
    until: time of the event loop at which the group closes; episodes in flight end as cancelled, on tape too.
    fresh: asked before a retry; False: the attempt is not retried, because it would be too stale to be compared.
    """

    async def attempt(k: int) -> bool:
        tapes = group.tapes.setdefault(k, [])

        async def episode() -> Tape:
            tape = await sample(k, len(tapes))
            tapes.append(tape)
            if not tape.trains:
                group.lost[tape.cause.type.value if tape.cause is not None else str(tape.status)] += 1
            return tape

        return await run_attempt(group.usable_episodes(k), episode, may_retry=fresh)

    timer = asyncio.timeout_at(until)
    try:
        async with timer:
            in_time = all(await run_all(group.open, attempt))
    except TimeoutError:
        if not timer.expired():  # a TimeoutError of the code inside, not the deadline
            raise
        group.closed = Closing.DEADLINE
    else:
        whole = len(group.usable) == group.size
        group.closed = Closing.COMPLETE if whole else Closing.FAILED if in_time else Closing.LATE
    return group.closed


async def rollout_group(
    agent: Agent,
    env: Callable[[], Environment[Any]],
    task: Any,
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
    gate: asyncio.Semaphore | None = None,
) -> list[Tape]:
    """Sample `n` attempts at one task concurrently. They share the task, the group id and the environment's seed.

    An attempt whose episode can't be trained on (an error of the environment, the model or Tapereel, a time limit) is
    retried once with a new seed. At `deadline` (seconds from now) the group closes with what it has, and episodes in
    flight are cancelled. Returns every closed tape, failed ones included: read `tape.trains`. `gate` bounds the
    concurrent episodes.
    """
    if n < 1:
        raise ValueError(f"n is {n}: a group needs at least one attempt")
    check_factory(env)
    name = group or uuid.uuid4().hex
    made = Group(0, Task.of(task), n)
    env_seed = derive_seed(seed, name, "env")
    gate = gate or asyncio.Semaphore(n)

    async def one(attempt: int, retry: int) -> Tape:
        async with gate:
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
    await fill(made, one, until=until)
    every = [tape for _, tapes in sorted(made.tapes.items()) for tape in tapes]
    append = None if journal is None else lambda record: journal.append(record.body())
    rewarded = {tape.id: tape for tape in await compared(getattr(env, "rewards", None), made.usable, append)}
    return [rewarded.get(tape.id, tape) for tape in every]
