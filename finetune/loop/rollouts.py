"""The queue between sampling and training. It samples groups of episodes, closes them and passes them to updates.

A group is a number of attempts at one task. If the same task is drawn again later, it gets another group. So attempts
from different epochs of a taskset, or from policies that are far apart, are never compared. A closed group is:

    ready     an update takes it; the oldest groups are taken first
    aside     the recipe would drop it, because it is flat; others are sampled in its place, at most `extra_groups`
              for one update
    dropped   none of its attempts can be trained on; another group is sampled in its place

A resumed loop continues with the closed tapes of an earlier process.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from ...agents import Agent, EpisodeSpec
from ...agents.episode.seeds import derive_seed
from ...agents.runs.attempts import Attempts, LocalAttempts
from ...agents.runs.group import Closing, Group, fill
from ...envs.environment import EnvironmentFactory
from ...envs.rewards import Rewards
from ...envs.rewards.relative import comparable, compared, layer_of, training_reward
from ...tapes import Tape, Task
from ...tapes.common.text import logger
from ...tapes.errors import TapereelError
from ..data.by_agent import rewards_of
from ..data.provenance import episode_of
from ..data.rows import Row, rows
from ..data.stream import Episode
from ..objective.recipe import Recipe
from .history import Plan
from .learner import Learner
from .loop_config import LoopConfig
from .staleness import Pacer, version_number

log = logger("groups")

PHASE = "rl"
"""The name of the loop's phase in records, seeds and metrics."""
BARREN_BATCHES = 8
"""The loop stops if no attempt is usable in this many batches of groups in a row. The cause must then be permanent, and
a loop that continues would record failures until the disk is full."""
EXTRA_BATCHES = 3
"""The default of `loop.extra_groups`, as a multiple of the groups in an update."""


class NothingUsable(TapereelError, RuntimeError):
    """Raised if too many groups in a row have no attempt that can be trained on, or too many updates in a row are
    skipped. The message describes how the last attempt ended, or names the number that isn't finite."""


class Filled(StrEnum):
    """Whether an update got as many groups as configured."""

    FULL = "full"
    """There are as many groups as configured."""
    SHORT = "short"
    """There are fewer groups than configured: too many were flat, and `extra_groups` allows no further replacements."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups that one update takes from the queue."""

    groups: list[Group]
    aside: list[Group]
    """Flat groups (groups with equal rewards) that were sampled for this update."""
    filled: Filled
    closings: Counter[Closing]
    """How many groups closed in each way (complete, at their deadline, ...) since the last update. Dropped groups count
    too."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of unusable tapes in the closed groups, by the reason why they can't be trained on."""

    @property
    def tapes(self) -> list[Tape]:
        """All usable attempts. Attempts of flat groups come last."""
        return [tape for group in (*self.groups, *self.aside) for tape in group.usable]

    def line(self) -> dict[str, object]:
        """Return the fields about these groups in a line of metrics."""
        return {
            "groups": len(self.groups),
            "groups_aside": len(self.aside),
            "filled": self.filled.value,
            **{f"closed/{name.value}": self.closings[name] for name in Closing},
            **{f"lost/{cause}": n for cause, n in sorted(self.lost.items())},
        }


class Rollouts:
    """The groups of one loop. `feed` samples them until it is cancelled. `take` returns the batch for the next
    update."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        learners: Sequence[Learner],
        agent: Agent,
        env: EnvironmentFactory,
        tasks: Callable[[int], object],
        recipe: Recipe,
        seed: int,
        place: Attempts | None = None,
    ) -> None:
        """The engine of the first policy in `learners` samples for all agents."""
        history, engine = learners[0].history, learners[0].engine
        self.config = config
        self.store = history.store
        self.history = history
        self.engine = engine
        self.agent = agent
        self.env = env
        self.tasks = tasks
        self.seed = seed
        self.place = place or LocalAttempts(agent, env)
        others = (path for learner in learners for path in learner.agents or ())
        self.trained = None if config.agents is None else frozenset((*config.agents, *others))
        """Paths of the agents that are trained, by any of the policies. None means all agents."""
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
        """Rows and `Episode` of each tape that waits for an update. A tape is converted once, when its group closes."""
        self.spoke: set[str] = set()
        """Paths of the agents that spoke in the tapes that were converted so far."""
        self.next_group = 0
        self.sampled_tokens = 0
        self.dropped = 0
        self._barren = 0
        """The number of groups dropped in a row."""
        self._unfinished: list[Group] = []
        self._closings: Counter[Closing] = Counter()
        self._lost: Counter[str] = Counter()
        self._changed = asyncio.Event()
        """Set when more groups may be able to start."""
        self._more = True
        """Whether further groups may begin."""
        self._closed = asyncio.Event()
        """Set when a group has closed."""

    def name(self, number: int) -> str:
        """Return the id of a group, which its tapes record. `resume` finds the groups of this loop by this id."""
        return f"{self.history.lineage}/{PHASE}/{number:06d}"

    # From an earlier process

    def resume(self) -> None:
        """Continue with the groups on tape from an earlier process. Unfinished groups get their missing attempts.
        Finished groups are ready, set aside or dropped.

        If a recorded update names any tape of a group, the whole group counts as used. So no attempt is trained on
        twice.
        """
        # A store may have groups of other lineages and phases, such as a warm start's or another run's.
        prefix = re.compile(re.escape(f"{self.history.lineage}/{PHASE}/") + r"(\d+)$")
        used = {tape for use in self.store.ledger(self.history.lineage).uses for tape in Plan.of(use).every}
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
                self._continue(group)

    def _continue(self, group: Group) -> None:
        # A group is as old as its oldest sampled token, whenever this process began. So pacing and staleness are the
        # same as in an uninterrupted run.
        group.begun = min(self._versions(group), default=group.begun)
        for tape in (tape for tapes in group.tapes.values() for tape in tapes):
            if tape.trains and not comparable(tape):
                group.lost["environment"] += 1
                log.warning("tape %s has a reward of %s, too large to be trained on", tape.id, training_reward(tape))
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
            # The earlier process dropped this group. It doesn't count as dropped in a row (`_barren`). Otherwise a run
            # that stopped at this limit could never be resumed, even after the cause was fixed.
            self.dropped += 1

    def _versions(self, group: Group) -> list[int]:
        """Return the numbers of the policy's versions that sampled tokens of the group. Tokens of other policies don't
        count."""
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
        """Sample groups until cancelled, as many at the same time as the `Pacer` allows.

        Unfinished groups from an earlier process come first, because their tokens are the next to become stale.
        """
        async with asyncio.TaskGroup() as jobs:
            while True:
                while self._more and self.pacer.capacity > 0:
                    group = self._unfinished.pop(0) if self._unfinished else self._new_group()
                    self.pacer.start()
                    jobs.create_task(self._sample(group))
                # There is no await between the check of the capacity and `clear`, so no change is missed.
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
        sampling = partial(
            fill,
            group,
            partial(self._attempt, group),
            until=until,
            fresh=lambda: self._fresh(group),
            engine=self.engine,
        )
        # `fill` also notes in the group how it closed. Continuations close it a second time.
        closing = await sampling()
        if closing is not Closing.DEADLINE and self._fork(group):
            await sampling()
        await self._compare(group)
        self._close(group)

    async def _compare(self, group: Group) -> None:
        """Add the rewards that compare the attempts of a group with each other, if the environment has such rewards."""
        scored = {tape.id: tape for tape in await compared(self.rewards, group.usable, self.store.append_layer)}
        for tapes in group.tapes.values():
            tapes[:] = [scored.get(tape.id, tape) for tape in tapes]

    @property
    def rewards(self) -> Rewards[Tape] | None:
        """The reward sources that score episodes in addition to the environment, or None."""
        return getattr(self.env, "rewards", None)

    def _fresh(self, group: Group) -> bool:
        """Return whether a further attempt may start in the group. It may if at most `max_lag` updates were made since
        the group began, so that its policy is close enough to the policy of the first attempts."""
        return self.history.updates - group.begun <= self.config.max_lag

    def _fork(self, group: Group) -> bool:
        """Fork attempts of the group, as `loop.forks` says. Each continuation is a separate attempt. Return False if
        none were added.

        The draw of the turns depends only on the seed and the usable attempts, so a resumed loop draws the same turns.
        """
        forks = self.config.forks
        if forks is None or group.prefixes:
            return False
        rng = random.Random(derive_seed(self.seed, PHASE, group.number, "forks"))
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
                    # An earlier process forked at other points, because other attempts were usable then (before a crash
                    # or a deadline). Continuations from different points can't be compared, so none are added.
                    return False
        group.prefixes = dict(enumerate(prefixes, group.size))
        group.size += len(prefixes)
        return bool(prefixes)

    async def _attempt(self, group: Group, k: int, again: int) -> Tape:
        spec = EpisodeSpec(
            task=Task.of(group.task),
            split="train",
            seed=derive_seed(self.seed, PHASE, group.number, k, again),
            # All attempts of a group face the same world, so that their rewards can be compared.
            env_seed=derive_seed(self.seed, PHASE, group.number, "env"),
            group=self.name(group.number),
            attempt=k,
            limits=self.config.limits,
            sampling=self.config.sampling,
            fork=group.prefixes.get(k),
        )
        tape = await self.place.run(spec, self.engine, self.store.writer)
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
        # Converted now, while the update of another batch runs, and not when an update waits for it.
        for tape in usable:
            self.converted[tape.id] = (rows(tape, renderer=self.history.policy.renderer), episode_of(tape))
            self.spoke |= {call.by for call in tape.calls}
        if aside:
            self.aside.append(group)
        else:
            self.ready[group.number] = group

    def _flat(self, tapes: list[Tape]) -> bool:
        if not self.config.by_agent:
            return flat(tapes, [training_reward(tape) for tape in tapes])
        # With a reward per agent, one agent's rewards may be equal and another's not. The group trains the other.
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
                f"{self._barren} groups in a row have no attempt that can be trained on; the last attempt {end}. "
                "Fix the cause, and resume the run"
            )

    # Updates

    async def take(self) -> Taken:
        """Wait for the batch of the next update, and remove it from the queue.

        The oldest groups are taken first. Their tokens would be the next to become stale, and so be wasted.
        """
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
                "an update has %d of %d groups: %d more groups were flat (loop.extra_groups is %d); easier or harder "
                "tasks would give more groups whose rewards differ",
                len(numbers),
                self.pacer.batch,
                len(taken.aside),
                self.pacer.extra,
            )
        return taken

    def applied(self, tapes: tuple[str, ...], *, more: bool) -> None:
        """Report that the update on these tapes is recorded and its weights are published. The tapes are then
        forgotten.

        `more` is False after the last update. No further groups start then, because no update would use them.
        """
        for tape in tapes:
            del self.converted[tape]
        self.pacer.applied()
        self._more = more
        self._changed.set()


def flat(tapes: list[Tape], earned: Sequence[float | None] | None = None) -> bool:
    """Return whether a group is flat, so that every advantage is 0. A recipe with `flat = drop` drops such groups.

    A group is flat if no tape has a reward, or if all tapes that are compared with each other have the same reward.
    Whole attempts are compared with each other, and so are continuations from the same turn. `earned` replaces the
    tapes' own rewards.
    """
    rewards: dict[object, set[float]] = {}
    for tape, reward in zip(tapes, [tape.reward for tape in tapes] if earned is None else earned, strict=True):
        if reward is not None:
            parent = tape.begin.parent
            rewards.setdefault(parent and (parent.tape, parent.turn), set()).add(reward)
    return all(len(different) < 2 for different in rewards.values())


def _end(tape: Tape) -> str:
    """Describe how the episode ended, with its error and the line that raised it."""
    cause = tape.cause
    why = [part for part in (cause.type.value, cause.error, cause.message) if part] if cause is not None else []
    where = f" ({cause.frame})" if cause is not None and cause.frame else ""
    unscored = ", and nothing scored it" if tape.trains and tape.reward is None else ""
    return ": ".join([f"ended as {tape.status}", *why]) + where + unscored
