"""Training: what every training run does in its run directory, whoever chose the agent, the tasks and the model.

It holds the parts together: a history of updates in the store, engines with its weights, the loop, and evaluations on
held-out tasks. Each method finds out from the directory what is done already. In what order they are called, and what
is imitated, is the business of the caller (`demo.py`, `train.py`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...agents import Agent, Engine
from ...agents.episode.seeds import derive_seed
from ...envs.environment import Environment
from ...tapes import Sampling, Tape, Task
from ...tapes.common.progress import Progress, silent
from ...tapes.records import Use
from ...tapes.store.run_directory import METRICS, RunDir, drop_metrics, read_metrics
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

MeasuredBy = Literal["own", "loop"]
"""Which engine samples on held-out tasks: one with a copy of the weights, or the loop's."""


@asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[Engine]:
    """The engine, closed behind it."""
    try:
        yield engine
    finally:
        await engine.close()


def new_results() -> dict[str, Any]:
    """What a run's results begin with: a lineage that no other run has."""
    return {"lineage": secrets.token_hex(4)}


@dataclass
class Training:
    """One run directory at work. Torch's threads are the caller's choice."""

    run: RunDir
    policy: Policy
    """With the base weights; updates change them in place."""
    agent: Agent
    env: Callable[[], Environment[Any]]
    train_tasks: Sequence[Task]
    held_out: Sequence[Task]
    loop: LoopConfig
    recipe: Recipe
    """Of the loop's updates."""
    warm: WarmStartConfig = NO_WARM_START
    """Imitation before the loop."""
    evaluations: Mapping[str, Sampling] = field(default_factory=dict)
    """name -> how an evaluation of that name samples."""
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
    shown: Sequence[str] = ()
    """Tapes in the run that the loop may imitate beside its rollouts."""
    processes: Processes | None = None
    """The processes that compute its updates; None: this one alone."""
    draw: Callable[[int], Task] | None = None
    """The task of the loop's group k; None: each of `train_tasks` in turn, in an order that follows from the seed."""
    team: Team = field(default_factory=Team)
    """The other models in its episodes."""
    measured_by: MeasuredBy = "own"
    at_work: Loop | None = field(default=None, init=False)
    """The loop, while it runs."""
    measurement: asyncio.Task[None] | None = field(default=None, init=False)
    """By the loop's engine: its weights stay as they are until this is done."""

    def __post_init__(self) -> None:
        check_recipe(self.loop, self.recipe)
        if self.processes is None:
            phases = Phases(self.model, self.loop, self.recipe, self.warm)
            self.processes = Processes(Ranks(), self.model, phases.trainer)
        self.history = self.history_in(self.run.store, self.run.results["lineage"], self.run.path)
        self.team.begin(self.run, self.loop, self.recipe)

    @property
    def model(self) -> Any:
        """Of the policy."""
        return self.policy.model

    @property
    def tokenizer(self) -> Any:
        """Of the policy."""
        return self.policy.tokenizer

    @property
    def renderer(self) -> Any:
        """Of the policy."""
        return self.policy.renderer

    def history_in(self, store: Store, lineage: str, out: Path) -> History:
        """The history of `lineage` in `store`, checkpointed under `out`."""
        assert self.processes is not None
        write_recipes(out, recipes_by_phase(self.recipe))
        return self.policy.history(store, lineage, out / "checkpoints", self.processes.trainer, self.loop)

    def engine(self, history: History) -> Engine:
        """An engine with a copy of the weights as they are now, those of the team included."""
        return self.team.measuring(self.policy.copy(history.version))

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[Engine]:
        """An engine with the weights as they are now, by which they are measured: the loop's, or one for this alone."""
        if self.measured_by == "loop" and self.at_work is not None:
            yield self.at_work.engine
            return
        async with closing(self.engine(self.history) if self.measured_by == "own" else await self._sampling()) as one:
            yield one

    async def _sampling(self) -> Engine:
        """As the loop samples, outside of it."""
        engine = await self.policy.sampler(self.history.version)
        try:
            return (await self.team.playing(engine))[0]
        except BaseException:
            await engine.close()
            raise

    async def settled(self) -> None:
        """Once no measurement needs the weights that the loop's engine has."""
        if self.measurement is not None:
            await self.measurement

    def restore(self) -> None:
        """Bring the weights to the last recorded update, and metrics.jsonl to one line for each."""
        lines = read_metrics(self.run.path / METRICS)
        told = {line["update"] for line in lines if line.get("phase") != "evaluation"}

        def report(stats: UpdateStats, uses: Sequence[Use]) -> None:
            if (update := uses[0].update + 1) not in told:
                self.run.metrics({**self._line(stats, uses), **others.get(update, {})})

        with self.run.timed("restore"):
            again, others = self.team.restore(self.progress)
            again += self.history.restore(
                lambda done, of: self.progress("re-applying recorded updates", done, of, ""), report=report
            )
        # A line may be on the disk whose update is not: that update is made anew, and tells again.
        drop_metrics(
            self.run.path / METRICS,
            lambda line: line.get("phase") != "evaluation" and line["update"] > self.history.updates,
        )
        if self.history.updates == 0 and self.history.version not in self.history.published:
            # Pins the base weights: what a later reader re-derives starts from these.
            self.history.store.append_layer(self.history.publish_record("base")[1])
        self.note_scores()
        if again:
            self.run.results["reapplied"] = self.run.results.get("reapplied", 0) + again
            self.run.save()

    def note_scores(self) -> None:
        """Tell the history how well its versions did on held-out tasks, so that the best one's checkpoint stays."""
        for update, found in self.run.results.get("evaluations", {}).items():
            mean = found.get("sampled", {}).get("mean")
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
        """The warm start's updates that are not done yet, on these tapes: the same ones, in the same order, at every
        call."""
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
        """Evaluate ahead of the loop; where the loop has begun without it, the result is None."""
        results = self.run.results
        if self.history.updates == self.warm.updates and "before" not in results:
            async with self.measuring() as engine:
                results["before"] = await self.evaluate(engine, "before")
            self.note_evaluation(0, results["before"])
            self.run.save()
        results.setdefault("before", None)

    @property
    def end(self) -> str:
        """What the evaluation at the end is called in the splits of its tapes, `eval-{end}-{how}`."""
        return end_name(self.run.results, self.loop.updates)

    async def after(self) -> None:
        """Evaluate the weights at the end, once."""
        if "after" not in self.run.results:
            async with self.measuring() as engine:
                found = self.run.results["after"] = await self.evaluate(engine, self.end)
            self.note_evaluation(self.history.updates - self.warm.updates, found)
        self.run.save()

    async def improve(self, on_update: Callable[[UpdateReport], None] = lambda update: None) -> None:
        """The loop's updates that are not done yet. `on_update` is called between two updates, in the event loop."""
        start, results = self.warm.updates, self.run.results
        if self.history.updates >= start + self.loop.updates:
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
        results["idle_share"] = loop.idle_share
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
        """The loop by `config` on `history` and in its store, which began at update `start`; `stop` as in `Loop`."""
        engine = await self.policy.sampler(history.version)
        try:
            engine, players = await self.team.playing(engine)
        except BaseException:
            await engine.close()
            raise
        _, publish = history.publish_record("start")
        if publish.version not in history.published:
            history.store.append_layer(publish)
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
            shown=self.shown,
            players=players,
            seed=self.seed,
            start=start,
            on_update=report,
            stop=stop,
            settled=self.settled,
        )
        self.at_work = loop
        try:
            await loop.run()
            await self.settled()
        finally:
            self.at_work = None
            await engine.close()
        return loop

    def note_evaluation(self, update: int, found: Mapping[str, Any]) -> None:
        """A line of metrics: mean reward and pass@k of each evaluation after so many updates of the loop."""
        line: dict[str, Any] = {"phase": "evaluation", "update": update, "updates": self.warm.updates + update}
        for name, part in found.items():
            line[name] = part["mean"]
            line |= {f"{name}/{path}": mean for path, mean in part.get("agents", {}).items()}
            line |= {f"{name}/pass@{k}": share and share["value"] for k, share in part["pass_at"].items()}
        self.run.metrics(line)

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the agents that are trained, each by its own reward; empty where an episode is one whole."""
        others = (path for name in self.team.policies for path in self.team.players[name].agents)
        return (*(self.loop.agents or ()), *others) if self.loop.by_agent else ()

    async def evaluate(self, engine: Engine, when: str) -> dict[str, Any]:
        """Every evaluation on the held-out tasks, by that engine."""
        found: dict[str, Any] = {}
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
            found[name] = {
                "mean": result.mean,
                "error": result.error,
                "n": result.scored,
                "metrics": result.metrics,
                **scores,
            }
            if earned:
                found[name]["agents"] = {path: sum(own) / len(own) if own else None for path, own in earned.items()}
        return found

    def token_counts(self) -> dict[str, int]:
        """The token books of `results["books"]`, as `--json` prints them."""
        books = self.run.results["books"]
        return {
            "sampled": books["sampled"],
            **books["tokens"],
            "authored": books["authored"],
            "authored_trained": books["authored_trained"],
            "applied": books["applied"],
        }
