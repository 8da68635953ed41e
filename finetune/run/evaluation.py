"""Evaluation on held-out tasks. Its episodes have separate sampling settings and don't change the state of training.

Their tapes have a separate split. So no update can name these tapes, and the accounting counts their tokens as held
out. `agents.runs.pass_at_k` computes the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...agents import EpisodeSpec, Limits
from ...agents.episode.seeds import derive_seed
from ...agents.runs.pass_at_k import Scores, evaluate_rewards, standard_error
from ...tapes import Sampling, Tape, Task
from ...tapes.common.stats import mean_of
from ...tapes.status import TRAINED_SPLITS
from ..loop.metrics import components, ends, lengths


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one pass over held-out tasks."""

    rewards: tuple[float | None, ...]
    """The reward of each episode, in the order of the tasks. It is None if the episode could not be scored, or if it
    ended with an error that the agent did not cause."""
    metrics: dict[str, float]
    """Mean of each reward component and metric, over the tapes that have it. Within an episode, values are summed."""
    tapes: tuple[str, ...]
    scores: Scores
    """Mean reward and pass@k, with intervals."""
    lengths: dict[str, float | None] = field(default_factory=dict)
    """Values about the turns, the tokens and the ends of the episodes, by their names in metrics.jsonl."""

    @classmethod
    def of(cls, tapes: Sequence[Tape], *, k: Iterable[int] = (), success: float = 1.0, seed: int = 0) -> Evaluation:
        """Score the tapes, in the order of their specs, with pass@k for each number in `k`.

        `success` is the minimum reward that counts as a success. `seed` is for the intervals.
        """
        rewards: dict[str, list[float | None]] = {}
        for tape in tapes:
            rewards.setdefault(tape.begin.task_hash, []).append(_earned(tape))
        return cls(
            tuple(map(_earned, tapes)),
            components(tapes),
            tuple(tape.id for tape in tapes),
            evaluate_rewards(rewards, k=k, success=success, seed=seed),
            {**ends(tapes), **lengths(tapes)},
        )

    @property
    def scored(self) -> int:
        """The number of scored episodes."""
        return sum(r is not None for r in self.rewards)

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored episodes, or None if there are none."""
        return mean_of([r for r in self.rewards if r is not None])

    @property
    def error(self) -> float | None:
        """Standard error of the mean, assuming independent episodes, or None for fewer than two scored episodes."""
        return standard_error({str(k): [reward] for k, reward in enumerate(self.rewards)})


def specs_of(
    tasks: Iterable[object],
    *,
    sampling: Sampling,
    limits: Limits | None = None,
    attempts: int = 1,
    seed: int = 0,
    split: str = "eval",
) -> list[EpisodeSpec]:
    """Return the specs of `attempts` episodes for each task, task by task.

    All attempts at a task have the same environment seed. It depends only on `seed`, `split` and the task's position,
    so two policies can be compared task by task.
    """
    if split in TRAINED_SPLITS:
        raise ValueError(f"an evaluation can't be recorded as split {split!r}, which is trained on: choose another")

    def spec(number: int, task: Task, attempt: int) -> EpisodeSpec:
        key = () if attempts == 1 else (attempt,)
        return EpisodeSpec(
            task=task,
            split=split,
            seed=derive_seed(seed, split, number, *key),
            env_seed=None if attempts == 1 else derive_seed(seed, split, number, "env"),
            group=None if attempts == 1 else f"{split}/{task.hash[:24]}",
            attempt=attempt,
            limits=limits or Limits(),
            sampling=sampling,
        )

    return [spec(number, Task.of(task), k) for number, task in enumerate(tasks) for k in range(attempts)]


def _earned(tape: Tape) -> float | None:
    return tape.reward if tape.trains else None
