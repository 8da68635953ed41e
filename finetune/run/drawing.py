"""The order of tasks in a training run: in turn, or by how hard another run's tapes found them (a curriculum).

The run's results keep the rates that it began with, so a resumed run draws the same tasks, even if those tapes are
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from ...agents.runs.runner import SuccessConfig
from ...envs.curriculum import EASY, HARD, Curriculum, Rate, pass_rates, pools
from ...envs.taskset import BadTasks, Taskset
from ...tapes.errors import UsageError
from ...tapes.records import Task
from ...tapes.store.store import Store


class CurriculumConfig(SuccessConfig):
    """Tasks drawn from pools: easy, normal and hard by the share of attempts that passed; new without any attempt."""

    tapes: str
    """A run directory: its attempts at these tasks are counted once, when training begins."""
    easy: float = Field(default=EASY, ge=0, le=1)
    """A task of which a larger share of attempts passed is easy."""
    hard: float = Field(default=HARD, ge=0, le=1)
    """A task of which a smaller share of attempts passed is hard."""
    weights: dict[str, float] = Field(default={"easy": 1.0, "normal": 2.0, "hard": 1.0, "new": 1.0})
    """How often each pool is drawn from, relative to the others; an empty pool gives its share to the others."""


def rates_of(config: CurriculumConfig, tasks: Sequence[Task]) -> dict[str, tuple[int, int]]:
    """Task hash -> (passed, tried) of these tasks in the run `config.tapes`. UsageError where it tried none of them."""
    with Store.open(config.tapes) as store:
        found = pass_rates(store.tapes(closed=True), success=config.success)
    rates = {task.hash: (found[task.hash].passed, found[task.hash].tried) for task in tasks if task.hash in found}
    if not rates:
        raise UsageError(
            f"curriculum.tapes: {config.tapes} has no scored attempt at any of the {len(tasks)} tasks to "
            "train on, so their difficulty is unknown: record some with `tapereel run`"
        )
    return rates


def drawn(
    config: CurriculumConfig, tasks: Sequence[Task], rates: Mapping[str, tuple[int, int]], seed: int
) -> Callable[[int], Task]:
    """A function from k to the task of group k. UsageError where the weights or bounds leave no task to draw."""
    measured = {name: Rate(passed, tried) for name, (passed, tried) in rates.items()}
    try:
        parts = pools(Taskset(tasks), measured, easy=config.easy, hard=config.hard)
        return Curriculum(parts, config.weights, seed=seed)
    except BadTasks as error:
        raise UsageError(f"curriculum: {error}") from error
