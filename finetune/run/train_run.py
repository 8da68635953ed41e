"""`train`: the asynchronous loop on any agent, environment, tasks and model, in one run directory.

If a warm start on another run's tapes is configured, it comes first. Then rollouts and updates run at the same time,
with evaluations on held-out tasks before, during and after the loop. A run that was killed can be resumed: recorded
updates are applied again from the tapes, and recorded rollouts are used. A finished run continues if `loop.updates` is
raised.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import Field, JsonValue

from ...agents.engines.engine import EngineStopped
from ...agents.engines.team_engine import refuse_pictures
from ...agents.setup.profiles import fit_critic
from ...agents.setup.setup import AgentSource, DatasetConfig, EnvSource, LoadedSetup, TasksSource, load_tasks, shown_by
from ...agents.setup.team_config import check_together
from ...envs.curriculum import Curriculum, Rate, pass_rates, pools
from ...envs.taskset import BadTasks, Taskset, overlap
from ...tapes import Task
from ...tapes.audit.advice import advice
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.common.text import logger
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.store.lease import check_free
from ...tapes.store.run_directory import METRICS, Results, RunDir, open_run, read_metrics
from ...tapes.store.store import Store
from ...tapes.value import Value

try:
    import torch

    from ...agents.engines.embedded.embedded_engine import DEFAULT_CAPACITY
    from ...agents.engines.embedded.pretrained import weights_digest
    from ...tapes.common.stats import mean_of
    from ..interchange.corpus import bring_in_corpus, read_corpus
    from ..interchange.imported import Conversation
    from ..loop.history import History
    from ..loop.loop import check_recipe
    from ..loop.loop_config import CriticConfig
    from ..recipes import Recipe, get_recipe
    from ..trainer.distributed import Processes, launched
    from ..trainer.ranks import Ranks
    from .longer import UPDATES, lengthening
    from .phases import Phases
    from .players import NO_WARM_START, Team
    from .policy import check_begun, check_custom, load_policy
    from .run_report import REPORT, Reporter, reporting
    from .trackers import check_trackers, tracking
    from .train_config import CurriculumConfig, EvaluationConfig, TrainConfig
    from .training import Scene, Training
    from .warm_start import bring_in, choose
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "train", "training") from error


log = logger("train")


class PlayerSummary(Value):
    """The result of a player, which is another model in the episodes."""

    agents: tuple[str, ...]
    lineage: str | None
    """The lineage of the player's weights, or None for a frozen player."""
    updates: int
    model: str | None
    """The folder with the model, or None if the engine has no folder."""


class TrainSummary(Value):
    """The results of a training run."""

    run: str
    lineage: str
    recipe: str
    updates: int
    """Number of updates that the loop made. Updates of the warm start don't count."""
    reward: dict[str, float | None]
    """Mean reward in the `first` five and the `last` five updates of the loop."""
    agents: dict[str, dict[str, float | None]]
    """Path -> the same means, for each agent that has its own reward (`loop.by_agent`)."""
    players: dict[str, PlayerSummary]
    held_out: dict[str, Any]
    """`before`, `after` and, if configured, `greedy_before` and `greedy_after` are mean rewards over `n` scored
    episodes. They are None if there was no evaluation. `after_change` is the difference, paired by task, with its
    interval. `every` maps updates to mean rewards."""
    seconds: dict[str, float]
    tokens: dict[str, int]
    episodes: int
    books_close: bool
    model: str
    """The folder with the trained model, in Hugging Face format."""
    report: str
    """The HTML file that shows these results."""
    compared: dict[str, str] = Field(default={})
    """`reference` and `teacher` -> name and digest of the model, if the recipe uses such a model."""
    advice: tuple[str, ...] = ()
    """Suggestions of where to look if training doesn't work. Each suggestion is one sentence."""


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    agent: AgentSource | None = None,
    env: EnvSource | None = None,
    tasks: TasksSource | None = None,
    setup: LoadedSetup | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrainSummary:
    """Train in `out`, or continue the run there with `resume`. Raises UsageError if there is a run and `resume` is
    false.

    `agent`, `env` and `tasks` are objects to use if the configuration doesn't name them. `setup` is the result of
    `config.checked()` and `resolve`, if the caller has it. Raises UsageError, before anything is written, if the
    configuration names something that doesn't exist. In a group of processes (`accelerate launch`, `torchrun`), rank 0
    leads the run, and the other ranks only compute their share of each update. Every rank returns the summary. `train`
    also works inside a running event loop.
    """
    if setup is None:
        config, setup = config.checked(resume).resolve(agent=agent, env=env, tasks=tasks)
    torch.set_num_threads(config.threads)
    with setup, launched(shard=config.processes.shard, timeout=config.processes.timeout) as ranks:
        if not ranks.rank:
            check_free(out)  # before a model is loaded
        run = TrainingRun(config, setup, Path(out).absolute(), progress, ranks)
        if ranks.rank:
            return cast(TrainSummary, run.processes.follow())
        with run.processes.leading():
            summary = run.lead(resume)
        run.processes.finish(summary)
        return summary


class TrainingRun:
    """One run of `train`. Everything that the configuration names is loaded before the run directory is made. So if
    something can't be loaded, no directory is left behind."""

    directory: RunDir
    """The run directory. `lead` sets it."""
    training: Training
    """The training in the run directory. `lead` sets it."""
    advice: tuple[str, ...] = ()

    def __init__(self, config: TrainConfig, setup: LoadedSetup, out: Path, progress: Progress, ranks: Ranks) -> None:
        self.config, self.out, self.progress = config, out, progress
        self.title = f"Training {setup.agent.name}"
        train_tasks, held_out = _split_tasks(setup.tasks, config.evaluation, config.dataset)
        shows = setup.shows or shown_by(held_out)
        self.scene = Scene(setup.agent, setup.env, train_tasks, held_out, shows=shows)
        recipe = get_recipe(config.loop.recipe, config.loop.changes, run=None if ranks.rank else out)
        self.recipe = cast(Recipe, ranks.broadcast(recipe))
        if self.recipe.needs_value and "critic" not in config.loop.model_fields_set:
            # Only now is it known whether a recipe that the user wrote needs values.
            loop = config.loop.model_copy(update={"critic": CriticConfig()})
            self.config = config = fit_critic(config.model_copy(update={"loop": loop}))
        check_recipe(config.loop, self.recipe, None if config.warm or config.loop.corpus else 0)
        context = config.engine.capacity or (DEFAULT_CAPACITY if config.engine.kind == "embedded" else None)
        most = config.loop.longest_episode(context)
        for why in self.recipe.unfit(most) if most and not ranks.rank else ():
            at = f"an episode that is one conversation has at most {most} own tokens"
            log.warning(f"recipe {self.recipe.name!r}: {why}, and {at}; loop.changes sets another limit")
        check_together(config.engine, config.players)
        if ranks.size > 1 and any(not player.frozen for player in config.players.values()):
            raise UsageError(
                "several processes compute the updates of one policy only, and players that learn need updates too: "
                "start a single process, or set players.NAME.frozen"
            )
        self.policy = load_policy(config.engine, config.trainer, config.seed)
        if not self.policy.sees:
            refuse_pictures(str(config.engine.model), self.scene.shows)
        self.team = Team(config.players if not ranks.rank else {}, seed=config.seed)
        self.team.load_compared(config.loop, self.recipe)
        phases = Phases(self.policy, config.loop, self.recipe, config.warm or NO_WARM_START)
        self.processes = Processes(ranks, self.policy.model, phases.trainer)

    def lead(self, resume: bool) -> TrainSummary:
        """Do the whole run on rank 0. The other ranks only compute their share of each update."""
        check_trackers(self.config.trackers)
        run_async(self._check_custom_engines())
        places = (
            "trainer",
            *(f"players.{name}.{part}" for name in self.config.players for part in ("trainer", "engine")),
        )
        frozen = [f"players.{name}.engine" for name, player in self.config.players.items() if player.frozen]
        warm = self.config.warm.updates if self.config.warm else 0
        with open_run(
            self.out,
            self.config,
            resume=resume,
            begin=self._new_results,
            free=(*(f"{place}.{name}" for place in places for name in ("threads", "device")), "processes", "trackers"),
            changes={UPDATES: lengthening(self.config.loop, warm, self.config.players)},
            engines=frozen,
        ) as directory:
            self.directory = directory
            report = Reporter(
                directory,
                self.title,
                self.recipe.name,
                self.config.loop.updates,
                self.config.loop.checkpoint_every,
                tokenizer=self.policy.tokenizer,
            )
            with reporting(report):
                with directory.timed("total"), tracking(directory, self.config.trackers):
                    try:
                        self._work()
                    except EngineStopped as stopped:
                        made = self.training.history.updates
                        said = f"{made:,} updates are recorded"
                        raise stopped.at(said, frozen if directory.fruitless else ()) from stopped
                directory.store.check_counted()
                books = directory.results.books = directory.store.books()
                directory.results.books_close = books.closes
                directory.save()
                self.advice = advice(directory.store, "train", _loop_lines(self.out), directory.results.after)
        return self.summary()

    def _new_results(self) -> Results:
        """Return the results of a new run. Raises UsageError for tapes that can't be imitated and tasks that can't be
        drawn, before the run directory is made."""
        # A new lineage makes the version names of this run unique.
        results = Results(lineage=secrets.token_hex(4))
        self._tapes_to_imitate()
        if self.config.loop.corpus is not None:
            check_recipe(self.config.loop, self.recipe, len(self._texts(results)))
        self._draw(results)
        return results

    def _texts(self, results: Results) -> Sequence[Conversation]:
        """Return the documents in `loop.corpus`. Raises UsageError if the corpus has changed since the run began."""
        assert self.config.loop.corpus is not None
        documents, digest = read_corpus(self.config.loop.corpus, self.policy.renderer)
        if results.corpus_digest not in (None, digest):
            raise UsageError(
                "loop.corpus has changed since the run began, and the run was interrupted before it had copied it "
                "completely: restore the corpus, or choose another directory (`out=...`)"
            )
        results.corpus_digest = digest
        return documents

    async def _check_custom_engines(self) -> None:
        policies = [(self.config, False), *((player, player.frozen) for player in self.config.players.values())]
        for policy, frozen in policies:
            await check_custom(policy.engine, self.config.loop, frozen=frozen)

    def _work(self) -> None:
        """Restore the weights, then run the warm start and the loop with its evaluations."""
        results = self.directory.results
        check_begun(results, weights_digest(self.policy.model.state_dict()), self.out, str(self.config.engine.model))
        self.scene = replace(self.scene, draw=self._draw(results))
        self.training = Training(
            self.config,
            self.directory,
            self.policy,
            self.team,
            self.scene,
            processes=self.processes,
            progress=self.progress,
        )
        tapes = self._imitated()
        self.training.restore()
        self.training.imitate(tapes)
        if self.config.loop.corpus is not None:
            if results.corpus is None:
                results.corpus = bring_in_corpus(self._texts(results), self.directory.store)
            self.directory.save()
            self.training.shown = results.corpus
        run_async(self._improve())

    async def _improve(self) -> None:
        async with self.team.opened(self.directory):
            await self.training.improve()

    def _draw(self, results: Results) -> Callable[[int], Task] | None:
        """Return the function that draws the curriculum's tasks, by the pass rates at the start of the run. Return None
        if there is no curriculum."""
        config, tasks = self.config.curriculum, self.scene.train_tasks
        if config is None:
            return None
        if not results.task_rates:
            results.task_rates = _rates_of(config, tasks)
        return _drawn(config, tasks, results.task_rates, self.config.seed)

    def _tapes_to_imitate(self) -> Sequence[str]:
        """Return the ids of the tapes in the other run that the warm start imitates, or () if there is no warm start.
        Raises UsageError if there are too few tapes."""
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

    def _imitated(self) -> Sequence[str]:
        """Return the tapes that the warm start imitates. The first call copies them into this run."""
        warm, results = self.config.warm, self.directory.results
        if warm is not None and results.imitated is None:
            tapes = self._tapes_to_imitate()
            results.imitated = bring_in(warm.tapes, tapes, self.directory.store, self.policy.renderer)
            self.directory.save()
        return results.imitated or ()

    def summary(self) -> TrainSummary:
        """Return the results of the finished run."""
        results, history = self.directory.results, self.training.history
        assert results.books is not None
        lines = _loop_lines(self.out)
        return TrainSummary(
            run=str(self.out),
            lineage=results.lineage,
            recipe=self.recipe.name,
            updates=history.updates - self.training.warm.updates,
            reward=_first_and_last(lines, "reward"),
            agents={path: _first_and_last(lines, f"reward/agent/{path}") for path in self.training.trained},
            players={name: self._player(name) for name in self.config.players},
            held_out=_held_out(results),
            seconds=results.seconds,
            tokens=self.training.token_counts(),
            episodes=results.books.begun,
            books_close=results.books.closes,
            model=_model(history),
            report=str(self.out / REPORT),
            advice=self.advice,
            compared={name: str(other) for name, other in (history.trainer.others if history.trainer else {}).items()},
        )

    def _player(self, name: str) -> PlayerSummary:
        player, history = self.config.players[name], self.team.histories.get(name)
        if history is None:
            folder = getattr(player.engine, "model", None)
            return PlayerSummary(agents=player.agents, lineage=None, updates=0, model=folder)
        return PlayerSummary(
            agents=player.agents, lineage=history.lineage, updates=history.updates, model=_model(history)
        )


def _split_tasks(
    tasks: Taskset, config: EvaluationConfig, dataset: DatasetConfig
) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return the tasks to train on and the held-out tasks. No task is in both. `dataset` has the settings for the tasks
    to train on. Its columns also apply to held-out tasks that have no columns or row function configured."""
    if config.tasks is not None:
        columns = config.dataset.columns or ({} if config.task_row else dataset.columns)
        shared = config.dataset.model_copy(update={"columns": columns})
        held_out = load_tasks(config.tasks, config.task_row, dataset=shared)
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


def _rates_of(config: CurriculumConfig, tasks: Sequence[Task]) -> dict[str, tuple[int, int]]:
    """Return task hash -> (passed, tried): the numbers of attempts at each of these tasks in the run `config.tapes`.
    Raises UsageError if that run has no scored attempt at any of them."""
    with Store.open(config.tapes) as store:
        found = pass_rates(store.tapes(closed=True), success=config.success)
    rates = {task.hash: (found[task.hash].passed, found[task.hash].tried) for task in tasks if task.hash in found}
    if not rates:
        raise UsageError(
            f"curriculum.tapes: {config.tapes} has no scored attempt at any of the {len(tasks)} tasks to "
            "train on, so their difficulty is unknown: record some with `tapereel run`"
        )
    return rates


def _drawn(
    config: CurriculumConfig, tasks: Sequence[Task], rates: Mapping[str, tuple[int, int]], seed: int
) -> Callable[[int], Task]:
    """Return a function that maps k to the task for group k. Raises UsageError if weights or bounds exclude all
    tasks."""
    measured = {name: Rate(passed, tried) for name, (passed, tried) in rates.items()}
    try:
        parts = pools(Taskset(tasks), measured, easy=config.easy, hard=config.hard)
        return Curriculum(parts, config.weights, seed=seed)
    except BadTasks as error:
        raise UsageError(f"curriculum: {error}") from error


def _held_out(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for when, part in (("before", results.before), ("after", results.after)):
        for name, key in (("sampled", when), ("greedy", f"greedy_{when}")):
            if name == "sampled" or (part and name in part):
                found[key] = part[name].mean if part else None
                if when == "after" and part:
                    found[f"{key}_change"] = part[name].change
    last = results.after or results.before
    every = {k: part["sampled"].mean for k, part in results.evaluations.items()}
    return {**found, "n": last["sampled"].n if last else 0, "every": every}


def _loop_lines(run: Path) -> list[dict[str, JsonValue]]:
    return [line for line in read_metrics(run / METRICS) if line.get("phase") == "rl"]


def _model(history: History) -> str:
    return str(history.directory / f"update-{history.updates:06d}" / "hf")


def _first_and_last(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    values = [line[key] for line in lines if line.get(key) is not None]
    return {"first": mean_of(values[:5]), "last": mean_of(values[-5:])}
