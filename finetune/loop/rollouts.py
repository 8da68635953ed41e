"""The queue of groups between rollout and training: which are sampled, which are closed, which an update takes.

A group belongs to one task instance of one loop, by its number: the same task drawn again later is another group, so
two epochs of a taskset, or policies far apart, are never compared. Each closed group goes to one update or to none:

    ready     an update takes it, oldest first
    aside     the recipe would drop it as flat; others are sampled in its place, `extra_groups` for one update at most
    dropped   no attempt of it can be trained on; another is sampled in its place

Attempts that were closed on tape by an earlier process are taken up. Knows nothing of models, losses and optimisers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from ...agents import Agent, rollout
from ...agents.engines.engine import Engine
from ...agents.episode.seeds import derive_seed
from ...agents.runs.group import Closing, Group, fill
from ...envs.environment import Environment
from ...envs.rewards import Rewards
from ...envs.rewards.relative import compared, layer_of, training_reward
from ...tapes import Tape, Task
from ...tapes.errors import TapereelError
from ...tapes.store.store import Store
from ..data.by_agent import rewards_of
from ..data.provenance import episode_of, version_number
from ..data.rows import Row, rows
from ..data.staleness import Pacer
from ..data.stream import Episode
from ..history.history import History, Plan
from ..history.loop_config import LoopConfig
from ..objective.recipe import Recipe

log = logging.getLogger("tapereel.groups")

BARREN_BATCHES = 8
"""So many batches of groups without one usable attempt in between stop the loop: something is broken for good, and it
would record failures until the disk is full."""
EXTRA_BATCHES = 3
"""Batches of groups that may be sampled in place of flat ones where the configuration leaves it open."""


class NothingUsable(TapereelError, RuntimeError):
    """No attempt ends in a way that can be trained on, one group after the other; says how the last one ended."""


class Filled(StrEnum):
    """How an update got its batch."""

    FULL = "full"
    """As many groups as were asked for."""
    SHORT = "short"
    """Fewer: too many groups were flat, and `extra_groups` of them have been made up for."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one update has of the queue."""

    groups: list[Group]
    aside: list[Group]
    """Sampled for it, and flat."""
    filled: Filled
    closings: Counter[Closing]
    """How the groups ended that closed since the last update, dropped ones included."""
    lost: Counter[str] = field(default_factory=Counter)
    """Cause -> tapes of those groups that can't be trained on."""

    @property
    def tapes(self) -> list[Tape]:
        """Every attempt that could be trained on, those set aside last."""
        return [tape for group in (*self.groups, *self.aside) for tape in group.usable]

    def line(self) -> dict[str, Any]:
        """What the metrics say of it."""
        return {
            "groups": len(self.groups),
            "groups_aside": len(self.aside),
            "filled": self.filled.value,
            **{f"closed/{name.value}": self.closings[name] for name in Closing},
            **{f"lost/{cause}": n for cause, n in sorted(self.lost.items())},
        }


class Rollouts:
    """The groups of one loop. `feed` samples them for ever, `take` gives what the next update trains on."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        store: Store,
        history: History,
        engine: Engine,
        agent: Agent,
        env: Callable[[], Environment[Any]],
        tasks: Callable[[int], Any],
        recipe: Recipe,
        seed: int,
        phase: str,
    ) -> None:
        self.config = config
        self.store = store
        self.history = history
        self.engine = engine
        self.agent = agent
        self.env = env
        self.tasks = tasks
        self.seed = seed
        self.phase = phase
        self.trained = None if config.agents is None else frozenset(config.agents)
        """Paths of all agents that are trained, by whichever policy; None: all."""
        self.drops_flat = recipe.select.flat == "drop"
        extra = config.extra_groups
        batch = config.groups * config.rollouts
        self.pacer = Pacer(
            batch,
            max(1, config.max_concurrent // config.episodes_per_group),
            config.max_lag,
            extra=0 if not self.drops_flat else EXTRA_BATCHES * batch if extra is None else extra,
        )
        self.ready: dict[int, Group] = {}
        self.aside: list[Group] = []
        self.converted: dict[str, tuple[list[Row], Episode]] = {}
        """Rows and episode of the tapes that wait for an update."""
        self.next_group = 0
        self.sampled_tokens = 0
        self.dropped = 0
        self._barren = 0
        """Groups dropped in a row."""
        self._unfinished: list[Group] = []
        self._closings: Counter[Closing] = Counter()
        self._lost: Counter[str] = Counter()
        self._changed = asyncio.Event()
        """Set when more may be started."""
        self._closed = asyncio.Event()
        """Set when a group has closed."""

    def name(self, number: int) -> str:
        """The id of a group."""
        return f"{self.history.lineage}/{self.phase}/{number:06d}"

    # From an earlier process

    def resume(self) -> None:
        """Take up what is on tape: closed groups are ready, half-sampled ones go on."""
        prefix = re.compile(re.escape(f"{self.history.lineage}/{self.phase}/") + r"(\d+)$")
        used = {tape for use in self.store.ledger(self.history.lineage).uses for tape in Plan.of(use.info).every}
        spent: set[int] = set()
        groups: dict[int, Group] = {}
        for summary in self.store.summaries(split="train"):
            found = prefix.fullmatch(summary.group or "")
            if found is None:
                continue
            number = int(found[1])
            self.next_group = max(self.next_group, number + 1)
            if summary.id in used:
                spent.add(number)
            group = groups.setdefault(number, self._group(number))
            if summary.status is not None:
                tape = self.store.tape(summary.id, refresh=False)
                group.tapes.setdefault(tape.begin.attempt, []).append(tape)
        self.history.cursor = self.next_group
        for number, group in sorted(groups.items()):
            if number not in spent:
                self._take_up(group)

    def _take_up(self, group: Group) -> None:
        group.begun = min(self._versions(group), default=group.begun)
        if not group.open:
            self._fork(group)
        relative = self.rewards is not None and self.rewards.relative
        if group.open or (relative and not all(layer_of(tape) for tape in group.usable)):
            self._unfinished.append(group)
        elif group.usable:
            self.pacer.start()
            group.closed = Closing.COMPLETE if len(group.usable) == group.size else Closing.FAILED
            self._close(group)
        else:
            # Dropped by the earlier process; it is not this one's first in a row, or nothing mended could go on.
            self.dropped += 1

    def _versions(self, group: Group) -> list[int]:
        names = {
            version
            for tapes in group.tapes.values()
            for tape in tapes
            for call in tape.calls
            for version, _, _ in call.spans
        }
        numbers = (version_number(name, self.history.lineage) for name in names)
        return [number for number in numbers if number is not None]

    # Sampling

    async def feed(self) -> None:
        """Keep as many groups in flight as pacing allows, until cancelled."""
        async with asyncio.TaskGroup() as jobs:
            while True:
                while self.pacer.capacity > 0:
                    group = self._unfinished.pop(0) if self._unfinished else self._new_group()
                    self.pacer.start()
                    jobs.create_task(self._sample(group))
                self._changed.clear()
                await self._changed.wait()

    def _group(self, number: int) -> Group:
        return Group(number, self.tasks(number), self.config.group_size, begun=self.history.updates)

    def _new_group(self) -> Group:
        group = self._group(self.next_group)
        self.next_group += 1
        self.history.cursor = self.next_group
        return group

    async def _sample(self, group: Group) -> None:
        until = asyncio.get_running_loop().time() + self.config.group_deadline
        sampling = partial(fill, group, partial(self._attempt, group), until=until, fresh=lambda: self._fresh(group))
        closing = await sampling()
        if closing is not Closing.DEADLINE and self._fork(group):
            await sampling()
        await self._compare(group)
        self._close(group)

    async def _compare(self, group: Group) -> None:
        """Let the attempts earn what they do beside one another, where anything rewards that."""
        beside = await compared(self.rewards, group.usable, self.store.append_layer)
        for tapes in group.tapes.values():
            tapes[:] = [next((t for t in beside if t.id == tape.id), tape) for tape in tapes]

    @property
    def rewards(self) -> Rewards[Tape] | None:
        """What scores the episodes beside the environment."""
        return getattr(self.env, "rewards", None)

    def _fresh(self, group: Group) -> bool:
        """Whether an attempt sampled now can be compared with those at the group's beginning."""
        return self.history.updates - group.begun <= self.config.max_lag

    def _fork(self, group: Group) -> bool:
        """Add the continuations that the configuration asks for, each as an attempt of its own; true if there are any.

        Which attempts go on, and from which turns, follows from the seed and the attempts alone.
        """
        forks = self.config.forks
        if forks is None or group.prefixes:
            return False
        rng = random.Random(derive_seed(self.seed, self.phase, group.number, "forks"))
        roots = [tape for tape in group.usable if tape.begin.parent is None and tape.turns > 1]
        points = [
            root.at_turn(turn)
            for root in rng.sample(roots, min(forks.attempts, len(roots)))
            for turn in sorted(rng.sample(range(1, root.turns), min(forks.turns, root.turns - 1)))
        ]
        prefixes = [point for point in points for _ in range(forks.continuations)]
        for k, prefix in enumerate(prefixes, group.size):
            for tape in group.tapes.get(k, ()):
                parent = tape.begin.parent
                if parent is None or (parent.tape, parent.turn) != (prefix.id, prefix.turns):
                    return False  # begun from other attempts, which a death or a deadline cut short: it stays as it is
        group.prefixes = dict(enumerate(prefixes, group.size))
        group.size += len(prefixes)
        return bool(prefixes)

    async def _attempt(self, group: Group, k: int, again: int) -> Tape:
        tape = await rollout(
            self.agent,
            self.env,
            Task.of(group.task),
            engine=self.engine,
            seed=derive_seed(self.seed, self.phase, group.number, k, again),
            env_seed=derive_seed(self.seed, self.phase, group.number, "env"),
            group=self.name(group.number),
            attempt=k,
            split="train",
            limits=self.config.limits,
            sampling=self.config.sampling,
            journal=self.store.writer,
            fork=group.prefixes.get(k),
        )
        self.sampled_tokens += sum(len(c.completion or ()) for c in tape.calls)
        return tape

    # Closing

    def _close(self, group: Group) -> None:
        usable = group.usable
        aside = bool(usable) and self.drops_flat and self._flat(usable)
        self.pacer.close(usable=bool(usable), aside=aside)
        assert group.closed is not None
        self._closings[group.closed] += 1
        self._lost.update(group.lost)
        self._changed.set()
        self._closed.set()
        if not usable:
            self._drop(group)
            return
        self._barren = 0
        for tape in usable:
            self.converted[tape.id] = (rows(tape, renderer=self.history.renderer), episode_of(tape))
        if aside:
            self.aside.append(group)
        else:
            self.ready[group.number] = group

    def _flat(self, tapes: list[Tape]) -> bool:
        if not self.config.by_agent:
            return flat(tapes, [training_reward(tape) for tape in tapes])
        paths = {call.by for tape in tapes for call in tape.calls}
        paths = paths if self.trained is None else paths & self.trained
        each = [rewards_of(tape, paths) for tape in tapes]
        return all(flat(tapes, [rewards[path] for rewards in each]) for path in paths)

    def _drop(self, group: Group) -> None:
        self.dropped += 1
        self._barren += 1
        if self._barren >= BARREN_BATCHES * self.pacer.batch:
            tapes = [tape for k in sorted(group.tapes) for tape in group.tapes[k]]
            end = _end(tapes[-1]) if tapes else "was cut off by its deadline"
            raise NothingUsable(
                f"{self._barren} groups in a row have no attempt that can be trained on; the last one "
                f"{end}. Mend that, and go on with the same run"
            )

    # Updates

    async def take(self) -> Taken:
        """Wait for the next update's batch, and take it off the queue: the oldest groups first."""
        while not self.pacer.has_batch:
            self._closed.clear()
            await self._closed.wait()
        lacking = self.pacer.lacking
        numbers = sorted(self.ready)[: self.pacer.take()]
        short = lacking > 0 and len(numbers) < self.pacer.batch and self.pacer.extra > 0
        taken = Taken(
            [self.ready.pop(number) for number in numbers],
            self.aside,
            Filled.SHORT if short else Filled.FULL,
            self._closings,
            self._lost,
        )
        self.aside, self._closings, self._lost = [], Counter(), Counter()
        if short:
            log.warning(
                "an update has %d of %d groups: %d more were flat (loop.extra_groups is %d); easier or harder "
                "tasks teach more",
                len(numbers),
                self.pacer.batch,
                len(taken.aside),
                self.pacer.extra,
            )
        return taken

    def applied(self, tapes: tuple[str, ...]) -> None:
        """The update on these tapes is recorded and published."""
        for tape in tapes:
            del self.converted[tape]
        self.pacer.applied()
        self._changed.set()


def flat(tapes: list[Tape], earned: Sequence[float | None] | None = None) -> bool:
    """Whether all that is compared earned the same, or nothing is scored: what `flat = drop` drops. Attempts from
    the beginning are compared with each other, and so are the continuations of one turn. earned: what counts in place
    of the tapes' rewards."""
    rewards: dict[object, set[float]] = {}
    for tape, reward in zip(tapes, [tape.reward for tape in tapes] if earned is None else earned, strict=True):
        if reward is not None:
            parent = tape.begin.parent
            rewards.setdefault(parent and (parent.tape, parent.turn), set()).add(reward)
    return all(len(different) < 2 for different in rewards.values())


def _end(tape: Tape) -> str:
    """How it ended, and where what ended it was raised."""
    cause = tape.cause
    why = [part for part in (cause.type.value, cause.error, cause.message) if part] if cause is not None else []
    where = f" ({cause.frame})" if cause is not None and cause.frame else ""
    return ": ".join([f"ended as {tape.status}", *why]) + where
