"""The loop: rollouts of groups go on while the trainer updates on those that closed, oldest first.

The event loop runs the agents, the environments and the embedded engine; updates run in one thread. The order of an
update is fixed: the weights change in memory, its `use` record becomes durable, the new policy is published, and only
then can anything be sampled from it. Pacing (`pacing.py`) keeps samples fresh; the check at use makes stale ones
impossible. Every episode counts in exactly one update or is accounted for by the books.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..agents import Agent, rollout
from ..agents.llm import derive_seed
from ..envs.base import Environment
from ..envs.watch import LoopWatch, Stall
from ..tapes import Status, Tape, Task
from ..tapes.errors import TapereelError
from ..tapes.store import Store
from .config import LoopConfig
from .history import History, Plan
from .pacing import Pacer, stale_before
from .rows import Row, rows
from .stream import Episode
from .trainer import UpdateStats
from .use import episode_of

log = logging.getLogger("tapereel.loop")

STALL_SECONDS = 5.0
"""How long the event loop may stand still before the line that holds it is named. A forward pass takes far less."""


class SamplerMismatch(TapereelError, AssertionError):
    """Sampler and trainer disagree on a log-prob although they have the same weights: tokens, masks or positions of
    what is trained are not those that were sampled."""


class NothingUsable(TapereelError, RuntimeError):
    """No attempt ends in a way that can be trained on, one group after the other; says how the last one ended."""


BARREN_BATCHES = 8
"""So many batches of groups without one usable attempt in between stop the loop: something is broken for good, and it
would record failures until the disk is full."""


class Publishes(Protocol):
    """The engine, as far as the loop needs it beyond sampling."""

    async def publish(self, state: Any, version: str, mode: Any = "reprefill") -> None: ...


@dataclass(slots=True)
class Group:
    """The attempts at one task, as far as they have come."""

    number: int
    task: Any
    size: int
    tapes: dict[int, list[Tape]] = field(default_factory=dict)
    """attempt -> its closed tapes, refills included."""

    @property
    def usable(self) -> list[Tape]:
        """The attempts that may be trained on, in order."""
        return [tapes[-1] for _, tapes in sorted(self.tapes.items()) if tapes and tapes[-1].trains]

    def wants(self, attempt: int) -> bool:
        """Whether this attempt is to be sampled: until it can be trained on, but refilled once only. What the death of
        a process cut off was no try."""
        tapes = self.tapes.get(attempt) or ()
        tries = sum(tape.status not in (Status.CRASHED, Status.CANCELLED) for tape in tapes)
        return not (tapes and tapes[-1].trains) and tries < 2


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One line of metrics."""

    update: int
    """Updates applied, this one included."""
    reward: float | None
    """Mean reward of the batch's scored episodes."""
    metrics: dict[str, Any]


class Loop:
    """One run of async rollout and training. `await loop.run()` once."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        store: Store,
        history: History,
        engine: Any,
        agent: Agent,
        env: Callable[[], Environment[Any]],
        tasks: Callable[[int], Any],
        seed: int = 0,
        phase: str = "rl",
        start: int | None = None,
        on_update: Callable[[UpdateReport], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`tasks(k)`: the task of group k, the same at every call. `start`: the update at which this phase began
        (default: the history's updates now), so that a resumed loop ends where an uninterrupted one does. `stop`:
        asked between updates; true ends the phase before it has them all."""
        if not config.sampling.exact:
            raise ValueError(f"the loop can't train on what it samples with {config.sampling!r}: its log-probs are not "
                             "those of the distribution drawn from. Sample with a temperature above 0 and nothing else")
        self.config = config
        self.store = store
        self.history = history
        self.engine = engine
        self.agent = agent
        self.env = env
        self.tasks = tasks
        self.seed = seed
        self.phase = phase
        self.start = history.updates if start is None else start
        self.on_update = on_update
        self.stop = stop
        self.pacer = Pacer(config.groups, max(1, config.max_concurrent // config.group_size), config.max_lag)
        self.ready: dict[int, Group] = {}
        self.next_group = 0
        self.converted: dict[str, tuple[list[Row], Episode]] = {}
        self.train_seconds = 0.0
        self.train_engine_seconds = 0.0
        self.wall_seconds = 0.0
        self.sampled_tokens = 0
        self.dropped_groups = 0
        self._barren = 0
        """Groups dropped in a row."""
        self._unfinished: list[Group] = []
        self._changed = asyncio.Event()
        """Set when more may be started."""
        self._closed = asyncio.Event()
        """Set when a group has closed."""

    @property
    def target(self) -> int:
        return self.start + self.config.updates

    @property
    def done(self) -> bool:
        """Whether the phase is over."""
        return self.history.updates >= self.target or self.stop()

    async def run(self) -> None:
        """Go on until the phase has its updates. Raises what the trainer, the store or the pacing raised."""
        started = time.perf_counter()
        engine_before = self.engine.stats.busy_seconds
        self._resume_groups()
        try:
            with LoopWatch(_stalled, seconds=STALL_SECONDS):
                await self._run()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self.wall_seconds += time.perf_counter() - started
            self.engine_seconds = self.engine.stats.busy_seconds - engine_before

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as jobs:
            feeder = jobs.create_task(self._feed())
            try:
                await self._train()
            finally:
                feeder.cancel()

    @property
    def idle_share(self) -> float:
        """Share of the wall time in which neither the engine nor the trainer was at work."""
        busy = self.train_seconds + self.engine_seconds - self.train_engine_seconds
        return max(0.0, 1 - busy / self.wall_seconds) if self.wall_seconds else 0.0

    # Rollouts

    def _resume_groups(self) -> None:
        """Take up what an earlier process recorded: closed groups are ready, half-sampled ones go on."""
        prefix = re.compile(re.escape(f"{self.history.lineage}/{self.phase}/") + r"(\d+)$")
        used = {tape for use in self.store.ledger(self.history.lineage).uses for tape in Plan.of(use.info).tapes}
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
            group = groups.setdefault(number, Group(number, self.tasks(number), self.config.group_size))
            if summary.status is not None:
                tape = self.store.tape(summary.id, refresh=False)
                group.tapes.setdefault(tape.begin.attempt, []).append(tape)
        for number, group in sorted(groups.items()):
            if number in spent:
                continue
            if any(group.wants(k) for k in range(group.size)):
                self._unfinished.append(group)
            elif group.usable:
                self.pacer.start()
                self._close(group)
            else:
                # Dropped by the earlier process; it is not this one's first in a row, or nothing mended could go on.
                self.dropped_groups += 1

    async def _feed(self) -> None:
        async with asyncio.TaskGroup() as jobs:
            while True:
                while self.pacer.capacity > 0:
                    group = self._unfinished.pop(0) if self._unfinished else self._new_group()
                    self.pacer.start()
                    jobs.create_task(self._sample(group))
                self._changed.clear()
                await self._changed.wait()

    def _new_group(self) -> Group:
        group = Group(self.next_group, self.tasks(self.next_group), self.config.group_size)
        self.next_group += 1
        return group

    async def _sample(self, group: Group) -> None:
        until = time.monotonic() + self.config.group_deadline
        async with asyncio.TaskGroup() as attempts:
            for k in range(group.size):
                if group.wants(k):
                    attempts.create_task(self._attempt(group, k, until))
        self._close(group)

    async def _attempt(self, group: Group, k: int, until: float) -> None:
        """One attempt, sampled again once where its end can't be trained on."""
        name = f"{self.history.lineage}/{self.phase}/{group.number:06d}"
        tapes = group.tapes.setdefault(k, [])
        while group.wants(k):
            tape = await rollout(
                self.agent, self.env, Task.of(group.task), engine=self.engine,
                seed=derive_seed(self.seed, self.phase, group.number, k, len(tapes)),
                env_seed=derive_seed(self.seed, self.phase, group.number, "env"),
                group=name, attempt=k, split="train", limits=self.config.limits, sampling=self.config.sampling,
                journal=self.store.writer,
            )  # fmt: skip
            tapes.append(tape)
            self.sampled_tokens += sum(len(c.completion or ()) for c in tape.calls)
            if time.monotonic() >= until:
                return

    def _close(self, group: Group) -> None:
        usable = group.usable
        self.pacer.close(usable=bool(usable))
        self._changed.set()
        self._closed.set()
        if not usable:
            self._drop(group)
            return
        self._barren = 0
        for tape in usable:
            self.converted[tape.id] = (rows(tape, renderer=self.history.renderer), episode_of(tape))
        self.ready[group.number] = group

    def _drop(self, group: Group) -> None:
        self.dropped_groups += 1
        self._barren += 1
        if self._barren >= BARREN_BATCHES * self.config.groups:
            last = group.tapes[max(group.tapes)][-1]
            raise NothingUsable(f"{self._barren} groups in a row have no attempt that can be trained on; the last one "
                                f"ended as {last.status}: {last.cause}. Mend that, and go on with the same run")

    # Updates

    async def _train(self) -> None:
        while not self.done:
            while not self.pacer.has_batch:
                self._closed.clear()
                await self._closed.wait()
            self.pacer.take()
            groups = [self.ready.pop(number) for number in sorted(self.ready)[: self.config.groups]]
            plan = self._plan(groups)
            waited = await self._update(plan, groups)
            self.pacer.applied()
            self._changed.set()
            if self.history.updates % self.config.checkpoint_every == 0 or self.done:
                await asyncio.to_thread(self.history.checkpoint, pinned=self.done)
            if self.on_update is not None:
                self.on_update(waited)

    def _plan(self, groups: list[Group]) -> Plan:
        tapes = [tape.id for group in groups for tape in group.usable]
        rewards = None
        if self.config.shuffle_rewards:
            rng = random.Random(derive_seed(self.seed, "shuffle", self.history.updates))
            shuffled: list[float | None] = []
            for group in groups:
                own = [t.reward for t in group.usable]
                rng.shuffle(own)
                shuffled.extend(own)
            rewards = tuple(shuffled)
        oldest = stale_before(self.history.updates, self.config.max_lag)
        return Plan(phase=self.phase, tapes=tuple(tapes), oldest=oldest, rewards=rewards)

    async def _update(self, plan: Plan, groups: list[Group]) -> UpdateReport:
        before = self.engine.stats.busy_seconds
        started = time.perf_counter()
        stats, use = await asyncio.to_thread(self.history.update, plan, self.converted.__getitem__)
        weights, publish = await asyncio.to_thread(self.history.publish_record, self.config.publish)
        seconds = time.perf_counter() - started
        self.train_seconds += seconds
        self.train_engine_seconds += self.engine.stats.busy_seconds - before
        self._check(stats)
        self.store.append_layer(use)
        self.store.append_layer(publish)
        await self.store.writer.durable()
        await self.engine.publish(weights, publish.version, self.config.publish)
        report = self._report(stats, use, groups, seconds)
        for tape in plan.tapes:
            del self.converted[tape]
        return report

    def _check(self, stats: UpdateStats) -> None:
        bound = self.config.sampler_tolerance
        if self.config.max_lag == 0 and bound is not None and stats.mismatch is not None and stats.mismatch > bound:
            raise SamplerMismatch(
                f"update {self.history.updates}: a token's log-prob differs by {stats.mismatch:.3g} nats between "
                f"sampler and trainer, which have the same weights (tolerance {bound:g}); run `tapereel explain` on "
                "its tapes"
            )

    def _report(self, stats: UpdateStats, use: Any, groups: list[Group], seconds: float) -> UpdateReport:
        tapes = [tape for group in groups for tape in group.usable]
        scored = [tape.reward for tape in tapes if tape.reward is not None]
        reward = sum(scored) / len(scored) if scored else None
        lag = self._lag(tapes)
        metrics = {
            "phase": self.phase, "update": self.history.updates, "reward": reward, "episodes": len(tapes),
            "turns": sum(t.turns for t in tapes) / max(len(tapes), 1), "loss": stats.loss, "grad_norm": stats.grad_norm,
            "lr": stats.lr, "skipped": stats.skipped, "mismatch": stats.mismatch, "ess": stats.ess, "lag": lag,
            "trained_tokens": sum(b - a for _, _, a, b, _ in use.items),
            "stale_tokens": sum(r[3] - r[2] for r in use.info["stale"]),
            "filtered_tokens": sum(r[3] - r[2] for r in use.info["filtered"]), "train_seconds": seconds,
            "truncated": sum(t.status != "finished" for t in tapes) / max(len(tapes), 1), **stats.sums.flat(),
        }  # fmt: skip
        return UpdateReport(self.history.updates, reward, metrics)

    def _lag(self, tapes: list[Tape]) -> float:
        """Mean age of the batch's sampled tokens, in updates."""
        total = n = 0
        for tape in tapes:
            for call in tape.calls:
                for version, start, end in call.spans:
                    total += (self.history.updates - 1 - int(version.rpartition(":")[2])) * (end - start)
                    n += end - start
        return total / n if n else 0.0


def _stalled(stall: Stall) -> None:
    log.warning("the event loop has stood still for %.1f s at %s: every episode waits for it; run blocking code in a "
                "thread (an environment says so with `blocking = True`)", stall.seconds, stall.where())  # fmt: skip


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first fault of a group of tasks: what stopped the loop; the rest was stopped by it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
