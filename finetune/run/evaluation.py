"""Evaluation on held-out tasks: episodes with a sampling of their own, which change no state of training.

Their tapes have a split of their own, so that no update can name them and the accounting of tokens counts them as held
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
    """Rewards of one pass over held-out tasks."""

    rewards: tuple[float | None, ...]
    """Of each episode, task after task; None if it could not be scored, or ended by an error that isn't the
    agent's."""
    metrics: dict[str, float]
    """Mean of every reward component and metric, summed over an episode, over the tapes that have it."""
    tapes: tuple[str, ...]
    scores: Scores
    """Mean reward and pass@k with their intervals."""
    lengths: dict[str, float | None] = field(default_factory=dict)
    """Turns, tokens and ends of the episodes, by their names in the metrics."""

    @property
    def scored(self) -> int:
        """The number of scored episodes."""
        return sum(r is not None for r in self.rewards)

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored episodes; None without any."""
        return mean_of([r for r in self.rewards if r is not None])

    @property
    def error(self) -> float | None:
        """Standard error of the mean, with episodes taken as independent; None below two scored episodes."""
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
    """Run `attempts` episodes of each task; returns their rewards, and pass@k for each of `k`.

    success: the least reward of a success. The same seed gives every policy the same environment seeds, so two policies
    can be compared task by task. Attempts at one task share the environment's seed.
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
