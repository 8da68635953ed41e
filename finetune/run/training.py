"""Training in one run directory: the updates, the engines with their weights, the loop and the evaluations.

Each method reads from the directory how far an earlier process got, and continues from that point.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from ...agents import Engine, EpisodeSpec
from ...agents.engines.engine import TrainableEngine
from ...agents.engines.team_engine import check_sight
from ...agents.episode.seeds import derive_seed
from ...agents.runs.attempts import Attempts, LocalAttempts
from ...agents.runs.group import run_all
from ...agents.runs.pass_at_k import NothingInCommon, compare
from ...agents.runs.runner import rewards_of as recorded_rewards
from ...agents.setup.team_config import team_of
from ...tapes import Tape
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.common.stats import fixed, mean_of
from ...tapes.common.text import logger
from ...tapes.records import Use
from ...tapes.store.run_directory import METRICS, Evaluations, HeldOut, RunDir, read_metrics
from ..data.by_agent import rewards_of
from ..interchange.corpus import bring_in_corpus
from ..loop.history import History, Plan
from ..loop.learner import Learner
from ..loop.loop import Loop, UpdateReport, check_speaks
from ..loop.loop_config import NO_WARM_START
from ..loop.metrics import imitation_line, player_line, rollout_line
from ..recipes import get_recipe, write_recipes
from ..trainer.trainer import UpdateStats
from .evaluation import Evaluation, specs_of
from .load_policy import check_rate
from .loaded_run import LoadedRun, Scene
from .longer import end_name, reached
from .players import OWN, check_player, frozen_engines, lineage_of
from .trackers import Trackers
from .train_config import EndedBy, MeasuredBy
from .warm_start import bring_in, warm_start

log = logger("train")
OnEpisode = Callable[[int, Tape], object]
"""A callback that gets the number of updates so far and one episode of the last update's batch."""


@asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[Engine]:
    """Close the engine at the end of the block."""
    try:
        yield engine
    finally:
        await engine.close()


def base_rate(before: Evaluations) -> str:
    """Describe the evaluation before training. If all its rewards are 0 or all are 1, say what that means for RL."""
    sampled = before["sampled"]
    means = ", ".join(f"{fixed(part.mean)} {name}" for name, part in before.items())
    said = f"mean reward before training: {means} ({sampled.n} held-out episodes)"
    if not _flat(sampled):
        return said
    way = "easier tasks, a warm start (warm.tapes) or a larger model" if sampled.mean == 0 else "harder tasks"
    return f"{said}. RL compares better attempts with worse ones, and there was no difference: take {way}"


FEW = 16
"""Fewer held-out episodes don't show that a reward is always the same."""


def _flat(found: HeldOut) -> bool:
    return found.n >= FEW and not found.error and found.mean in (0.0, 1.0)


class Training:
    """A training run in its run directory. The caller sets the number of torch threads."""

    def __init__(
        self,
        loaded: LoadedRun,
        run: RunDir,
        progress: Progress = silent,
        on_episode: OnEpisode | None = None,
        trackers: Trackers | None = None,
        place: Attempts | None = None,
    ) -> None:
        self.loaded, self.run, self.progress = loaded, run, progress
        self.on_episode, self.trackers = on_episode, trackers
        self._place = place
        self.config, self.recipe = loaded.config, loaded.recipe
        self.loop, self.players = self.config.loop, self.config.players
        self.policies, self.policy = loaded.policies, loaded.policy
        self.warm = self.config.warm or NO_WARM_START
        write_recipes(run.path, {"sft": get_recipe("sft"), "rl": self.recipe})
        self.histories: dict[str, History] = {}
        """The history of each policy, by the name of its player. Its model has the base weights until `restore`."""
        for name, policy in self.policies.items():
            if name in self.players:
                check_player(run, name, self.players[name], policy.weights.digest)
            lineage, folder = lineage_of(run.results.lineage, name), run.path / "checkpoints" / name
            self.histories[name] = History(policy, run.store, lineage, folder)
        self.history = self.histories[OWN]
        self._frozen: dict[str, Engine] = {}
        """The engine of each frozen player, while the run samples."""
        self.shown: Sequence[str] = ()
        """Tapes in this run that the loop may also imitate."""
        self._loop: Loop | None = None
        """The loop, while it runs."""
        self._evaluation: asyncio.Task[None] | None = None
        """The latest evaluation that was started while the loop continues."""

    @property
    def scene(self) -> Scene:
        """The scene. It must not be None, so this is only for a run that samples."""
        assert self.loaded.scene is not None
        return self.loaded.scene

    @property
    def place(self) -> Attempts:
        """Where episodes run."""
        return self._place or LocalAttempts(self.scene.agent, self.scene.env)

    def complete(self) -> None:
        """Restore the weights, then run the warm start and the loop with its evaluations."""
        if self.history.updates == 0 and not self.policy.weights.ranks.sharded:
            check_rate(self.policy.model, self.loop)
        results, tapes = self.run.results, self._imitated()
        self.restore()
        self._imitate(tapes)
        if self.loop.corpus is not None:
            if results.corpus is None:
                results.corpus = bring_in_corpus(self.loaded.documents(results), self.run.store)
            self.run.save()
            self.shown = results.corpus
        run_async(self._improve())

    def _imitated(self) -> Sequence[str]:
        """Return the tapes that the warm start imitates. The first call copies them into this run."""
        warm, results = self.config.warm, self.run.results
        if warm is not None and results.imitated is None:
            tapes = self.loaded.tapes_to_imitate()
            results.imitated = bring_in(warm.tapes, tapes, self.run.store, self.policy.renderer)
            self.run.save()
        return results.imitated or ()

    def _copy(self) -> Engine:
        """Return an engine with copies of the current weights of all policies."""
        return self._team({name: policy.copy(self.histories[name].version) for name, policy in self.policies.items()})

    def _team(self, engines: Mapping[str, TrainableEngine]) -> TrainableEngine:
        """Return the policies' engines and those of the frozen players as one. Closing it leaves the frozen players'
        engines open, because several of these teams use them."""
        return team_of(engines[OWN], self.players, {**engines, **self._frozen}, lent=self._frozen)

    @property
    def measured_by(self) -> MeasuredBy:
        """Which engine is used for evaluations."""
        own = self.config.engine.kind == "embedded" and self.config.on is None
        return self.config.evaluation.engine or ("own" if own else "loop")

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[Engine]:
        """Provide an engine with the current weights for an evaluation. This is either the loop's engine or a separate
        engine, which is closed at the end of the block."""
        if self.measured_by == "loop" and self._loop is not None:
            yield self._loop.engine
            return
        if self.measured_by == "own":
            engine: Engine = self._copy()
        else:
            engine = (await self._sampling())[0].engine
        async with closing(engine):
            yield engine

    async def _sampling(self) -> list[Learner]:
        """Make the loop's engines, with the current weights. Return the policies that learn. The engine of the first
        samples for all agents."""
        engines: dict[str, TrainableEngine] = {}
        async with AsyncExitStack() as made:
            for name, policy in self.policies.items():
                engines[name] = await policy.sampler(self.histories[name].version)
                made.push_async_callback(engines[name].close)
            team = self._team(engines)
            check_sight(team, self.scene.shows)
            learners = []
            for name, history in self.histories.items():
                # Tapes name the version that sampled them, so the record of this version comes before the first tape.
                history.record_version("start")
                agents = self.players[name].agents if name in self.players else self.loop.agents
                engine = team if name == OWN else engines[name]
                await history.delivery.check(engine, history.version, self.loop.sampler_tolerance)
                learners.append(Learner(history=history, engine=engine, agents=agents, name=name))
            made.pop_all()
        return learners

    async def settled(self) -> None:
        """Wait for evaluations that use the loop's engine. If the weights in the engine changed during an evaluation,
        its score would mix two versions."""
        if self._evaluation is not None and self.measured_by == "loop":
            await self._evaluation

    def restore(self) -> None:
        """Restore the weights after the last recorded update, and make metrics.jsonl have one line for each update.

        Metrics lines are written without fsync, and the warm start writes them before its records are durable. So a
        crash can leave a recorded update without a line, or a line without a recorded update. Both are repaired here.
        """
        lines = read_metrics(self.run.path / METRICS)
        reported = {cast(int, line["update"]) for line in lines if line.get("phase") != "evaluation"}
        others: dict[int, dict[str, object]] = {}

        def report(name: str, stats: UpdateStats, uses: Sequence[Use]) -> None:
            update = uses[0].update + 1
            if name != OWN:
                others.setdefault(update, {}).update(player_line(name, stats, uses, self._tapes_of(uses)))
            elif update not in reported:
                self.run.metrics({**self._line(stats, uses), **others.get(update, {})})

        again, (own, *players) = 0, self.histories
        with self.run.timed("restore"):
            for name in (*players, own):  # the line of an update also has the metrics of the players
                history, said = self.histories[name], f"re-applying recorded updates{name and f' of {name}'}"
                again += history.restore(
                    lambda done, of, said=said: self.progress(said, done, of, ""),
                    report=partial(report, name),
                    checkpoint_every=self.loop.checkpoint_every,
                )
                if history.updates == 0:
                    # The digest of the base weights. `reproduce` checks that it begins with the same weights.
                    history.record_version("base")
        # Lines without a recorded update are dropped. The run makes these updates again and then writes their lines.
        self.run.drop_metrics(
            lambda line: line.get("phase") != "evaluation" and cast(int, line["update"]) > self.history.updates
        )
        self._note_scores()
        if again:
            self.run.results.reapplied += again
            self.run.save()

    def _note_scores(self) -> None:
        """Pass the held-out reward of each evaluated version to the histories, so that the best checkpoint is kept."""
        for update, found in self.run.results.evaluations.items():
            mean = found["sampled"].mean if "sampled" in found else None
            if mean is None:
                continue
            for history in self.histories.values():
                history.scores[self.warm.updates + int(update)] = mean

    def _line(self, stats: UpdateStats, uses: Sequence[Use]) -> dict[str, Any]:
        if Plan.of(uses[0]).phase.startswith("sft"):
            return imitation_line(stats, uses)
        return rollout_line(stats, uses, self._tapes_of(uses), None)

    def _tapes_of(self, uses: Sequence[Use]) -> list[Tape]:
        return [self.run.store.tape(tape, refresh=False) for tape in Plan.of(uses[0]).every]

    def _imitate(self, tapes: Sequence[str]) -> None:
        """Make the missing updates of the warm start on these tapes, which the loop may also imitate
        (`loop.demonstrations`). Every process of the run must pass the same tapes in the same order."""
        self.shown = tapes
        target = self.warm.updates
        if self.history.updates >= target:
            if target and self.history.updates == target:
                self.history.settle()
            return

        def report(done: int, line: dict[str, Any]) -> None:
            self.run.metrics(line)
            self.progress("imitating recorded tapes (SFT)", done, target, f"loss {line['loss']:.3f}")

        if self.loop.agents is not None:
            first = (self.history.from_store(tape)[0] for tape in tapes[: self.warm.batch])
            check_speaks(self.loop.agents, (row for rows in first for row in rows))
        with self.run.timed("sft"):
            warm_start(
                self.warm,
                history=self.history,
                tapes=tapes,
                seed=self.config.seed,
                agents=self.loop.agents,
                on_update=report,
            )
        self.run.save()

    async def _improve(self) -> None:
        """Make the missing updates of the loop, with evaluations on held-out tasks before, during and after it."""
        async with frozen_engines(self.players, self.run) as self._frozen:
            try:
                await self._improve_and_evaluate()
            finally:
                await self.place.close()

    async def _improve_and_evaluate(self) -> None:
        results = self.run.results
        # `before` stays None if the loop began without this evaluation, because those weights are gone.
        if self.scene.held_out and self.history.updates == self.warm.updates and results.before is None:
            async with self.measuring() as engine:
                results.before = await self.evaluate(engine, "before")
            self._note_evaluation(0, results.before)
            self.run.save()
            level = logging.WARNING if _flat(results.before["sampled"]) else logging.INFO
            log.log(level, "%s", base_rate(results.before))
        try:
            await self._make_updates()
        except BaseException:
            if self._evaluation is not None:  # cancelling it closes its episodes as cancelled
                self._evaluation.cancel()
                await asyncio.gather(self._evaluation, return_exceptions=True)
            raise
        if self._evaluation is not None:
            await self._evaluation
        if self.scene.held_out:
            if results.after is None:
                async with self.measuring() as engine:
                    results.after = await self.evaluate(engine, end_name(results, self.done))
                self._note_evaluation(self.done, results.after, ended_by=self.ended_by)
            self.run.save()

    async def _make_updates(self) -> None:
        start = self.warm.updates
        if self.done >= self.loop.updates or reached(self.run.results, self.loop.stop_at):
            # All updates were made, but a crash may have come before the last records or a player's last update.
            if any(one.unrecorded or one.updates < self.history.updates for one in self.histories.values()):
                await self._run_loop(lambda update: None, "catching up")
            for history in self.histories.values():
                history.settle()
            return

        def report(update: UpdateReport) -> None:
            self.run.metrics(update.metrics)
            done = update.update - start
            self._evaluate_beside(done)
            if done > 1 and done % self.loop.checkpoint_every:
                return
            if self.on_episode is not None:
                drawn = random.Random(derive_seed(self.config.seed, "episode", done))
                self.on_episode(done, drawn.choice(update.tapes))
            if self.trackers is not None:
                self.trackers.episodes(update.update, update.tapes)

        with self.run.timed("rl"):
            loop = await self._run_loop(report, "improving by rollouts")
        self.run.add_seconds("train", loop.train_seconds)
        self.run.add_seconds("rollout", loop.engine_seconds)
        self.run.results.idle_share = loop.idle_share
        self.run.save()

    def _evaluate_beside(self, done: int) -> None:
        """Start the evaluation that is due after `done` updates of the loop, if any. It begins when the previous
        evaluation has ended. With a separate engine, it uses a copy of the current weights while training continues.
        With the loop's engine, the engine gets new weights only after the evaluation. If a crash interrupts an
        evaluation, it isn't repeated, because its weights are gone."""
        every, over = self.config.evaluation.every, self._loop is None or self._loop.done
        if not self.scene.held_out or every is None or done % every or over:
            return
        # The weights are copied now. After the wait for the previous evaluation, the copy would have later weights.
        engine = self._copy() if self.measured_by == "own" else None
        self._evaluation = asyncio.create_task(self._measure(self._evaluation, engine, done))

    async def _measure(self, before: asyncio.Task[None] | None, own: Engine | None, update: int) -> None:
        if before is not None:
            await before
        async with closing(own) if own is not None else self.measuring() as engine:
            found = await self.evaluate(engine, f"update-{update:06d}")
        self.run.results.evaluations[str(update)] = found
        self._note_scores()
        self._note_evaluation(update, found)
        self.run.save()
        if self._loop is not None and reached(self.run.results, self.loop.stop_at):
            self._loop.stop()

    async def _run_loop(self, on_update: Callable[[UpdateReport], None], name: str) -> Loop:
        """Run the loop. `name` is the name of this part in progress reports."""
        learners = await self._sampling()
        scene, start, draw = self.scene, self.warm.updates, self.loaded.draw(self.run.results)
        order = list(range(len(scene.train_tasks)))
        random.Random(derive_seed(self.config.seed, "tasks")).shuffle(order)

        def report(update: UpdateReport) -> None:
            on_update(update)
            reward = "unscored" if update.reward is None else fixed(update.reward)
            nothing = "" if update.metrics.get("trained_tokens") else ", no token to train on"
            self.progress(name, update.update - start, self.loop.updates, f"reward {reward}{nothing}")

        loop = Loop(
            self.loop,
            learners=learners,
            agent=scene.agent,
            env=scene.env,
            tasks=draw or (lambda k: scene.train_tasks[order[k % len(order)]]),
            recipe=self.recipe,
            shown=self.shown,
            seed=self.config.seed,
            start=start,
            on_update=report,
            settled=self.settled,
            place=self.place,
        )
        if reached(self.run.results, self.loop.stop_at):
            loop.stop()
        self._loop = loop
        try:
            await loop.run()
            await self.settled()
        finally:
            self._loop = None
            await learners[0].engine.close()
        return loop

    @property
    def done(self) -> int:
        """Number of updates that the loop has made."""
        return self.history.updates - self.warm.updates

    @property
    def ended_by(self) -> EndedBy:
        """The setting that has ended the loop."""
        return "updates" if self.done >= self.loop.updates else "stop_at"

    def _note_evaluation(self, update: int, found: Evaluations, **more: str) -> None:
        """Write one metrics line with the mean reward, components, lengths and pass@k of each evaluation in `found`.
        `update` is the number of updates that the loop has made. The line also gets the values in `more`."""
        line: dict[str, Any] = {"phase": "evaluation", "update": update, "updates": self.warm.updates + update, **more}
        for name, part in found.items():
            line[name] = part.mean
            line |= {f"{name}/{path}": mean for path, mean in (part.agents or {}).items()}
            line |= {f"{name}/component/{component}": mean for component, mean in part.metrics.items()}
            line |= {f"{name}/{what}": value for what, value in part.lengths.items()}
            line |= {f"{name}/pass@{k}": share and share["value"] for k, share in part.pass_at.items()}
        self.run.metrics(line)

    @property
    def trained(self) -> tuple[str, ...]:
        """The paths of all trained agents if each agent has its own reward (`loop.by_agent`), otherwise ()."""
        others = (path for name in self.policies if name != OWN for path in self.players[name].agents)
        return (*(self.loop.agents or ()), *others) if self.loop.by_agent else ()

    async def evaluate(self, engine: Engine, when: str) -> Evaluations:
        """Run every evaluation on the held-out tasks with `engine`. The names of their splits contain `when`."""
        config, scene = self.config.evaluation, self.scene
        sampled = config.sampling or self.loop.sampling
        evaluations = {"sampled": sampled}
        if config.greedy:
            evaluations["greedy"] = sampled.model_copy(update={"temperature": 0.0, "first_temperature": None})
        found: Evaluations = {}
        phase = f"evaluating on held-out tasks, {when}"
        done, earned = 0, dict[str, list[float]]()

        async def play(spec: EpisodeSpec) -> Tape:
            nonlocal done
            tape = await self.place.run(spec, engine, self.run.store.writer)
            done += 1
            for path, reward in rewards_of(tape, self.trained).items():
                earned.setdefault(path, []).extend(() if reward is None else (reward,))
            self.progress(phase, done, len(scene.held_out) * len(evaluations) * config.attempts, "")
            return tape

        for name, sampling in evaluations.items():
            earned.clear()
            specs = specs_of(
                scene.held_out,
                sampling=sampling,
                limits=self.loop.limits,
                attempts=config.attempts,
                seed=self.config.seed,
                split=f"eval-{when}-{name}",
            )
            with self.run.timed("evaluation"):
                tapes = await run_all(specs, play, concurrency=config.concurrency)
                result = Evaluation.of(tapes, k=config.k, success=config.success, seed=self.config.seed)
            scores = result.scores.model_dump(mode="json", include={"reward", "pass_at"})
            change, passes = None, dict[str, Any]()
            if when.startswith("after"):
                first, last = (recorded_rewards(self.run.store, f"eval-{end}-{name}") for end in ("before", when))
                with suppress(NothingInCommon):
                    found_change = compare(last, first, k=config.k, success=config.success).model_dump(mode="json")
                    change, passes = found_change["reward"], found_change["pass_at"]
            found[name] = HeldOut(
                mean=result.mean,
                error=result.error,
                n=result.scored,
                metrics=result.metrics,
                lengths=result.lengths,
                change=change,
                pass_change=passes,
                agents={path: mean_of(own) for path, own in earned.items()} or None,
                **scores,
            )
        return found
