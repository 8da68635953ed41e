"""`run` rolls an agent out over tasks and records into a run directory.

A resumed run reads which attempts already have a usable episode, and rolls out the others with the seeds that an
uninterrupted run would have used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ...envs.loop_watch import watch_episodes
from ...envs.rewards.relative import compared
from ...tapes import Tape, Task
from ...tapes.audit.advice import advice
from ...tapes.audit.faults import Fault, Faults
from ...tapes.common.config import Config
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.common.stats import fixed, mean
from ...tapes.errors import UsageError
from ...tapes.records import CauseType, Status
from ...tapes.status import BRANCH
from ...tapes.store.lease import check_free
from ...tapes.store.run_directory import RunDir, code_changes, open_run
from ...tapes.store.store import Store
from ...tapes.store.summary import attempts_of
from ...tapes.value import Value
from ..engines.engine import Engine, EngineStopped
from ..engines.team_engine import check_seats
from ..episode.seeds import derive_seed
from ..episode.spec import EpisodeSpec
from ..setup.engine_config import check_models, pinned, warn_of_faults
from ..setup.profiles import fitted
from ..setup.setup import AgentSource, EnvSource, LoadedSetup, Setup, TasksSource
from ..setup.team_config import AttemptsConfig, RolloutConfig, check_outermost, make_team
from .attempts import Attempts
from .group import RETRIES, needs_episode, run_all, run_attempt
from .on_ray import placed_attempts
from .pass_at_k import Comparison, Rewards, Scores, check_k, compare, evaluate_rewards, standard_error
from .worker import Engines


class SuccessConfig(Config):
    """What counts as a success."""

    success: float = 1.0
    """The minimum reward that counts as a success."""


class ScoresConfig(AttemptsConfig, SuccessConfig):
    """The attempts at each task, and the scores to report for them."""

    k: tuple[int, ...] = ()
    """The values of k for which pass@k is reported. None of them may exceed `attempts`."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        check_k(self.k, self.attempts)
        return self


class RunConfig(ScoresConfig, RolloutConfig, Setup):
    """What to roll out."""

    retries: int = Field(default=RETRIES, ge=0)
    """Maximum number of retries of an attempt. An attempt is retried if its episode ended at a time limit, or with an
    error of the environment, the model or Tapereel."""

    @property
    def environment_seconds(self) -> float:
        return self.limits.environment_seconds or super().environment_seconds


def k_settings(k: Iterable[int], attempts: bool) -> list[tuple[str, object]]:
    """Return the settings that report pass@k for the numbers in `k`. Unless `attempts` are set elsewhere, there are as
    many as the largest k needs."""
    found = list(k)
    return [("k", found), *([] if attempts else [("attempts", max(found))])]


FREE = ("concurrency", "k", "success")
"""Settings that may change when a run is resumed, because they change no tape."""


class Ended(Value):
    """The number of episodes that ended with the same status and the same cause."""

    status: str
    cause: str | None
    """What was at fault, or which limit was reached. None if the end has no cause."""
    episodes: int


class RunSummary(Value):
    """The results of a run, from every tape in its split, including tapes from earlier processes."""

    run: str
    tasks: int
    attempts: int
    """Number of attempts at each task."""
    episodes: int
    recorded: int
    """Number of episodes that this process recorded."""
    ends: tuple[Ended, ...]
    faults: tuple[Fault, ...]
    """Up to 10 errors in this process, the most frequent first, including errors in episodes that kept their result.
    Errors of the same class from the same line count as one fault, with the first error's message."""
    reward: float | None
    """Mean over tasks of each task's mean reward, as in `scores`. None if no attempt was scored."""
    error: float | None
    """Standard error of `reward` over tasks. None if fewer than two tasks were scored."""
    scores: Scores
    """Mean reward and pass@k over tasks, with intervals. For each attempt, only its last usable episode counts."""
    scored: int
    """Number of attempts with a reward."""
    usable: int
    """Number of episodes that can be trained on, because the agent itself caused their end. Only their rewards
    count."""
    turns: float | None
    """Mean number of actions per episode."""
    tokens: dict[str, int]
    """Number of tokens in each category (`Books.counts`), such as `sampled` and `authored`."""
    seconds: float
    """Seconds that this process took."""
    advice: tuple[str, ...] = ()
    """Advice about the run, one sentence each."""
    code_changes: tuple[str, ...] = ()
    """A sentence about each change of the user's code before a resume."""


def run(
    config: RunConfig,
    out: str | Path,
    *,
    agent: AgentSource | None = None,
    env: EnvSource | None = None,
    tasks: TasksSource | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> RunSummary:
    """Roll the agent out over the tasks into the run directory `out`.

    `agent`, `env` and `tasks` replace settings that the configuration leaves unset (`Setup.resolve`). Raises
    UsageError, and writes nothing, if `out` holds a run and `resume` is false, or if the configuration names something
    that doesn't exist. This function also works inside a running event loop.
    """
    started = time.perf_counter()
    # Load the objects before the event loop starts, because the user's code that makes them may run its own.
    check_models([config.engine, *(player.engine for player in config.players.values())])
    config, setup = fitted(pinned(config)).resolve(agent=agent, env=env, tasks=tasks)
    check_outermost(config.players, setup.agent.path)
    check_free(out)  # checked before a model is loaded
    engines = Engines(config.engine, config.players)
    with setup, placed_attempts(config, setup, engines, most=config.concurrency) as place:
        return run_async(_run(config, setup, place, Path(out).absolute(), resume, progress, started))


async def _run(
    config: RunConfig,
    setup: LoadedSetup,
    place: Attempts,
    out: Path,
    resume: bool,
    progress: Progress,
    started: float,
) -> RunSummary:
    engine, publishes = await make_team(config.engine, config.players, shows=setup.shows)
    warn_of_faults(engine.renderer, config.sampling, tools=setup.tools)
    engines = ("engine", *(f"players.{name}.engine" for name in config.players))
    with open_run(out, config, resume=resume, free=FREE, engines=engines, code=setup.code) as directory:
        store = directory.store
        store.record_weights(*publishes.values())
        attempts = _Attempts(config, setup, directory, place)
        try:
            with watch_episodes():
                await attempts.run(engine, progress)
        except EngineStopped as stopped:
            said = f"{attempts.done:,} of {attempts.total:,} attempts have ended"
            raise stopped.at(said, engines if directory.fruitless else ()) from stopped
        finally:
            await place.close()
            await engine.close()
        rewards = getattr(setup.env, "rewards", None)
        if rewards is not None and rewards.relative:
            for summaries in attempts_of(store.summaries(split=config.split, closed=True)).values():
                tapes = [store.tape(one.id, refresh=False) for one in summaries if one.trainable]
                await compared(rewards, tapes, store.append_layer)
        store.writer.sync()
        summary = _summary(attempts, store, out, time.perf_counter() - started)
        directory.summarise(summary)
        return summary


class _Attempts:
    """All attempts that the run needs, and the episodes that they already have."""

    def __init__(self, config: RunConfig, setup: LoadedSetup, directory: RunDir, place: Attempts) -> None:
        self.config = config
        self.setup = setup
        self.place = place
        self.journal = directory.store.writer
        self.usable: dict[tuple[str, int], list[bool]] = {}
        """By (group, attempt), one value for each episode: True if it can be trained on. See `needs_episode`."""
        self.faults = Faults()
        self.recorded = 0
        """Number of episodes in this process."""
        self.spoke: set[str] = set()
        """Paths of the agents that spoke in these episodes, without those that an error cut off."""
        self.done, self.total = 0, len(setup.tasks) * config.attempts
        """The number of attempts that have ended, and the number of all attempts."""
        for summary in directory.store.summaries(split=config.split, closed=True):
            # If an episode failed because of the model, only the process that ran it counts it, and retries the
            # attempt. A later process repeats the episode with the same seed, because the server may answer then.
            cut = (Status.CANCELLED, Status.CRASHED)
            failed = summary.status == Status.ERROR and summary.cause == CauseType.MODEL
            if summary.group is not None and summary.status not in cut and not failed:
                self.usable.setdefault((summary.group, summary.attempt), []).append(summary.trainable)

    def group(self, task: Task) -> str:
        """Return the id of a task's group. It doesn't depend on the order of the tasks."""
        return f"{self.config.split}/{task.hash[:24]}"

    @property
    def open(self) -> list[tuple[Task, int]]:
        """(task, attempt) for each attempt that needs an episode, task by task."""
        every = ((task, k) for task in self.setup.tasks for k in range(self.config.attempts))
        return [
            (task, k)
            for task, k in every
            if needs_episode(self.usable.get((self.group(task), k), []), self.config.retries)
        ]

    async def run(self, engine: Engine, progress: Progress) -> None:
        """Roll out the open attempts. Raises UnknownAgent if a player's agent doesn't speak in the first `concurrency`
        of them."""
        todo = self.open
        self.done, rewards = self.total - len(todo), list[float]()
        checked = min(self.config.concurrency, len(todo)) if not self.done else None
        progress("rolling out", self.done, self.total, "")

        async def attempt(place: tuple[Task, int]) -> None:
            tapes = await self._run_attempt(*place, engine)
            self.done, self.recorded = self.done + 1, self.recorded + len(tapes)
            if self.done == checked:
                check_seats(engine, self.spoke)
            rewards.extend(tape.reward for tape in tapes if tape.reward is not None)
            reward = f"reward {fixed(mean(rewards))}" if rewards else "nothing scored yet"
            progress("rolling out", self.done, self.total, reward)

        await run_all(todo, attempt, concurrency=self.config.concurrency)

    async def _run_attempt(self, task: Task, attempt: int, engine: Engine) -> list[Tape]:
        """Run an episode of the attempt. If it can't be trained on, retry the attempt. Return all tapes."""
        config, group = self.config, self.group(task)
        usable = self.usable.setdefault((group, attempt), [])
        tapes: list[Tape] = []

        async def episode() -> Tape:
            # The number of earlier episodes is part of the seed, so that a resumed run has the same seeds as an
            # uninterrupted run.
            spec = EpisodeSpec(
                task=task,
                split=config.split,
                seed=derive_seed(config.seed, group, attempt, len(usable)),
                env_seed=derive_seed(config.seed, group, "env"),
                group=group,
                attempt=attempt,
                limits=config.limits,
                sampling=config.sampling,
            )
            tape = await self.place.run(spec, engine, self.journal)
            tapes.append(tape)
            if tape.trains and tape.status is not Status.ERROR:
                self.spoke.update(call.by for call in tape.calls)
            if tape.status is Status.ERROR and tape.cause is not None:
                self.faults.count(tape.id, tape.cause)
            for fault in tape.end.beside if tape.end is not None else ():
                self.faults.count(tape.id, fault)
            return tape

        await run_attempt(usable, episode, retries=config.retries)
        return tapes


def _summary(run: _Attempts, store: Store, out: Path, seconds: float) -> RunSummary:
    config = run.config
    found = store.summaries(split=config.split)
    scores = scores_of(store, config.split, k=config.k, success=config.success)
    ends = Counter((s.status or "running", s.cause) for s in found)
    books = store.books()
    return RunSummary(
        run=str(out),
        tasks=len(run.setup.tasks),
        attempts=config.attempts,
        episodes=len(found),
        recorded=run.recorded,
        ends=tuple(Ended(status=status, cause=cause, episodes=k) for (status, cause), k in ends.most_common()),
        faults=run.faults.most(),
        reward=None if scores.reward is None else scores.reward.value,
        error=standard_error(rewards_of(store, config.split)),
        scores=scores,
        scored=scores.attempts - scores.unscored,
        usable=sum(summary.trainable for summary in found),
        turns=sum(s.actions for s in found) / len(found) if found else None,
        tokens=books.counts,
        seconds=round(seconds, 3),
        advice=(*run.place.notes, *advice(store, config.split)),
        code_changes=code_changes(out),
    )


def rewards_of(store: Store, split: str | None = None, layer: str | None = None) -> dict[str, list[float | None]]:
    """Return the rewards of each task's attempts, by task hash. Only an attempt's last usable episode counts. The
    reward is None if this episode is unscored, or if the attempt has no usable episode. Continuations of `branch` count
    only if `split` names them. With `layer`, the rewards are those of this later scoring."""
    found = [s for s in store.summaries(split=split, closed=True) if split is not None or s.split != BRANCH]
    found = store.rescored(layer, found) if layer is not None and found else found
    return {
        task: [s.reward if s.trainable else None for s in attempts] for task, attempts in attempts_of(found).items()
    }


def scores_of(
    store: Store,
    split: str | None = None,
    *,
    k: Iterable[int] = (),
    success: float = 1.0,
    by: str | None = None,
    layer: str | None = None,
) -> Scores:
    """Return the scores of the recorded episodes in `split`, or in all splits if it is None.

    If `by` is given, scores are also reported by label. A task's label is the value of the key `by` in its public part.
    `layer` is as in `rewards_of`.
    """
    labels: dict[str, str] | None = None
    if by is not None:
        first = {s.task_hash: s.id for s in store.summaries(split=split, closed=True)}
        labels = {}
        for task, tape in first.items():
            public = store.tape(tape, refresh=False).begin.task.public
            labels[task] = str(public[by]) if isinstance(public, dict) and by in public else f"without {by}"
    scores = evaluate_rewards(rewards_of(store, split, layer), k=k, success=success, labels=labels)
    found = store.summaries(split=split, closed=True)
    return scores.model_copy(update={"answers": sum(s.calls for s in found), "cut": sum(s.cut for s in found)})


# The scores of recorded runs


class RunScores(Value):
    """The scores of a run's policy, from its recorded episodes."""

    run: str
    split: str | None
    """None means all splits."""
    scores: Scores
    against: str | None = None
    against_scores: Scores | None = None
    difference: Comparison | None = None
    """`run` minus `against`, paired by task. None if `against` is None."""


def score_run(
    run: str | Path,
    split: str | None = None,
    *,
    k: Sequence[int] = (),
    success: float = 1.0,
    by: str | None = None,
    against: str | Path | None = None,
    against_split: str | None = None,
    layer: str | None = None,
) -> RunScores:
    """Return the scores of a run's recorded episodes, and their difference from the run `against`.

    `k` has the values for which pass@k is reported, by default powers of two up to the number of attempts. `success` is
    the minimum reward that counts as a success. If `by` is given, scores are also reported by label. A task's label is
    the value of the key `by` in its public part. If `against_split` is None, `split` is used. With `layer`, the
    rewards are those of this later scoring, in both runs. Raises UsageError if a split has no closed tape, or no tape
    with this layer.
    """
    with ExitStack() as stores:
        store = stores.enter_context(Store.open(run))
        rewards = _recorded_rewards(store, str(run), split, layer)
        other: Rewards | None = None
        if against is not None:
            # The same path is opened only once, because two readers of a growing run may see different states.
            second = store if str(against) == str(run) else stores.enter_context(Store.open(against))
            other = _recorded_rewards(second, str(against), against_split or split, layer)
        k = k or _powers(rewards, other)
        scores = scores_of(store, split, k=k, success=success, by=by, layer=layer)
        found = RunScores(run=str(run), split=split, scores=scores)
    if against is None or other is None:
        return found
    return found.model_copy(
        update={
            "against": str(against),
            "against_scores": evaluate_rewards(other, k=k, success=success),
            "difference": compare(rewards, other, k=k, success=success),
        }
    )


def _recorded_rewards(store: Store, name: str, split: str | None, layer: str | None) -> Rewards:
    rewards = rewards_of(store, split, layer)
    if not rewards:
        splits = ", ".join(sorted({s.split for s in store.summaries()})) or "none"
        of = "" if split is None else f" of split {split!r}"
        raise UsageError(f"{name} has no closed tape{of}; its splits are {splits}")
    return rewards


def _powers(*evaluations: Rewards | None) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to the largest n for which each evaluation has a task with n scored attempts."""
    most = min(max(sum(r is not None for r in own) for own in rewards.values()) for rewards in evaluations if rewards)
    return tuple(2**i for i in range(most.bit_length()))
