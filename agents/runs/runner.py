"""`run`: an agent rolled out over tasks into a run directory, as many episodes at once as are allowed.

Every (task, attempt) is one place to fill. A run that goes on looks at what is on tape, fills the places that are empty
and no others, with the seeds that an uninterrupted run would have used.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...envs.rewards.relative import compared
from ...tapes import Sampling, Tape, Task
from ...tapes.audit.faults import Fault, Faults
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.records import Status
from ...tapes.store.attempts import attempts_of, counts
from ...tapes.store.run_directory import RunDir, open_run
from ...tapes.store.store import Store
from ..engines.engine import Engine
from ..episode.limits import Limits
from ..episode.rollout import rollout
from ..episode.seeds import derive_seed
from ..setup.engine_config import EngineConfig
from ..setup.setup import AgentSource, EnvSource, LoadedSetup, Setup, TasksSource
from ..setup.team_config import Partners, make_team
from .pass_at_k import Scores, check_k, evaluate_rewards, standard_error


class RunConfig(Setup):
    """What to roll out."""

    engine: EngineConfig
    """What speaks for every agent that no player has."""
    players: Partners = Field(default={})
    """Other models in the episodes, by names of your choice, each for agents of its own."""
    attempts: int = Field(default=1, ge=1)
    """Episodes of each task; they are one group, and share the environment's seed."""
    split: str = "eval"
    """What the tapes are recorded for; only `train` and `demo` may be trained on."""
    seed: int = 0
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    concurrency: int = Field(default=64, ge=1)
    """Episodes in flight."""
    refills: int = Field(default=1, ge=0)
    """How often an attempt is made again that the environment, the model, the clock or we ourselves broke."""
    k: tuple[int, ...] = ()
    """Report pass@k for each of these; it takes as many attempts."""
    success: float = 1.0
    """The least reward of a success."""
    by: str | None = None
    """Report by label as well: the value under this key in the public part of each task."""

    @model_validator(mode="after")
    def _enough(self) -> RunConfig:
        check_k(self.k, self.attempts)
        return self


FREE = ("concurrency", "k", "success", "by")
"""Settings that may change when a run goes on: they change no tape."""


class Ended(BaseModel):
    """Episodes that ended alike."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    status: str
    cause: str | None
    """Whose fault or which limit; None for an end that needs no cause."""
    episodes: int


class RunSummary(BaseModel):
    """What a run came to: every tape of its split, whichever process recorded it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str
    tasks: int
    attempts: int
    """For each task."""
    episodes: int
    recorded: int
    """Episodes of this process; the others were there."""
    ends: tuple[Ended, ...]
    faults: tuple[Fault, ...]
    """Errors of this process, those that ended most episodes first; at most 10. One of a class, raised at one place, is
    one, with the message that it had first."""
    reward: float | None
    """Mean over tasks of the mean reward of their scored attempts, as in `scores`; None when there is none."""
    error: float | None
    """Standard error of that mean over tasks; None below two."""
    scores: Scores
    """Mean reward and pass@k over tasks, with their intervals; an attempt counts by its last usable episode."""
    scored: int
    """Attempts with a reward."""
    usable: int
    """Episodes that ended as a result of the agent's own doing."""
    turns: float | None
    """Mean actions of an episode."""
    tokens: dict[str, int]
    """`sampled` and `authored` completion tokens."""
    seconds: float
    """Of this process."""


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
    """Roll the agent out over the tasks into the run directory `out`. RunExists where `out` holds a run and `resume` is
    false.

    `agent`, `env` and `tasks` are objects, where the configuration names none (`Setup.resolve`). Raises UsageError
    before anything is written where the configuration names what isn't there. Works inside a running event loop too.
    """
    started = time.perf_counter()
    # Before the event loop starts: the user's code that makes these objects may run an event loop of its own.
    config, setup = config.resolve(agent=agent, env=env, tasks=tasks)
    return run_async(_run(config, setup, Path(out), resume, progress, started))


async def _run(
    config: RunConfig, setup: LoadedSetup, out: Path, resume: bool, progress: Progress, started: float
) -> RunSummary:
    engine, publishes = await make_team(config.engine, config.players)
    with open_run(out, config, resume=resume, free=FREE) as directory:
        store = directory.store
        known = _published(store)
        for publish in publishes.values():
            if publish.version not in known:
                store.append_layer(publish)
                known.add(publish.version)
        places = Places(config, setup, directory)
        recorded = await _fill(places, engine, progress)
        await _compare(places, store)
        store.writer.sync()
        return _summary(places, recorded, store, out, time.perf_counter() - started)


class Places:
    """The episodes that the run is to have, and those it has."""

    def __init__(self, config: RunConfig, setup: LoadedSetup, directory: RunDir) -> None:
        self.config = config
        self.setup = setup
        self.journal = directory.store.writer
        self.tapes: dict[tuple[str, int], list[bool]] = {}
        """(group, attempt) -> for each tape there, in order: may it be trained on."""
        self.faults = Faults()
        for summary in directory.store.summaries(split=config.split, closed=True):
            if summary.group is not None and summary.status not in (Status.CANCELLED, Status.CRASHED):
                self.tapes.setdefault((summary.group, summary.attempt), []).append(counts(summary))

    def group(self, task: Task) -> str:
        """The id of a task's group: the same whatever the order of the tasks."""
        return f"{self.config.split}/{task.hash[:24]}"

    @property
    def open(self) -> list[tuple[Task, int]]:
        """What is left to fill, task by task."""
        every = ((task, k) for task in self.setup.tasks for k in range(self.config.attempts))
        return [(task, k) for task, k in every if not self.full(self.group(task), k)]

    def full(self, group: str, attempt: int) -> bool:
        """True when the attempt needs no more episodes."""
        there = self.tapes.get((group, attempt), [])
        return any(there) or len(there) > self.config.refills

    async def fill(self, task: Task, attempt: int, engine: Engine) -> list[Tape]:
        """Roll out until the place is full."""
        config, group = self.config, self.group(task)
        there = self.tapes.setdefault((group, attempt), [])
        tapes: list[Tape] = []
        while not self.full(group, attempt):
            tape = await rollout(
                self.setup.agent,
                self.setup.env,
                task,
                engine=engine,
                group=group,
                attempt=attempt,
                split=config.split,
                seed=derive_seed(config.seed, group, attempt, len(there)),
                env_seed=derive_seed(config.seed, group, "env"),
                limits=config.limits,
                sampling=config.sampling,
                journal=self.journal,
            )
            there.append(tape.trains)
            tapes.append(tape)
            self._count(tape)
        return tapes

    def _count(self, tape: Tape) -> None:
        if tape.status is Status.ERROR and tape.cause is not None:
            self.faults.count(tape.id, tape.cause)


async def _fill(places: Places, engine: Engine, progress: Progress) -> int:
    """Fill what is open; gives the number of episodes recorded."""
    todo = places.open
    of = len(places.setup.tasks) * places.config.attempts
    done, recorded, rewards = of - len(todo), 0, list[float]()
    progress("rolling out", done, of, "")
    work = iter(todo)

    async def worker() -> None:
        nonlocal done, recorded
        for task, attempt in work:
            tapes = await places.fill(task, attempt, engine)
            done, recorded = done + 1, recorded + len(tapes)
            rewards.extend(tape.reward for tape in tapes if tape.reward is not None)
            mean = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "nothing scored yet"
            progress("rolling out", done, of, mean)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(places.config.concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)  # what ended the first is raised; they all tell the same
        await engine.close()
    return recorded


async def _compare(places: Places, store: Store) -> None:
    """Let the attempts at each task earn what they do beside one another, where anything rewards that."""
    rewards = getattr(places.setup.env, "rewards", None)
    if rewards is None or not rewards.relative:
        return
    for attempts in attempts_of(store.summaries(split=places.config.split, closed=True)).values():
        tapes = [store.tape(attempt.id, refresh=False) for attempt in attempts if counts(attempt)]
        await compared(rewards, tapes, store.append_layer)


def _summary(places: Places, recorded: int, store: Store, out: Path, seconds: float) -> RunSummary:
    config = places.config
    found = store.summaries(split=config.split)
    scores = scores_of(store, config.split, k=config.k, success=config.success, by=config.by)
    ends = Counter((s.status or "running", s.cause) for s in found)
    books = store.books()
    return RunSummary(
        run=str(out),
        tasks=len(places.setup.tasks),
        attempts=config.attempts,
        episodes=len(found),
        recorded=recorded,
        ends=tuple(Ended(status=status, cause=cause, episodes=k) for (status, cause), k in ends.most_common()),
        faults=places.faults.most(),
        reward=None if scores.reward is None else scores.reward.value,
        error=standard_error(rewards_of(store, config.split)),
        scores=scores,
        scored=scores.attempts - scores.unscored,
        usable=sum(map(counts, found)),
        turns=sum(s.actions for s in found) / len(found) if found else None,
        tokens={"sampled": books.sampled, "authored": books.authored},
        seconds=round(seconds, 3),
    )


def rewards_of(store: Store, split: str | None = None) -> dict[str, list[float | None]]:
    """task hash -> the reward of each attempt at it: that of its last episode that ended by the agent's own doing, None
    where that is unscored or there is none."""
    return {
        task: [s.reward if counts(s) else None for s in attempts]
        for task, attempts in attempts_of(store.summaries(split=split, closed=True)).items()
    }


def scores_of(
    store: Store, split: str | None = None, *, k: Iterable[int] = (), success: float = 1.0, by: str | None = None
) -> Scores:
    """What the recorded episodes of `split` (None: all) come to. by: as in RunConfig."""
    labels: dict[str, str] | None = None
    if by is not None:
        first = {s.task_hash: s.id for s in store.summaries(split=split, closed=True)}
        labels = {task: _label(store.tape(tape, refresh=False).begin.task, by) for task, tape in first.items()}
    return evaluate_rewards(rewards_of(store, split), k=k, success=success, labels=labels)


def _label(task: Task, key: str) -> str:
    return str(task.public[key]) if isinstance(task.public, dict) and key in task.public else f"without {key}"


def _published(store: Store) -> set[str]:
    return {stored.record.version for stored in store.run_records("publish")}
