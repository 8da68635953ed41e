"""`train`: the asynchronous loop on any agent, environment, tasks and model, in one run directory.

A warm start on another run's tapes comes first where it is configured. Then rollouts and updates run side by side, with
evaluations on held-out tasks before, between and after. A run that was killed resumes: recorded updates are applied
again from the tapes, and recorded rollouts are used. A finished run continues where `loop.updates` is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...agents import Engine
from ...agents.setup.setup import AgentSource, EnvSource, LoadedSetup, TasksSource, load_tasks
from ...agents.setup.team_config import check_together
from ...envs.taskset import Taskset, overlap
from ...tapes import Task
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.store.run_directory import CONFIG, METRICS, Results, RunDir, open_run, read_metrics
from ...tapes.value import Value
from ...tapes.view.curves import reward_plot

try:
    import torch

    from ...agents.engines.embedded.pretrained import weights_digest
    from ..history.history import History
    from ..loop.loop import UpdateReport, check_recipe
    from ..loop.warm_start import bring_in, choose
    from ..policies.phases import Phases
    from ..policies.policy import Policy, check_begun, check_custom, load_policy
    from ..policies.policy_team import NO_WARM_START, Team
    from ..recipes import get_recipe
    from ..report.plots import plot_curve
    from ..report.run_report import Reporter, reporting
    from ..report.trackers import check_trackers, tracking
    from ..trainer.distributed import Processes, launched
    from ..trainer.ranks import Ranks
    from .drawing import drawn, rates_of
    from .longer import UPDATES, lengthening
    from .train_config import EvaluationConfig, TrainConfig
    from .training import Training, closing, new_results
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "train", "training") from error


class PlayerSummary(Value):
    """The result of another model in the episodes."""

    agents: tuple[str, ...]
    lineage: str | None
    """None for a frozen model."""
    updates: int
    model: str | None
    """The folder with the model; None where the engine has no folder."""


class TrainSummary(Value):
    """The results of a training run."""

    run: str
    lineage: str
    recipe: str
    updates: int
    """Updates of the loop, without those of the warm start."""
    reward: dict[str, float | None]
    """Mean reward of the loop's `first` and `last` five updates."""
    agents: dict[str, dict[str, float | None]]
    """The same for each agent with its own reward (`loop.by_agent`), by path."""
    players: dict[str, PlayerSummary]
    held_out: dict[str, Any]
    """`before`, `after` and, with `greedy`, `greedy_before` and `greedy_after`: mean reward on `n` tasks; `every`:
    {update: mean reward}. None without an evaluation."""
    seconds: dict[str, float]
    tokens: dict[str, int]
    episodes: int
    books_close: bool
    model: str
    """The folder with the trained model, in Hugging Face format."""
    report: str
    """A page with all of this, for a browser."""


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    agent: AgentSource | None = None,
    env: EnvSource | None = None,
    tasks: TasksSource | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrainSummary:
    """Train, or continue the run in `out`. RunExists where `out` holds a run and `resume` is false.

    `agent`, `env` and `tasks` are objects, where the configuration names none (`Setup.resolve`). Raises UsageError
    before anything is written where the configuration names what isn't there. Started as one of several processes
    (`accelerate launch`, `torchrun`), rank 0 does all of this and the other ranks compute shares of its updates; every
    rank returns the summary. Works inside a running event loop too.
    """
    config, setup = config.resolve(agent=agent, env=env, tasks=tasks)
    torch.set_num_threads(config.threads)
    with launched(shard=config.processes.shard, timeout=config.processes.timeout) as ranks:
        run = _Run(config, setup, Path(out), progress, ranks)
        if ranks.rank:
            return run.processes.follow()
        with run.processes.leading():
            summary = run.lead(resume)
        run.processes.finish(summary)
        return summary


def train_training(
    config: TrainConfig,
    directory: RunDir,
    policy: Policy | None = None,
    team: Team | None = None,
    *,
    agent: Any = None,
    env: Any = None,
    train_tasks: Sequence[Task] = (),
    held_out: Sequence[Task] = (),
    draw: Callable[[int], Task] | None = None,
    progress: Progress = silent,
    processes: Processes | None = None,
) -> Training:
    """The parts of a training run, with the base weights. Without agent, environment and tasks they can only apply
    recorded updates. policy, team: the configuration's models, where they are loaded already. draw: the curriculum."""
    evaluation = config.evaluation
    sampled = evaluation.sampling or config.loop.sampling
    every = {"sampled": sampled}
    if evaluation.greedy:
        every["greedy"] = sampled.model_copy(update={"temperature": 0.0, "first_temperature": None})
    return Training(
        directory,
        policy or load_policy(config.engine, config.trainer, config.seed),
        agent,
        env,
        train_tasks,
        held_out,
        config.loop,
        get_recipe(config.loop.recipe, config.loop.changes),
        config.warm or NO_WARM_START,
        evaluations=every if held_out else {},
        concurrent=evaluation.concurrency,
        attempts=evaluation.attempts,
        k=evaluation.k,
        success=evaluation.success,
        seed=config.seed,
        progress=progress,
        draw=draw,
        processes=processes,
        team=team or Team(config.players, seed=config.seed),
        measured_by=evaluation.engine or ("own" if config.engine.kind == "embedded" else "loop"),
    )


class _Run:
    """Everything that the configuration names, loaded before the run directory is made: what can't be loaded must leave
    no directory behind."""

    def __init__(self, config: TrainConfig, setup: LoadedSetup, out: Path, progress: Progress, ranks: Ranks) -> None:
        self.config, self.out, self.progress = config, out, progress
        self.setup = setup
        self.train_tasks, self.held_out = _split_tasks(self.setup.tasks, config.evaluation)
        self.recipe = get_recipe(config.loop.recipe, config.loop.changes)
        check_recipe(config.loop, self.recipe, None if config.warm is not None else 0)
        check_together(config.engine, config.players)
        if ranks.size > 1 and any(not player.frozen for player in config.players.values()):
            raise UsageError(
                "several processes compute the updates of one policy only, and players that learn need updates too: "
                "start a single process, or set players.NAME.frozen"
            )
        self.policy = load_policy(config.engine, config.trainer, config.seed)
        self.team = Team(config.players if not ranks.rank else {}, seed=config.seed)
        phases = Phases(self.policy.model, config.loop, self.recipe, config.warm or NO_WARM_START)
        self.processes = Processes(ranks, self.policy.model, phases.trainer)
        self.rates: dict[str, tuple[int, int]] | None = None

    def lead(self, resume: bool) -> TrainSummary:
        """The whole run, on rank 0; other ranks only compute shares of its updates."""
        if not (self.out / CONFIG).exists():
            self.tapes_to_imitate()
            if self.config.curriculum is not None:
                self.rates = rates_of(self.config.curriculum, self.train_tasks)
                drawn(self.config.curriculum, self.train_tasks, self.rates, self.config.seed)
        check_trackers(self.config.trackers)
        run_async(self._check_custom_engines())
        places = (
            "trainer",
            *(f"players.{name}.{part}" for name in self.config.players for part in ("trainer", "engine")),
        )
        free = (*(f"{place}.{name}" for place in places for name in ("threads", "device")), "processes", "trackers")
        changes = {
            UPDATES: lengthening(
                self.config.loop, self.config.warm.updates if self.config.warm else 0, self.config.players
            )
        }
        with open_run(self.out, self.config, resume=resume, begin=new_results, free=free, changes=changes) as directory:
            self.report = Reporter(
                directory,
                f"Training {self.setup.agent.name}",
                self.recipe.name,
                self.config.loop.updates,
                self.config.loop.checkpoint_every,
                tokenizer=self.policy.tokenizer,
            )
            with reporting(self.report):
                with directory.timed("total"), tracking(directory, self.config.trackers):
                    self.work(directory)
                books = directory.results.books = directory.store.books()
                directory.results.books_close = books.closes
                directory.save()
                self.draw(directory)
        return self.summary(directory)

    async def _check_custom_engines(self) -> None:
        await check_custom(self.config.engine, self.config.loop)
        for player in self.config.players.values():
            await check_custom(player.engine, self.config.loop, frozen=player.frozen)

    def work(self, directory: RunDir) -> None:
        """Restore, then the warm start, then the loop with its evaluations."""
        self._same_model(directory)
        self.training = training = train_training(
            self.config,
            directory,
            self.policy,
            self.team,
            agent=self.setup.agent,
            env=self.setup.env,
            train_tasks=self.train_tasks,
            held_out=self.held_out,
            progress=self.progress,
            draw=self._drawn(directory),
            processes=self.processes,
        )
        tapes = self._imitated(directory)
        training.restore()
        training.imitate(tapes, training.history.from_store)
        run_async(self._improve(directory))

    def _drawn(self, directory: RunDir) -> Callable[[int], Task] | None:
        """The curriculum's draw, by the rates that the run began with; None without a curriculum."""
        config = self.config.curriculum
        if config is None:
            return None
        if not directory.results.task_rates:
            directory.results.task_rates = self.rates or rates_of(config, self.train_tasks)
            directory.save()
        return drawn(config, self.train_tasks, directory.results.task_rates, self.config.seed)

    def _same_model(self, directory: RunDir) -> None:
        check_begun(
            directory.results,
            weights_digest(self.policy.model.state_dict()),
            directory.path,
            str(self.config.engine.model),
        )

    def tapes_to_imitate(self) -> Sequence[str]:
        """Ids of the tapes in the other run; none without a warm start."""
        warm = self.config.warm
        if warm is None:
            return ()
        tapes = choose(warm.tapes, self.policy.renderer, split=warm.split, min_reward=warm.min_reward)
        if len(tapes) < warm.batch:
            raise UsageError(
                f"{warm.tapes} has {len(tapes)} tapes to imitate, and warm.batch is {warm.batch}: record more, or "
                "lower warm.batch"
            )
        return tapes

    def _imitated(self, directory: RunDir) -> Sequence[str]:
        """Ids of the tapes in this run, which are copied at the first call."""
        warm = self.config.warm
        if warm is not None and directory.results.imitated is None:
            tapes = self.tapes_to_imitate()
            directory.results.imitated = bring_in(warm.tapes, tapes, directory.store, self.policy.renderer)
            directory.save()
        return directory.results.imitated or ()

    async def _improve(self, directory: RunDir) -> None:
        async with self.team.opened(directory):
            await self._improve_together()

    async def _improve_together(self) -> None:
        measured = _Evaluations(self.training, self.config.evaluation.every if self.held_out else None)
        if self.held_out:
            await self.training.before()
        try:
            await self.training.improve(measured.on_update)
        except BaseException:
            await measured.stop()
            raise
        await measured.finish()
        if self.held_out:
            await self.training.after()

    def draw(self, directory: RunDir) -> None:
        """Write reward.png."""
        plot = reward_plot(self.recipe.name, self.out / METRICS, directory.results, self.training.trained)
        plot_curve(self.out / "reward.png", plot.curves, levels=plot.levels, title=plot.title, ylabel=plot.ylabel)

    def summary(self, directory: RunDir) -> TrainSummary:
        results, history = directory.results, self.training.history
        assert results.books is not None
        lines = [line for line in read_metrics(self.out / METRICS) if line.get("phase") == "rl"]
        return TrainSummary(
            run=str(self.out),
            lineage=results.lineage,
            recipe=self.recipe.name,
            updates=history.updates - self.training.warm.updates,
            reward=_first_and_last(lines, "reward"),
            agents={path: _first_and_last(lines, f"reward/{path}") for path in self.training.trained},
            players={name: self._player(name) for name in self.config.players},
            held_out=_held_out(results),
            seconds=results.seconds,
            tokens=self.training.token_counts(),
            episodes=results.books.begun,
            books_close=results.books.closes,
            model=_model(history),
            report=str(self.report.path),
        )

    def _player(self, name: str) -> PlayerSummary:
        player, history = self.config.players[name], self.team.histories.get(name)
        if history is None:
            folder = getattr(player.engine, "model", None)
            return PlayerSummary(agents=player.agents, lineage=None, updates=0, model=folder)
        return PlayerSummary(
            agents=player.agents, lineage=history.lineage, updates=history.updates, model=_model(history)
        )


class _Evaluations:
    """Evaluations beside the loop, one at a time.

    Each has an engine of its own with a copy of the present weights, so training continues meanwhile; or the loop's
    engine, which gets its next weights after the evaluation. An evaluation that a crash cut off is not repeated: its
    weights are gone.
    """

    def __init__(self, training: Training, every: int | None) -> None:
        self.training, self.every = training, every
        self.last: asyncio.Task[None] | None = None

    def on_update(self, report: UpdateReport) -> None:
        done = report.update - self.training.warm.updates
        if self.every is not None and done % self.every == 0 and done < self.training.loop.updates:
            shared = self.training.measured_by == "loop"
            engine = None if shared else self.training.engine(self.training.history)
            self.last = asyncio.create_task(self._measure(self.last, engine, done))
            self.training.keep_weights_for(self.last if shared else None)

    async def _measure(self, before: asyncio.Task[None] | None, own: Engine | None, update: int) -> None:
        # `own` was copied at the update, in the event loop; a copy that is made after this wait would be of later
        # weights.
        if before is not None:
            await before
        run = self.training.run
        async with closing(own) if own is not None else self.training.measuring() as engine:
            found = await self.training.evaluate(engine, f"update-{update:06d}")
        run.results.evaluations[str(update)] = found
        self.training.note_scores()
        self.training.note_evaluation(update, found)
        run.save()

    async def finish(self) -> None:
        """Wait for the last evaluation."""
        if self.last is not None:
            await self.last

    async def stop(self) -> None:
        """Cancel the present evaluation; its episodes are closed as cancelled."""
        if self.last is not None:
            self.last.cancel()
            await asyncio.gather(self.last, return_exceptions=True)


def _split_tasks(tasks: Taskset, config: EvaluationConfig) -> tuple[Sequence[Task], Sequence[Task]]:
    """(tasks to train on, held-out tasks), with no task in both."""
    if config.tasks is not None:
        held_out = load_tasks(config.tasks, config.task_row)
        common = overlap(tasks, held_out)
        if common:
            raise UsageError(
                f"{common} of the {len(held_out)} held-out tasks are tasks to train on too: hold out others"
            )
        train = tasks
    elif config.fraction:
        train, held_out = tasks.split(1 - config.fraction, config.fraction)
        if not len(train) or not len(held_out):
            raise UsageError(
                f"evaluation.fraction {config.fraction:g} leaves {len(train)} of {len(tasks)} tasks to "
                f"train on and {len(held_out)} to evaluate: give more tasks, another fraction, or 0 for no evaluation"
            )
    else:
        return list(tasks), []
    return list(train), list(held_out)[: config.limit]


def _held_out(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for when, part in (("before", results.before), ("after", results.after)):
        for name, key in (("sampled", when), ("greedy", f"greedy_{when}")):
            if name == "sampled" or (part and name in part):
                found[key] = part[name].mean if part else None
    last = results.after or results.before
    every = {k: part["sampled"].mean for k, part in results.evaluations.items()}
    return {**found, "n": last["sampled"].n if last else 0, "every": every}


def _model(history: History) -> str:
    return str(history.directory / f"update-{history.updates:06d}" / "hf")


def _first_and_last(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    values = [line[key] for line in lines if line.get(key) is not None]
    return {"first": _mean(values[:5]), "last": _mean(values[-5:])}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
