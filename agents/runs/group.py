"""Groups: the attempts at one task, sampled to be compared.

A group closes when each of its attempts has ended in a way that can be trained on, when those that didn't have been
sampled again in vain, or at its deadline, with what it has then. So it always closes, and says how. Attempts belong
together by the group's id, never by the text of a prompt. Knows nothing of training.
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


class Closing(StrEnum):
    """Why a group closed."""

    COMPLETE = "complete"
    """Every attempt ended in a way that can be trained on."""
    FAILED = "failed"
    """Some attempt didn't, and was sampled again in vain."""
    LATE = "late"
    """Some attempt didn't, and was not sampled again: the policy had moved on too far to be compared."""
    DEADLINE = "deadline"
    """Time was up; what still ran was cancelled."""


@dataclass(slots=True)
class Group:
    """The attempts at one task, as far as they have come."""

    number: int
    """Place in the order of a loop's groups; its task follows from it."""
    task: Any
    size: int
    """Attempts."""
    begun: int = 0
    """The policy's version (updates) when it began: what is compared must not be of versions too far apart."""
    tapes: dict[int, list[Tape]] = field(default_factory=dict)
    """attempt -> its closed tapes, those sampled again included."""
    prefixes: dict[int, Tape] = field(default_factory=dict)
    """attempt -> the prefix that it goes on from; attempts that aren't here begin with the task."""
    lost: Counter[str] = field(default_factory=Counter)
    """Cause -> tapes of this process that can't be trained on."""
    closed: Closing | None = None
    """None while it is open."""

    @property
    def usable(self) -> list[Tape]:
        """The attempts that may be trained on, in order."""
        return [tapes[-1] for _, tapes in sorted(self.tapes.items()) if tapes and tapes[-1].trains]

    def wants(self, attempt: int) -> bool:
        """Whether this attempt is to be sampled: until it can be trained on, but refilled once only. What the death of
        a process or a deadline cut off was no try."""
        tapes = self.tapes.get(attempt) or ()
        tries = sum(tape.status not in (Status.CRASHED, Status.CANCELLED) for tape in tapes)
        return not (tapes and tapes[-1].trains) and tries < 2

    @property
    def open(self) -> list[int]:
        """The attempts that are to be sampled."""
        return [k for k in range(self.size) if self.wants(k)]


async def fill(
    group: Group,
    sample: Callable[[int, int], Awaitable[Tape]],
    *,
    until: float | None = None,
    fresh: Callable[[], bool] = lambda: True,
) -> Closing:
    """Sample what the group wants, all at once: `sample(attempt, number of its tapes so far)`. Sets `group.closed`.

    until: time of the event loop at which it closes with what it has; what runs then is cancelled, and its tape ends
    as cancelled. fresh: asked before an attempt is sampled again; false: it isn't.
    """
    late = False

    async def attempt(k: int) -> None:
        nonlocal late
        tapes = group.tapes.setdefault(k, [])
        again = False
        while group.wants(k):
            if again and not fresh():
                late = True
                return
            tape = await sample(k, len(tapes))
            tapes.append(tape)
            again = True
            if not tape.trains:
                group.lost[tape.cause.type.value if tape.cause is not None else str(tape.status)] += 1

    timer = asyncio.timeout_at(until)
    try:
        async with timer, asyncio.TaskGroup() as attempts:
            for k in group.open:
                attempts.create_task(attempt(k))
    except TimeoutError:
        if not timer.expired():
            raise
        group.closed = Closing.DEADLINE
    else:
        whole = len(group.usable) == group.size
        group.closed = Closing.COMPLETE if whole else Closing.LATE if late else Closing.FAILED
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
    """Sample `n` attempts at one task, at once. They share the task, the group id and the environment's seed.

    An attempt that ends in a way that can't be trained on (environment, model or our error, seconds, cancelled) is
    sampled once more with a new seed, until `deadline` (seconds from now); the group then closes with what it has, and
    what still runs is cancelled. Every closed tape is given back, also those: read `tape.trains`. `gate` bounds the
    episodes that run at once.
    """
    if n < 1:
        raise ValueError(f"a group has at least one attempt, not {n}")
    check_factory(env)
    name = group or uuid.uuid4().hex
    made = Group(0, Task.of(task), n)
    env_seed = derive_seed(seed, name, "env")
    gate = gate or asyncio.Semaphore(n)

    async def one(attempt: int, refill: int) -> Tape:
        async with gate:
            return await rollout(
                agent,
                env,
                made.task,
                engine=engine,
                seed=derive_seed(seed, name, attempt, refill),
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
    beside = await compared(getattr(env, "rewards", None), made.usable, append)
    by_id = {tape.id: tape for tape in beside}
    return [by_id.get(tape.id, tape) for tape in every]
