"""Evaluation: a rollout with its own sampling, recorded like any other, that changes no state of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..agents import Agent, Engine, Limits, rollout
from ..agents.llm import derive_seed
from ..envs.base import Environment
from ..tapes import Sampling, Tape
from ..tapes.journal import Journal


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one pass over held-out tasks."""

    rewards: tuple[float | None, ...]
    """Per task; None where the episode could not be scored."""
    metrics: dict[str, float]
    """Mean of every component and metric over the tapes that have it."""
    tapes: tuple[str, ...]

    @property
    def scored(self) -> int:
        return sum(r is not None for r in self.rewards)

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored episodes; None when there is none."""
        return sum(r for r in self.rewards if r is not None) / self.scored if self.scored else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None below two episodes."""
        n, mean = self.scored, self.mean
        if n < 2 or mean is None:
            return None
        return (sum((r - mean) ** 2 for r in self.rewards if r is not None) / (n - 1) / n) ** 0.5


async def evaluate(
    agent: Agent,
    env: Callable[[], Environment[Any]],
    tasks: Sequence[Any],
    *,
    engine: Engine,
    sampling: Sampling,
    seed: int = 0,
    split: str = "eval",
    limits: Limits | None = None,
    journal: Journal | None = None,
    concurrent: int = 256,
    on_tape: Callable[[Tape], None] | None = None,
) -> Evaluation:
    """One episode per task. The same seed gives every policy the same environment seeds."""
    gate = asyncio.Semaphore(concurrent)

    async def one(k: int, task: Any) -> tuple[float | None, list[tuple[str, float]], str]:
        async with gate:
            tape = await rollout(
                agent, env, task, engine=engine, seed=derive_seed(seed, split, k), split=split, limits=limits,
                sampling=sampling, journal=journal,
            )  # fmt: skip
        if on_tape is not None:
            on_tape(tape)
        return tape.reward, [(r.name, r.value) for r in tape.rewards], tape.id

    results = await asyncio.gather(*(one(k, task) for k, task in enumerate(tasks)))
    values: dict[str, list[float]] = {}
    for _, components, _ in results:
        for name, value in components:
            values.setdefault(name, []).append(value)
    return Evaluation(
        tuple(r for r, _, _ in results),
        {name: sum(v) / len(v) for name, v in values.items()},
        tuple(t for _, _, t in results),
    )
