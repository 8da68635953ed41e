"""Evaluation on held-out tasks. Its episodes have separate sampling settings and don't change the state of training.

Their tapes have a separate split. So no update can name these tapes, and the accounting counts their tokens as held
out. `agents.runs.pass_at_k` computes the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...agents import Agent, Engine, Limits, rollout
from ...agents.episode.seeds import derive_seed
from ...agents.runs.group import run_all
from ...agents.runs.pass_at_k import Scores, evaluate_rewards, standard_error
from ...envs.environment import EnvironmentFactory, check_factory
from ...tapes import Sampling, Tape, Task
from ...tapes.common.stats import mean_of
from ...tapes.journal import Journal
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


async def evaluate(
    agent: Agent,
    env: EnvironmentFactory,
    tasks: Sequence[object],
    *,
    engine: Engine,
    sampling: Sampling,
    attempts: int = 1,
    k: Iterable[int] = (),
    success: float = 1.0,
    seed: int = 0,
    split: str = "eval",
    limits: Limits | None = None,
    journal: Journal | None = None,
    concurrent: int = 256,
    on_tape: Callable[[Tape], None] | None = None,
) -> Evaluation:
    """Run `attempts` episodes for each task. Return the rewards, and pass@k for each number in `k`.

    `success` is the minimum reward that counts as a success. All attempts at a task have the same environment seed. It
    depends only on `seed`, `split` and the task's position, so two policies can be compared task by task.
    """
    if split in TRAINED_SPLITS:
        raise ValueError(f"an evaluation can't be recorded as split {split!r}, which is trained on: choose another")
    check_factory(env)

    async def one(place: tuple[int, Task, int]) -> Tape:
        number, task, attempt = place
        key = () if attempts == 1 else (attempt,)
        group = None if attempts == 1 else f"{split}/{task.hash[:24]}"
        tape = await rollout(
            agent,
            env,
            task,
            engine=engine,
            seed=derive_seed(seed, split, number, *key),
            split=split,
            env_seed=None if attempts == 1 else derive_seed(seed, split, number, "env"),
            group=group,
            attempt=attempt,
            limits=limits,
            sampling=sampling,
            journal=journal,
        )
        if on_tape is not None:
            on_tape(tape)
        return tape

    places = [(number, Task.of(task), attempt) for number, task in enumerate(tasks) for attempt in range(attempts)]
    tapes = await run_all(places, one, concurrency=concurrent)
    rewards: dict[str, list[float | None]] = {}
    for (_, task, _), tape in zip(places, tapes, strict=True):
        rewards.setdefault(task.hash, []).append(_earned(tape))
    return Evaluation(
        tuple(map(_earned, tapes)),
        components(tapes),
        tuple(tape.id for tape in tapes),
        evaluate_rewards(rewards, k=k, success=success, seed=seed),
        {**ends(tapes), **lengths(tapes)},
    )


def _earned(tape: Tape) -> float | None:
    return tape.reward if tape.trains else None
