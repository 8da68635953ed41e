"""Training in one run directory: the parts that `train` and the demo share, for any agent, tasks and model.

It holds a history of updates in the store, engines with its weights, the loop, and evaluations on held-out tasks. Each
method reads in the directory what an earlier process has done, and does the rest. The caller chooses the order of the
methods and the tapes to imitate (`train_run.py`, `demonstrations.py`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...agents import Agent, Engine
from ...agents.episode.seeds import derive_seed
from ...envs.environment import Environment
from ...tapes import Sampling, Tape, Task
from ...tapes.common.progress import Progress, silent
from ...tapes.records import Use
from ...tapes.store.run_directory import METRICS, Evaluations, HeldOut, Results, RunDir, drop_metrics, read_metrics
from ...tapes.store.store import Store
from ..data.by_agent import reward_by_agent, rewards_of
from ..history.history import History, Plan, Source
from ..history.loop_config import LoopConfig, WarmStartConfig
from ..loop.held_out import evaluate
from ..loop.loop import Loop, UpdateReport, check_recipe, check_speaks
from ..loop.metrics import imitation_line, rollout_line
from ..loop.sft import warm_start
from ..objective.recipe import Recipe
from ..policies.phases import Phases, recipes_by_phase
from ..policies.policy import Policy
from ..policies.policy_team import NO_WARM_START, Team
from ..recipes.recipe_files import write_recipes
from ..trainer.distributed import Processes
from ..trainer.ranks import Ranks
from ..trainer.trainer import UpdateStats
from .longer import end_name
from .train_config import MeasuredBy


@asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[Engine]:
    """Closes the engine at the end."""
    try:
        yield engine
    finally:
        await engine.close()


def new_results() -> Results:
    """The results of a new run: a lineage of its own, so that its versions of weights have names of their own."""
    return Results(lineage=secrets.token_hex(4))


@dataclass
class Training:
    """A training run in its run directory. The caller sets the number of torch threads."""

    run: RunDir
    policy: Policy
    """It must have the base weights; updates change them in place."""
    agent: Agent
    env: Callable[[], Environment[Any]]
    train_tasks: Sequence[Task]
    held_out: Sequence[Task]
    loop: LoopConfig
    recipe: Recipe
    """The recipe of the loop's updates."""
    warm: WarmStartConfig = NO_WARM_START
    """Imitation before the loop."""
    evaluations: Mapping[str, Sampling] = field(default_factory=dict)
    """Name of an evaluation -> its sampling."""
    attempts: int = 1
    """Episodes of each held-out task in an evaluation."""
    k: tuple[int, ...] = ()
    """Evaluations report pass@k for these."""
    success: float = 1.0
    """The least reward of a success."""
    concurrent: int = 256
    """Episodes of an evaluation in flight."""
    seed: int = 0
    progress: Progress = silent
    processes: Processes | None = None
    """The processes that compute the updates; None: this process alone."""
    draw: Callable[[int], Task] | None = None
    """The task of the loop's group k; None: each of `train_tasks` in turn, in an order that the seed decides."""
    team: Team = field(default_factory=Team)
    """The other models in its episodes."""
    measured_by: MeasuredBy = "own"
    _shown: Sequence[str] = field(default=(), init=False)
    """Tapes in the run that the loop may imitate beside its rollouts."""
    _loop: Loop | None = field(default=None, init=False)
    """The loop, while it runs."""
    _measurement: asyncio.Task[None] | None = field(default=None, init=False)
    """The present evaluation with the loop's engine."""

    def __post_init__(self) -> None:
        check_recipe(self.loop, self.recipe)
        if self.processes is None:
            phases = Phases(self.model, self.loop, self.recipe, self.warm)
            self.processes = Processes(Ranks(), self.model, phases.trainer)
        self.history = self.history_in(self.run.store, self.run.results.lineage, self.run.path)
        self.team.begin(self.run, self.loop, self.recipe)

    @property
    def model(self) -> Any:
        """The policy's model."""
        return self.policy.model

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self.policy.tokenizer

    @property
    def renderer(self) -> Any:
        """The policy's renderer."""
        return self.policy.renderer

    def history_in(self, store: Store, lineage: str, out: Path) -> History:
        """The history of `lineage` in `store`, with its checkpoints under `out`."""
        assert self.processes is not None
        write_recipes(out, recipes_by_phase(self.recipe))
        return self.policy.history(store, lineage, out / "checkpoints", self.processes.trainer, self.loop)

    def engine(self, history: History) -> Engine:
        """An engine with a copy of the present weights, the players' included."""
        return self.team.measuring(self.policy.copy(history.version))

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[Engine]:
        """An engine with the present weights, for an evaluation: the loop's engine, or one that is closed at the
        end."""
        if self.measured_by == "loop" and self._loop is not None:
            yield self._loop.engine
            return
        async with closing(self.engine(self.history) if self.measured_by == "own" else await self._sampling()) as one:
            yield one

    async def _sampling(self) -> Engine:
        """An engine of the kind that the loop uses, for evaluations before and after the loop."""
        engine = await self.policy.sampler(self.history.version)
        try:
            return (await self.team.playing(engine))[0]
        except BaseException:
            await engine.close()
            raise

    def keep_weights_for(self, measurement: asyncio.Task[None] | None) -> None:
        """Keep the weights of the loop's engine until `measurement` is done: `settled` waits for it."""
        self._measurement = measurement

    async def settled(self) -> None:
        """Wait until no evaluation needs the present weights of the loop's engine. New weights in mid-evaluation would
        mix two versions in one score."""
        if self._measurement is not None:
            await self._measurement

    def restore(self) -> None:
        """Bring the weights to the last recorded update, and metrics.jsonl to one line for each update.

        The record of an update becomes durable before its line of metrics is written, without fsync. After a crash, a
        recorded update may lack its line, and a line may be there without its recorded update; both are mended here.
        """
        lines = read_metrics(self.run.path / METRICS)
        reported = {line["update"] for line in lines if line.get("phase") != "evaluation"}

        def report(stats: UpdateStats, uses: Sequence[Use]) -> None:
            if (update := uses[0].update + 1) not in reported:
                self.run.metrics({**self._line(stats, uses), **others.get(update, {})})

        with self.run.timed("restore"):
            again, others = self.team.restore(self.progress)
            again += self.history.restore(
                lambda done, of: self.progress("re-applying recorded updates", done, of, ""), report=report
            )
        # A line without a recorded update: the next process makes that update again and writes its line.
        drop_metrics(
            self.run.path / METRICS,
            lambda line: line.get("phase") != "evaluation" and line["update"] > self.history.updates,
        )
        if self.history.updates == 0:
            # The digest of the base weights: `reproduce` checks that it derives all later weights from the same ones.
            self.history.record_version("base")
        self.note_scores()
        if again:
            self.run.results.reapplied += again
            self.run.save()

    def note_scores(self) -> None:
        """Give the histories the held-out rewards of their versions, so that the best checkpoint is kept."""
        for update, found in self.run.results.evaluations.items():
            mean = found["sampled"].mean if "sampled" in found else None
            if mean is None:
                continue
            for history in (self.history, *self.team.histories.values()):
                history.scores[self.warm.updates + int(update)] = mean

    def _line(self, stats: UpdateStats, uses: Sequence[Use]) -> dict[str, Any]:
        plan = Plan.of(uses[0].info)
        if plan.phase.startswith("sft"):
            return imitation_line(stats, uses)
        tapes = [self.run.store.tape(tape, refresh=False) for tape in plan.every]
        return rollout_line(stats, uses, tapes, None) | reward_by_agent(stats.stream)

    def imitate(self, tapes: Sequence[str], source: Source) -> None:
        """Make the warm start's missing updates on these tapes. Every process must pass the same tapes in the same
        order. The loop may imitate them too (`loop.demonstrations`)."""
        self._shown = tapes
        target = self.warm.updates
        if self.history.updates >= target:
            if target and self.history.updates == target:
                self.history.settle()
            return

        def report(done: int, line: dict[str, Any]) -> None:
            self.run.metrics(line)
            self.progress("imitating recorded tapes (SFT)", done, target, f"loss {line['loss']:.3f}")

        if self.loop.agents is not None:
            check_speaks(self.loop.agents, (row for tape in tapes[: self.warm.batch] for row in source(tape)[0]))
        with self.run.timed("sft"):
            warm_start(
                self.warm,
                store=self.run.store,
                history=self.history,
                tapes=tapes,
                source=source,
                seed=self.seed,
                agents=self.loop.agents,
                on_update=report,
            )
        self.run.save()

    async def before(self) -> None:
        """Evaluate before the loop. The result stays None where the loop has begun without an evaluation, since the
        weights of that moment are gone."""
        if self.history.updates == self.warm.updates and self.run.results.before is None:
            async with self.measuring() as engine:
                found = self.run.results.before = await self.evaluate(engine, "before")
            self.note_evaluation(0, found)
            self.run.save()

    @property
    def end(self) -> str:
        """The name of the evaluation at the end in the splits of its tapes, `eval-{end}-{name}`."""
        return end_name(self.run.results, self.loop.updates)

    async def after(self) -> None:
        """Evaluate the weights at the end, once."""
        if self.run.results.after is None:
            async with self.measuring() as engine:
                found = self.run.results.after = await self.evaluate(engine, self.end)
            self.note_evaluation(self.history.updates - self.warm.updates, found)
        self.run.save()

    async def improve(self, on_update: Callable[[UpdateReport], None] = lambda update: None) -> None:
        """Make the loop's missing updates. `on_update` is called between two updates, in the event loop."""
        start = self.warm.updates
        if self.history.updates >= start + self.loop.updates:
            # All updates are made, but a crash may have cut off their last records, or a player's last update.
            if self.history.unrecorded or self.team.behind(self.history.updates):
                await self.run_loop(self.history, self.loop, lambda update: None, name="catching up", start=start)
            self.history.settle()
            self.team.settle()
            return

        def report(update: UpdateReport) -> None:
            self.run.metrics(update.metrics)
            on_update(update)

        with self.run.timed("rl"):
            loop = await self.run_loop(self.history, self.loop, report, name="improving by rollouts", start=start)
        self.run.add_seconds("train", loop.train_seconds)
        self.run.add_seconds("rollout", loop.engine_seconds)
        self.run.results.idle_share = loop.idle_share
        self.run.save()

    async def run_loop(
        self,
        history: History,
        config: LoopConfig,
        on_update: Callable[[UpdateReport], None],
        *,
        name: str,
        start: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Loop:
        """Run the loop by `config` on `history` and in its store. start, stop: as in `Loop`."""
        engine = await self.policy.sampler(history.version)
        try:
            engine, players = await self.team.playing(engine)
        except BaseException:
            await engine.close()
            raise
        # Tapes name the version that sampled them, so its record must be there before the first one.
        history.record_version("start")
        order = list(range(len(self.train_tasks)))
        random.Random(derive_seed(self.seed, "tasks")).shuffle(order)

        def report(update: UpdateReport) -> None:
            on_update(update)
            reward = "unscored" if update.reward is None else f"{update.reward:.3f}"
            nothing = "" if update.metrics.get("trained_tokens") else ", no token to train on"
            self.progress(name, update.update - start, config.updates, f"reward {reward}{nothing}")

        loop = Loop(
            config,
            store=history.store,
            history=history,
            engine=engine,
            agent=self.agent,
            env=self.env,
            tasks=self.draw or (lambda k: self.train_tasks[order[k % len(order)]]),
            recipe=self.recipe,
            shown=self._shown,
            players=players,
            seed=self.seed,
            start=start,
            on_update=report,
            stop=stop,
            settled=self.settled,
        )
        self._loop = loop
        try:
            await loop.run()
            await self.settled()
        finally:
            self._loop = None
            await engine.close()
        return loop

    def note_evaluation(self, update: int, found: Evaluations) -> None:
        """Write a line of metrics: mean reward and pass@k of each evaluation. update: updates of the loop so far."""
        line: dict[str, Any] = {"phase": "evaluation", "update": update, "updates": self.warm.updates + update}
        for name, part in found.items():
            line[name] = part.mean
            line |= {f"{name}/{path}": mean for path, mean in (part.agents or {}).items()}
            line |= {f"{name}/pass@{k}": share and share["value"] for k, share in part.pass_at.items()}
        self.run.metrics(line)

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the trained agents with `loop.by_agent`, which gives each its own reward; empty without it."""
        others = (path for name in self.team.policies for path in self.team.players[name].agents)
        return (*(self.loop.agents or ()), *others) if self.loop.by_agent else ()

    async def evaluate(self, engine: Engine, when: str) -> Evaluations:
        """Run every evaluation on the held-out tasks with that engine. when: part of the name of their splits."""
        found: Evaluations = {}
        phase = f"evaluating on held-out tasks, {when}"
        done, earned = 0, dict[str, list[float]]()

        def count(tape: Tape) -> None:
            nonlocal done
            done += 1
            for path, reward in rewards_of(tape, self.trained).items():
                earned.setdefault(path, []).extend(() if reward is None else (reward,))
            self.progress(phase, done, len(self.held_out) * len(self.evaluations) * self.attempts, "")

        for name, sampling in self.evaluations.items():
            earned.clear()
            with self.run.timed("evaluation"):
                result = await evaluate(
                    self.agent,
                    self.env,
                    self.held_out,
                    engine=engine,
                    sampling=sampling,
                    seed=self.seed,
                    split=f"eval-{when}-{name}",
                    limits=self.loop.limits,
                    journal=self.run.store.writer,
                    concurrent=self.concurrent,
                    on_tape=count,
                    attempts=self.attempts,
                    k=self.k,
                    success=self.success,
                )
            scores = result.scores.model_dump(mode="json", include={"reward", "pass_at"})
            found[name] = HeldOut(
                mean=result.mean,
                error=result.error,
                n=result.scored,
                metrics=result.metrics,
                agents={path: sum(own) / len(own) if own else None for path, own in earned.items()} or None,
                **scores,
            )
        return found

    def token_counts(self) -> dict[str, int]:
        """The accounting of tokens, as `--json` prints it."""
        books = self.run.results.books
        assert books is not None
        return {
            "sampled": books.sampled,
            **books.tokens,
            "authored": books.authored,
            "authored_trained": books.authored_trained,
            "applied": books.applied,
        }
