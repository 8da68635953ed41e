"""Chooses the next task by its measured difficulty.

Tasks fall into pools (`easy`, `normal`, `hard`) by the share of recorded attempts that passed. Tasks without a scored
attempt form the pool `new`. Task k depends only on the tasks, the rates, the weights, the seed and k, so a resumed run
draws the same tasks as an uninterrupted run.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tapes import Tape
from ..tapes.common.stats import TOLERANCE
from ..tapes.records import Task
from .taskset import BadTasks, Taskset

POOLS = ("easy", "normal", "hard", "new")
EASY, HARD = 0.75, 0.25
"""Pass rates: above EASY a task is easy, and below HARD it is hard."""

Weights = Mapping[str, float]
Stages = Sequence[tuple[int, Weights]]
"""Pairs (k, weights), sorted by k. The weights of a pair apply from task k on. The first k must be 0."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How often one task was solved."""

    passed: int
    tried: int
    """The number of scored attempts, at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.passed <= self.tried or self.tried < 1:
            raise BadTasks(
                f"invalid pass rate: {self.passed} of {self.tried} attempts passed; it needs at least one scored "
                "attempt, and `passed` must be from 0 to `tried`"
            )

    @property
    def share(self) -> float:
        return self.passed / self.tried


def pass_rates(tapes: Iterable[Tape], *, success: float = 1.0) -> dict[str, Rate]:
    """Return how often each task was solved, by the task's hash. A solved attempt has a reward of at least `success`.
    Only scored attempts that may be used for training count."""
    counts: dict[str, list[int]] = {}
    for tape in tapes:
        if tape.trains and tape.reward is not None:
            count = counts.setdefault(tape.begin.task_hash, [0, 0])
            count[0] += tape.reward >= success - TOLERANCE
            count[1] += 1
    return {name: Rate(passed, tried) for name, (passed, tried) in counts.items()}


def pools(tasks: Taskset, rates: Mapping[str, Rate], *, easy: float = EASY, hard: float = HARD) -> dict[str, Taskset]:
    """Divide the tasks into pools. Each pool keeps the order of the taskset and may be empty. A task with a pass rate
    of exactly `easy` or `hard` is in the pool `normal`."""
    if not 0 <= hard <= easy <= 1:
        raise BadTasks(f"invalid pass rates: hard={hard:g}, easy={easy:g}; they need 0 <= hard <= easy <= 1")
    members: dict[str, list[Task]] = {name: [] for name in POOLS}
    for task in tasks:
        rate = rates.get(task.hash)
        name = "new" if rate is None else "easy" if rate.share > easy else "hard" if rate.share < hard else "normal"
        members[name].append(task)
    return {
        name: Taskset(found, name=f"{tasks.name}/{name}" if tasks.name else name) for name, found in members.items()
    }


class Curriculum:
    """Draws tasks from pools: `Loop(..., tasks=Curriculum(parts, {"easy": 1, "normal": 2, "hard": 1}))`.

    `parts` comes from `pools`. Each draw chooses a pool by its weight, then takes the next task in that pool. A pool is
    shuffled again in each epoch. Empty pools are ignored, whatever their weight. `weights` is one mapping for all
    draws, or `Stages` if the weights change during the run.
    """

    def __init__(self, parts: Mapping[str, Taskset], weights: Weights | Stages, *, seed: int = 0) -> None:
        self.parts = {name: part for name, part in parts.items() if len(part)}
        self.seed = seed
        stages = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        starts = [start for start, _ in stages]
        if not stages or starts[0] != 0 or starts != sorted(set(starts)):
            raise BadTasks(f"the stages of a curriculum must begin at 0 and increase; they begin at {starts}")
        self._starts = starts
        self._weights = [self._checked(stage, parts) for _, stage in stages]
        self._cursors: dict[str, Iterator[Task]] = {}
        self._drawn: list[Task] = []

    def __call__(self, k: int) -> Task:
        """Return task k, counted from 0. Every call with the same k returns the same task."""
        if k < 0:
            raise BadTasks(f"task {k}: tasks are counted from 0")
        while len(self._drawn) <= k:
            name = self.pool(len(self._drawn))
            if name not in self._cursors:
                self._cursors[name] = self.parts[name].cursor(random.Random(f"{self.seed}/{name}").getrandbits(32))
            self._drawn.append(next(self._cursors[name]))
        return self._drawn[k]

    def pool(self, k: int) -> str:
        """Return the name of the pool that task k comes from.

        Each k has its own random generator. So the choice doesn't depend on earlier draws, and a resumed run needs no
        saved state.
        """
        weights = self._weights[bisect_right(self._starts, k) - 1]
        point = random.Random(f"{self.seed}/pool/{k}").random() * sum(weights.values())
        for name, weight in weights.items():
            point -= weight
            if point < 0:
                return name
        # Rounding can leave `point` at 0 or above after the last subtraction, so use the last pool with a weight.
        return next(name for name in reversed(weights) if weights[name])

    def _checked(self, weights: Weights, parts: Mapping[str, Any]) -> dict[str, float]:
        unknown = sorted(set(weights) - set(parts))
        if unknown:
            raise BadTasks(f"there is no pool {unknown[0]!r} to weight; the pools are {', '.join(map(repr, parts))}")
        if any(not 0 <= weight < float("inf") for weight in weights.values()):
            raise BadTasks(f"weights must be finite numbers of 0 or more, not {dict(weights)}")
        known = {name: float(weight) for name, weight in weights.items() if name in self.parts}
        if not sum(known.values()):
            sizes = ", ".join(f"{name} {len(part)}" for name, part in parts.items())
            raise BadTasks(
                f"the weights {dict(weights)} leave no task to draw. The pools hold: {sizes}. Give a pool that holds "
                "tasks a weight above 0"
            )
        return known
