"""Groups: the attempts at one task, sampled to be compared."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from ..envs.base import Environment
from ..tapes import Sampling, Tape, Task
from ..tapes.journal import Journal
from .agent import Agent
from .engine import Engine
from .limits import Limits
from .llm import derive_seed
from .rollout import rollout


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
    sampled once more with a new seed, until `deadline` (seconds from now); the group then closes with what it has.
    Every tape is given back, also those: read `tape.trains`. `gate` bounds the episodes that run at once.
    """
    if n < 1:
        raise ValueError(f"a group has at least one attempt, not {n}")
    name = group or uuid.uuid4().hex
    task = Task.of(task)
    env_seed = derive_seed(seed, name, "env")
    until = None if deadline is None else asyncio.get_running_loop().time() + deadline
    gate = gate or asyncio.Semaphore(n)

    async def one(attempt: int, refill: int) -> Tape:
        async with gate:
            return await rollout(
                agent, env, task, engine=engine, seed=derive_seed(seed, name, attempt, refill), env_seed=env_seed,
                group=name, attempt=attempt, split=split, limits=limits, sampling=sampling, journal=journal,
            )  # fmt: skip

    async def attempt(k: int) -> list[Tape]:
        tapes = [await one(k, 0)]
        late = until is not None and asyncio.get_running_loop().time() >= until
        if not tapes[0].trains and not late:
            tapes.append(await one(k, 1))
        return tapes

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(attempt(k)) for k in range(n)]
    return [tape for task_ in running for tape in task_.result()]
