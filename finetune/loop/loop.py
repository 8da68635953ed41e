"""The asynchronous training loop, which samples groups of episodes while the trainer learns from finished groups.

The event loop runs the agents, the environments and the embedded engine. Updates run in a thread. The steps of an
update always have the same order: the weights change in memory, the `use` record becomes durable, and the engine gets
the new weights. So the engine can't sample with weights that aren't recorded.

The loop limits how far sampling may run ahead (`staleness.py`), and an update leaves out each token whose policy is too
old. Every episode is in exactly one update, or the accounting gives the reason why it isn't.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ...agents import Agent
from ...agents.engines.engine import TRAINING, CapableEngine, Engine, TrainableEngine, require
from ...agents.engines.team_engine import TeamEngine, UnknownAgent, check_seats, lead_of
from ...agents.episode.process_settings import quick_switches
from ...agents.episode.seeds import derive_seed
from ...agents.runs.attempts import Attempts
from ...envs.environment import EnvironmentFactory, check_factory
from ...envs.loop_watch import watch_episodes
from ...envs.rewards.relative import training_reward
from ...tapes import Tape
from ...tapes.common.text import logger
from ...tapes.errors import TapereelError, UsageError
from ...tapes.records import Use
from ..data.rows import Row
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.updates import UpdateStats
from .history import History
from .learner import Learner, check_learners
from .loop_config import LoopConfig
from .metrics import performance_line, player_line, rollout_line
from .plan import Plan, UpdateInfo, batch_of
from .rollouts import PHASE, NothingUsable, Rollouts, Taken
from .staleness import stale_before

log = logger("loop")

SKIPPED_UPDATES = 5
"""The loop stops if this many updates in a row, or all, are skipped because a number isn't finite. The cause must then
be permanent."""


class SamplerMismatch(TapereelError, AssertionError):
    """Raised if sampler and trainer compute different log-probs with the same weights. Their tokens, masks or positions
    must differ."""


def check_recipe(config: LoopConfig, recipe: Recipe, shown: int | None = None) -> None:
    """Raise UsageError if the settings don't fit the recipe: a setting has no effect, or a required one is missing.

    `shown` is the number of tapes that can be imitated as demonstrations, or None if this number isn't known yet.
    """
    if config.forks is not None and recipe.baseline.by != "fork":
        raise UsageError(
            f"loop.forks samples continuations, but recipe {recipe.name!r} compares by "
            f"{recipe.baseline.by}: set its baseline to {{by: fork}}, or remove `loop.forks`"
        )
    compared = recipe.baseline.compares and recipe.baseline.by == "group" and recipe.reward.per == "episode"
    if compared and config.group_size == 1:
        raise UsageError(
            f"loop.group_size is 1, and recipe {recipe.name!r} compares the attempts at a task, so nothing would be "
            "trained: sample 2 attempts or more, or take a recipe without a baseline, such as reinforce_plain"
        )
    short = shown is not None and config.demonstrations > shown
    if short or bool(config.demonstrations) != recipe.imitates:
        raise UsageError(
            f"recipe {recipe.name!r} has {'an' if recipe.imitates else 'no'} nll regulariser, "
            f"loop.demonstrations is {config.demonstrations}"
            f"{f' and the run has {shown} tapes to imitate' if short else ''}: use the regulariser, the setting and "
            "what brings tapes, a warm start or loop.corpus, together; or none of them"
        )


def check_speaks(agents: Sequence[str], rows: Iterable[Row], setting: str = "loop.agents") -> None:
    """Raise UnknownAgent if none of `agents` (paths) spoke in these rows, but other agents did. The message calls the
    setting that lists `agents` by the name `setting`."""
    paths = {path for row in rows for path in row.agents}
    if paths and not paths.intersection(agents):
        raise UnknownAgent(
            f"{setting} names {', '.join(map(repr, agents))}, but the agents that spoke are "
            f"{', '.join(map(repr, sorted(paths)))}: name some of these paths"
        )


def check_learns(history: History, phase: str, agents: Sequence[str] | None, rows: Iterable[Row]) -> None:
    """Raise UsageError if the recipe needs log-probs at sampling, and no token of these agents (None: of any) in the
    rows has one. Updates would then change nothing."""
    recipe = history.enter(phase).recipe
    calls = [(row, k) for row in rows for k, path in enumerate(row.agents) if agents is None or path in agents]
    usable = (np.isfinite(row.old[row.call == k]).any() for row, k in calls)
    if not recipe.surrogate.advantages or not calls or any(usable):
        return
    row, k = calls[0]
    call = next(call for call in history.store.tape(row.tape).calls if call.call == row.calls[k])
    why = call.sampling.inexact or "the log-probs at sampling are unknown, as of text that no model sampled freely"
    raise UsageError(f"recipe {recipe.name!r} can train on no token of the first batch: in calls of {call.by!r}, {why}")


def check_engines(engines: Iterable[Engine], config: LoopConfig) -> None:
    """Check that these engines can be used for training, before anything is recorded. Raises UsageError if an engine
    lacks members, and names them. Raises ValueError if `loop.sleep` is set and an engine can't sleep."""
    for engine in engines:
        require(engine, TRAINING, "Training")
        if config.sleep and not isinstance(engine, TeamEngine) and "sleep" not in engine.can:
            raise ValueError(
                f"`loop.sleep` needs a server engine (vLLM, SGLang); {engine.name} can't sleep. Remove `loop.sleep`"
            )


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The metrics of one update."""

    update: int
    """The number of applied updates, including this one."""
    reward: float | None
    """Mean reward of the batch's scored episodes."""
    metrics: dict[str, object]
    tapes: Sequence[Tape]
    """The batch's episodes."""


async def _at_once() -> None:
    """The default of `settled`: don't wait. A loop without evaluations can publish new weights at any time."""


class Loop:
    """One run of asynchronous rollouts and training. `loop.run()` may be awaited only once."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        learners: Sequence[Learner],
        agent: Agent,
        env: EnvironmentFactory,
        tasks: Callable[[int], object],
        recipe: Recipe | None = None,
        shown: Sequence[str] = (),
        seed: int = 0,
        start: int | None = None,
        on_update: Callable[[UpdateReport], None] | None = None,
        settled: Callable[[], Awaitable[None]] = _at_once,
        place: Attempts | None = None,
    ) -> None:
        """`learners` are the policies that learn. The first has the agents of `config`, and its engine samples for all
        agents, as a `TeamEngine` if there are other policies. `tasks(k)` returns the task for group k, and must return
        the same task at every call. `recipe` defaults to the recipe in `config`. `shown` are tapes in the store that
        updates also imitate (`loop.demonstrations`).

        `start` is the number of updates that the policy had when the loop first began, by default its current number. A
        resumed loop needs it to end at the same update as an uninterrupted one. `settled` is awaited before the engine
        gets new weights or sleeps, for example until an evaluation has ended. `place` is where episodes run, by default
        this process.
        """
        self.learners = (replace(learners[0], agents=config.agents), *learners[1:])
        """The policies that learn. The first leads."""
        history, engine = self.history, self.engine
        check_engines([engine, lead_of(engine), *(learner.engine for learner in self.players)], config)
        check_factory(env)
        recipe = recipe or get_recipe(config.recipe, config.changes, longest=config.longest_episode(None))
        check_recipe(config, recipe, len(shown))
        self.config = config
        self.store = history.store
        self.seed = seed
        self.shown = tuple(shown) if config.demonstrations else ()
        check_learners(self.learners)
        self.start = history.updates if start is None else start
        self.on_update = on_update
        self._settled = settled
        self.rollouts = Rollouts(
            config,
            learners=self.learners,
            agent=agent,
            env=env,
            tasks=tasks,
            recipe=recipe,
            seed=seed,
            place=place,
        )
        self.train_seconds = 0.0
        self.train_engine_seconds = 0.0
        self.wall_seconds = 0.0
        self.publish_seconds = 0.0
        self._began = (0.0, 0.0)
        """The time and the engine's busy seconds at the start of the loop."""
        self._reported = (0, 0.0)
        """The number of sampled tokens and the engine's busy seconds at the time of the last metrics line."""
        self._stopped = False
        self._skipped, self._why = 0, ""
        """Number of updates in a row that were skipped because a number wasn't finite, and a sentence about the last
        one."""
        self._agents_checked = False
        """Whether `_check_agents` has passed for a batch."""

    @property
    def history(self) -> History:
        """The history of the first policy."""
        return self.learners[0].history

    @property
    def engine(self) -> TrainableEngine:
        """The engine that samples for all agents."""
        return self.learners[0].engine

    @property
    def players(self) -> Sequence[Learner]:
        """The policies after the first."""
        return self.learners[1:]

    @property
    def target(self) -> int:
        """Number of updates, counted from the base weights, after which the phase ends."""
        return self.start + self.config.updates

    @property
    def done(self) -> bool:
        """Whether the phase has ended."""
        return self._stopped or self.history.updates >= self.target

    def stop(self) -> None:
        """End the phase after the update that is in progress."""
        self._stopped = True

    async def run(self) -> None:
        """Run until the phase has ended. Raises the first error from the trainer, the store or the rollouts."""
        started = time.perf_counter()
        engine_before = self.engine.stats.busy_seconds
        self._began, self._reported = (started, engine_before), (self.rollouts.sampled_tokens, engine_before)
        # An earlier process may have died between the records of an update. The missing records are written first,
        # because they must be complete before the next update is recorded. Missing updates are made, so that nothing
        # is sampled with old weights.
        for learner in self.learners:
            await learner.catch_up(self.store, self.history.lineage, self.config.max_lag)
        self.rollouts.resume()
        try:
            with watch_episodes(), quick_switches.changed():
                await self._run()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self.wall_seconds += time.perf_counter() - started
            self.engine_seconds = self.engine.stats.busy_seconds - engine_before

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as jobs:
            feeder = jobs.create_task(self.rollouts.feed())
            try:
                await self._train()
            finally:
                # `feed` never ends by itself, so without the cancellation the task group would wait for it forever.
                feeder.cancel()

    @property
    def idle_share(self) -> float:
        """Share of the wall time in which neither the engine nor the trainer worked."""
        # Seconds in which both worked are in both sums, so they are subtracted once.
        busy = self.train_seconds + self.engine_seconds - self.train_engine_seconds
        return max(0.0, 1 - busy / self.wall_seconds) if self.wall_seconds else 0.0

    # Updates

    async def _train(self) -> None:
        while not self.done:
            # Sampling continues meanwhile: `feed` begins new groups as soon as the limit on staleness allows.
            taken = await self.rollouts.take()
            report = await self._update(self._plan(taken), taken)
            # The line of metrics is written before the checkpoint. After a crash, a resumed run repeats only the
            # updates after the newest checkpoint and writes their missing lines. A line that was missing before this
            # checkpoint would stay missing.
            if self.on_update is not None:
                self.on_update(report)
            if self._skipped >= min(SKIPPED_UPDATES, self.config.updates):
                raise NothingUsable(
                    f"{self._skipped} updates in a row changed nothing. {self._why}. Correct it, and resume the run"
                )
            if self.history.updates % self.config.checkpoint_every == 0 and not self.done:
                for learner in self.learners:
                    await asyncio.to_thread(learner.history.checkpoint)
        for learner in self.learners:
            await asyncio.to_thread(learner.history.settle)

    def _plan(self, taken: Taken) -> Plan:
        config, update = self.config, self.history.updates
        tapes = tuple(tape.id for group in taken.groups for tape in group.usable)
        return Plan(
            phase=PHASE,
            tapes=tapes,
            aside=tuple(tape.id for group in taken.aside for tape in group.usable),
            oldest=stale_before(update, config.max_lag),
            rewards=self._shuffled(taken) if config.shuffle_rewards else None,
            agents=config.agents,
            by_agent=config.by_agent,
            batches=self._batches(taken),
            epochs=config.epochs,
            minibatches=max(1, min(config.minibatches, len(tapes))),
            order=derive_seed(self.seed, "minibatches", update) % 2**31 if config.minibatches > 1 else 0,
            shown=batch_of(self.shown, update - self.start, config.demonstrations, self.seed) if self.shown else (),
        )

    def _shuffled(self, taken: Taken) -> tuple[float | None, ...]:
        """Return the rewards in a random order, as a control experiment (`loop.shuffle_rewards`). They are shuffled
        within each group or across all groups. The order depends only on the seed and the update."""
        rng = random.Random(derive_seed(self.seed, "shuffle", self.history.updates))
        groups = [[training_reward(tape) for tape in group.usable] for group in taken.groups]
        if self.config.shuffle_rewards == "across":
            groups = [[reward for group in groups for reward in group]]
        for group in groups:
            rng.shuffle(group)
        return tuple(reward for group in groups for reward in group)

    def _batches(self, taken: Taken) -> tuple[int, ...]:
        """Return the number of tapes in each rollout batch of the update, or () if it has only one rollout batch."""
        if self.config.rollouts == 1:
            return ()
        size = self.config.groups
        parts = (taken.groups[k : k + size] for k in range(0, len(taken.groups), size))
        return tuple(sum(len(group.usable) for group in part) for part in parts)

    async def _update(self, plan: Plan, taken: Taken) -> UpdateReport:
        """Make one update: train, record and publish, in this order.

        After a crash before the records are durable, a resumed run makes the update from the same tapes. After a later
        crash, it applies the recorded update again. The engine gets the weights only after the records are durable.
        Otherwise a crash could leave tapes that were sampled by an unrecorded version.
        """
        # Rollouts were converted to rows when their group closed. Demonstrations are read from the store.
        shown = {tape: self.history.from_store(tape) for tape in plan.shown}
        source = ChainMap(self.rollouts.converted, shown).__getitem__
        self._check_agents(plan)
        if self.history.delivery.found.get("version") != self.history.version:
            # The first check of a process comes before the weights change, so it covers the weights that sampled this
            # batch.
            await self._check_delivery(plan.tapes)
        before = self.engine.stats.busy_seconds
        if self.config.sleep:
            await self._settled()
        async with self._asleep():
            started = time.perf_counter()
            # The update runs in a thread, because in the event loop it would block every episode. Nothing else changes
            # the model, and engines sample from copies of the model, so no lock is needed.
            plans = [plan, *(player.plan(plan, self.config.max_lag) for player in self.players)]
            done = [
                await asyncio.to_thread(learner.update, own, source, self.config.in_flight)
                for learner, own in zip(self.learners, plans, strict=True)
            ]
            seconds = time.perf_counter() - started
            self.train_seconds += seconds
            self.train_engine_seconds += self.engine.stats.busy_seconds - before
            # This is checked before the records are written, so that no run continues after an update on wrong
            # log-probs.
            for one in done:
                self._check(one.stats, one.uses[0])
            for record in (record for one in done for record in (*one.uses, one.publish)):
                self.store.append_layer(record)
            await self.store.writer.durable()
            # An evaluation may be sampling with the engine's current weights. If so, wait until it has ended.
            await self._settled()
            started = time.perf_counter()
            for learner, one in zip(self.learners, done, strict=True):
                await learner.engine.sync_weights(one.weights, one.publish.version, self.config.in_flight)
            self.publish_seconds += time.perf_counter() - started
        await self._check_delivery(plan.tapes)
        first, *others = done
        self._note_skip(first.stats)
        self.rollouts.applied(plan.every, more=not self.done)
        found, tapes = self.history.delivery.found, taken.tapes
        line = {
            **rollout_line(first.stats, first.uses, tapes, seconds),
            **taken.line(),
            **{f"delivery/{name}": found.get(name) for name in ("verdict", "difference", "moved", "bound")},
        }
        for player, one in zip(self.players, others, strict=True):
            line |= player_line(player.called, one.stats, one.uses, tapes)
        line |= self._perf(line["trained_tokens"], seconds)
        return UpdateReport(self.history.updates, line["reward"], line, tapes)

    def _note_skip(self, stats: UpdateStats) -> None:
        """Count the updates in a row that were skipped because a number wasn't finite."""
        if stats.applied or stats.skipped == "nothing to train on":
            self._skipped = 0
            return
        self._skipped += 1
        why = stats.sums.fault or "look at the update with `tapereel explain`"
        self._why = f"Update {self.history.updates} was skipped, because the {stats.skipped} isn't finite: {why}"
        log.warning("%s", self._why)

    async def _check_delivery(self, tapes: Sequence[str]) -> None:
        """For each policy, check that its samplers have its current weights. Raises NotDelivered if one doesn't."""
        for learner in self.learners:
            history = learner.history
            history.delivery.choose(tapes, lambda tape: self.rollouts.converted[tape][0])
            await history.delivery.check(learner.engine, history.version, self.config.sampler_tolerance)

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[None]:
        """Return a context in which servers sleep, if `loop.sleep` is set. They are woken at the end, even after an
        error."""
        engines = [lead_of(learner.engine) for learner in self.learners] if self.config.sleep else []
        sleepers = [cast(CapableEngine, engine) for engine in engines if "sleep" in engine.can]
        await asyncio.gather(*(engine.sleep() for engine in sleepers))
        try:
            yield
        except BaseException as error:
            for engine in sleepers:
                try:
                    await engine.wake()
                except TapereelError as second:
                    error.add_note(f"{engine.name} could not be woken either: {second}")
            raise
        await asyncio.gather(*(engine.wake() for engine in sleepers))

    def _perf(self, trained: int, seconds: float) -> dict[str, float | None]:
        """Return the fields `perf/...` for a line of metrics. The last update trained on `trained` tokens in `seconds`.

        Times are counted from the beginning of the loop. Sampled tokens per second cover the time since the last line
        in which the engine was busy, and trained tokens per second the last update.
        """
        sampled, busy = self._reported
        self._reported = self.rollouts.sampled_tokens, self.engine.stats.busy_seconds
        since = self._reported[1] - busy
        return {
            **performance_line(
                wall=time.perf_counter() - self._began[0],
                engine=self.engine.stats.busy_seconds - self._began[1],
                train=self.train_seconds,
                publish=self.publish_seconds,
            ),
            "perf/sampled_per_second": (self._reported[0] - sampled) / since if since else None,
            "perf/trained_per_second": trained / seconds if seconds else None,
        }

    def _check_agents(self, plan: Plan) -> None:
        """Check in the first batch that each policy has an agent that spoke and tokens that it can learn from, and that
        the agents of each player exist. Raises UnknownAgent and UsageError."""
        rows = [row for tape in plan.tapes for row in self.rollouts.converted[tape][0]]
        if self._agents_checked or not rows:
            return
        settings = ["loop.agents", *(f"the player {player.called}" for player in self.players)]
        for learner, setting in zip(self.learners, settings, strict=True):
            if learner.agents is not None:
                check_speaks(learner.agents, rows, setting)
            check_learns(learner.history, plan.phase, learner.agents, rows)
        if plan.agents is not None:
            check_seats(self.engine, self.rollouts.spoke)
        self._agents_checked = True

    def _check(self, stats: UpdateStats, use: Use) -> None:
        """Raise SamplerMismatch if sampler and trainer differ by more than the tolerance, and, with autocast, by more
        than rounding explains.

        The check needs the same weights in both, so it is made only if `max_lag` is 0. `stats.mismatch` covers only the
        first step of an update, after which the trainer's weights are different.
        """
        bound, found = self.config.sampler_tolerance, UpdateInfo.model_validate(use.info).rounding
        if self.config.max_lag or bound is None or stats.mismatch is None or stats.mismatch <= bound:
            return
        if found is None or not found["error"] <= max(found["limit"], bound):
            why = "" if found is None else f", on average by {found['error']:.3g} (rounding: {found['limit']:.3g})"
            raise SamplerMismatch(
                f"update {self.history.updates}: a token's log-prob differs by {stats.mismatch:.3g} nats between "
                f"sampler and trainer{why}, which have the same weights (loop.sampler_tolerance={bound:g}). If only "
                "one of them computes in bfloat16, set loop.sampler_tolerance to about 0.05; otherwise look at the "
                "update's tapes with `tapereel explain`"
            )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group of errors from tasks. This error stopped the loop, and the others follow from
    it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
