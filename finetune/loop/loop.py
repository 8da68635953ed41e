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
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ...agents import Agent
from ...agents.engines.engine import SleepingEngine, TrainableEngine, missing_members, require
from ...agents.engines.team_engine import TeamEngine, lead_of
from ...agents.episode.seeds import derive_seed
from ...envs.environment import Environment, check_factory
from ...envs.loop_watch import LoopWatch, Stall
from ...envs.rewards.relative import training_reward
from ...tapes.errors import TapereelError
from ...tapes.store.store import Store
from ..data.by_agent import reward_by_agent
from ..data.rows import Row
from ..data.staleness import stale_before
from ..history.history import History, Plan
from ..history.loop_config import LoopConfig
from ..objective.recipe import BadRecipe, Recipe
from ..policies.players import Player, check_players
from ..recipes import get_recipe
from ..trainer.updates import UpdateStats
from .metrics import rollout_line
from .performance import Timers, perf
from .rollouts import Rollouts, Taken
from .sft import batch_of

log = logging.getLogger("tapereel.loop")

STALL_SECONDS = 5.0
"""How long the event loop may stand still before the line that holds it is named. A forward pass takes far less."""


class SamplerMismatch(TapereelError, AssertionError):
    """Sampler and trainer disagree on a log-prob although they have the same weights: tokens, masks or positions of
    what is trained are not those that were sampled."""


class UnknownAgent(TapereelError, ValueError):
    """None of the agents that are to be trained said anything."""


def check_recipe(config: LoopConfig, recipe: Recipe, shown: int | None = None) -> None:
    """BadRecipe where the settings ask for what the recipe doesn't use, or don't give what it needs. shown: tapes that
    may be imitated beside; None: not known yet."""
    if config.forks is not None and recipe.baseline.by != "fork":
        raise BadRecipe(
            f"loop.forks samples continuations, but recipe {recipe.name!r} compares by "
            f"{recipe.baseline.by}: set its baseline to {{by: fork}}, or leave forks out"
        )
    short = shown is not None and config.demonstrations > shown
    if short or bool(config.demonstrations) != recipe.imitates:
        raise BadRecipe(
            f"recipe {recipe.name!r} has {'an' if recipe.imitates else 'no'} nll regulariser, "
            f"loop.demonstrations is {config.demonstrations}"
            f"{f' and {shown} tapes are there to be imitated' if short else ''}: give all of them (a warm "
            "start brings tapes) or none"
        )


def check_speaks(agents: Sequence[str], rows: Iterable[Row], setting: str = "loop.agents") -> None:
    """UnknownAgent where others spoke in these rows, but none of `agents`, which stand in that setting."""
    paths = {path for row in rows for path in row.agents}
    if paths and not paths.intersection(agents):
        raise UnknownAgent(
            f"{setting} names {', '.join(map(repr, agents))}, but those who spoke are "
            f"{', '.join(map(repr, sorted(paths)))}: name some of these paths"
        )


def check_engines(engines: Iterable[object], config: LoopConfig) -> None:
    """Refuse engines that can't be trained, before anything is recorded: IncompleteEngine names the missing members,
    ValueError an engine that can't sleep although `loop.sleep` is set."""
    for engine in engines:
        require(engine, TrainableEngine, "Training")
        if config.sleep and not isinstance(engine, TeamEngine) and missing_members(engine, SleepingEngine):
            name = getattr(engine, "name", type(engine).__qualname__)
            raise ValueError(
                f"`loop.sleep` needs a server engine (vLLM, SGLang); {name} can't sleep. Remove `loop.sleep`"
            )


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
        engine: TrainableEngine,
        agent: Agent,
        env: Callable[[], Environment[Any]],
        tasks: Callable[[int], Any],
        recipe: Recipe | None = None,
        shown: Sequence[str] = (),
        players: Sequence[Player] = (),
        seed: int = 0,
        phase: str = "rl",
        start: int | None = None,
        on_update: Callable[[UpdateReport], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`tasks(k)`: the task of group k, the same at every call. `recipe`: that of the updates (default: the
        configuration's). `shown`: tapes in the store that are imitated beside, as `demonstrations` says. `players`:
        other policies that learn from the same episodes. `start`: the update at which this phase began (default: the
        history's updates now), so that a resumed loop ends where an uninterrupted one does. `stop`: asked between
        updates; true ends the phase before it has them all. `settled`: awaited before the engine gets other weights, or
        sleeps."""
        if not config.sampling.exact:
            raise ValueError(
                f"the loop can't train on what it samples with {config.sampling!r}: its log-probs are not "
                "those of the distribution drawn from. Sample with a temperature above 0 and nothing else"
            )
        check_engines([engine, lead_of(engine), *(player.engine for player in players)], config)
        check_factory(env)
        recipe = recipe or get_recipe(config.recipe, config.changes)
        check_recipe(config, recipe, len(shown))
        self.config = config
        self.store = store
        self.history = history
        self.engine = engine
        self.seed = seed
        self.phase = phase
        self.shown = tuple(shown) if config.demonstrations else ()
        self.players = tuple(players)
        check_players(self.players, config.agents, history.lineage, history.updates)
        self.start = history.updates if start is None else start
        self.on_update = on_update
        self.stop = stop
        self._settled = settled or _at_once
        self.rollouts = Rollouts(
            config,
            store=store,
            history=history,
            engine=engine,
            agent=agent,
            env=env,
            tasks=tasks,
            recipe=recipe,
            seed=seed,
            phase=phase,
        )
        if self.rollouts.trained is not None:
            self.rollouts.trained |= {path for player in self.players for path in player.agents}
        self.train_seconds = 0.0
        self.train_engine_seconds = 0.0
        self.wall_seconds = 0.0
        self.publish_seconds = 0.0
        self._began = (0.0, 0.0)
        """(time, the engine's busy seconds) when it began."""
        self._heard = False
        """Whether an agent that is trained has spoken."""

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
        self._began = (started, engine_before)
        for use in self.history.unrecorded:
            self.store.append_layer(use)
        self.history.unrecorded.clear()
        await self.store.writer.durable()
        for player in self.players:
            await player.catch_up(self.store, self.history.lineage, self.config.max_lag)
        self.rollouts.resume()
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
            feeder = jobs.create_task(self.rollouts.feed())
            try:
                await self._train()
            finally:
                feeder.cancel()

    @property
    def idle_share(self) -> float:
        """Share of the wall time in which neither the engine nor the trainer was at work."""
        busy = self.train_seconds + self.engine_seconds - self.train_engine_seconds
        return max(0.0, 1 - busy / self.wall_seconds) if self.wall_seconds else 0.0

    # Updates

    async def _train(self) -> None:
        while not self.done:
            taken = await self.rollouts.take()
            report = await self._update(self._plan(taken), taken)
            # Told before the checkpoint: what a checkpoint holds is never made again, so its line must be written.
            if self.on_update is not None:
                self.on_update(report)
            if self.history.updates % self.config.checkpoint_every == 0 or self.done:
                for history in (self.history, *(player.history for player in self.players)):
                    await asyncio.to_thread(history.checkpoint, pinned=self.done)

    def _plan(self, taken: Taken) -> Plan:
        config, update = self.config, self.history.updates
        tapes = tuple(tape.id for group in taken.groups for tape in group.usable)
        return Plan(
            phase=self.phase,
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
        rng = random.Random(derive_seed(self.seed, "shuffle", self.history.updates))
        shuffled: list[float | None] = []
        for group in taken.groups:
            own = [training_reward(tape) for tape in group.usable]
            rng.shuffle(own)
            shuffled.extend(own)
        return tuple(shuffled)

    def _batches(self, taken: Taken) -> tuple[int, ...]:
        """Tapes of each rollout batch, the oldest groups first; empty where there is one batch only."""
        if self.config.rollouts == 1:
            return ()
        size = self.config.groups
        parts = (taken.groups[k : k + size] for k in range(0, len(taken.groups), size))
        return tuple(sum(len(group.usable) for group in part) for part in parts)

    async def _update(self, plan: Plan, taken: Taken) -> UpdateReport:
        shown = {tape: self.history.from_store(tape) for tape in plan.shown}
        source = ChainMap(self.rollouts.converted, shown).__getitem__
        self._trains_somebody(plan)
        before = self.engine.stats.busy_seconds
        if self.config.sleep:
            await self._settled()
        async with self._asleep():
            started = time.perf_counter()
            stats, uses = await asyncio.to_thread(self.history.update, plan, source)
            weights, publish = await asyncio.to_thread(self.history.publish_record, self.config.publish)
            others = [
                await asyncio.to_thread(
                    player.update, player.plan(plan, self.config.max_lag), source, self.config.publish
                )
                for player in self.players
            ]
            seconds = time.perf_counter() - started
            self.train_seconds += seconds
            self.train_engine_seconds += self.engine.stats.busy_seconds - before
            for told in (stats, *(other[0] for other in others)):
                self._check(told)
            for record in (*uses, publish, *(record for _, theirs, _, name in others for record in (*theirs, name))):
                self.store.append_layer(record)
            await self.store.writer.durable()
            await self._settled()
            started = time.perf_counter()
            await self.engine.sync_weights(weights, publish.version, self.config.publish)
            self.publish_seconds += time.perf_counter() - started
            for player, (_, _, theirs, name) in zip(self.players, others, strict=True):
                await player.engine.sync_weights(theirs, name.version, self.config.publish)
        self.rollouts.applied(plan.every)
        line = {
            **rollout_line(stats, uses, taken.tapes, seconds),
            **taken.line(),
            **self._perf(),
            **reward_by_agent(stats.stream),
        }
        for player, (told, *_) in zip(self.players, others, strict=True):
            line |= player.line(told)
        return UpdateReport(self.history.updates, line["reward"], line)

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[None]:
        """Servers that are to sleep in the meantime do, and sample again when it is over, however that ends."""
        engines = [lead_of(self.engine), *(player.engine for player in self.players)] if self.config.sleep else []
        sleepers = [engine for engine in engines if isinstance(engine, SleepingEngine)]  # all: checked at the start
        await asyncio.gather(*(engine.sleep() for engine in sleepers))
        try:
            yield
        except BaseException as error:
            for engine in sleepers:
                try:
                    await engine.wake()
                except TapereelError as second:
                    error.add_note(f"and {engine.name} could not be woken: {second}")
            raise
        await asyncio.gather(*(engine.wake() for engine in sleepers))

    def _perf(self) -> dict[str, float]:
        wall, engine = time.perf_counter() - self._began[0], self.engine.stats.busy_seconds - self._began[1]
        return perf(Timers(wall, engine, self.train_seconds, self.publish_seconds))

    def _trains_somebody(self, plan: Plan) -> None:
        if plan.agents is None or self._heard:
            return
        rows = [row for tape in plan.tapes for row in self.rollouts.converted[tape][0]]
        check_speaks(plan.agents, rows)
        for player in self.players:
            check_speaks(player.agents, rows, f"the player {player.called}")
        self._heard = True

    def _check(self, stats: UpdateStats) -> None:
        """Of the first step only: after it the weights are no longer those that sampled."""
        bound = self.config.sampler_tolerance
        if self.config.max_lag == 0 and bound is not None and stats.mismatch is not None and stats.mismatch > bound:
            raise SamplerMismatch(
                f"update {self.history.updates}: a token's log-prob differs by {stats.mismatch:.3g} nats between "
                f"sampler and trainer, which have the same weights (loop.sampler_tolerance={bound:g}). Where one of "
                "them computes in bfloat16, allow for that, by some 0.05; else see `tapereel explain` on its tapes"
            )


async def _at_once() -> None:
    """Nothing is in the way of new weights."""


def _stalled(stall: Stall) -> None:
    log.warning(
        "the event loop has stood still for %.1f s at %s: every episode waits for it; run blocking code in a "
        "thread (an environment says so with `blocking = True`)",
        stall.seconds,
        stall.where(),
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first fault of a group of tasks: what stopped the loop; the rest was stopped by it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
