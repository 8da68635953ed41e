"""Loads everything that a training run's configuration names: models, recipe, agent, environment and tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ...agents import Agent
from ...agents.engines.embedded.embedded_engine import DEFAULT_CAPACITY
from ...agents.engines.team_engine import refuse_pictures
from ...agents.setup.engine_config import warn_of_faults
from ...agents.setup.setup import DatasetConfig, LoadedSetup, load_tasks, shown_by
from ...agents.setup.team_config import check_outermost, check_together
from ...envs.curriculum import Curriculum, Rate, pass_rates, pools
from ...envs.environment import EnvironmentFactory
from ...envs.taskset import BadTasks, Taskset, overlap
from ...tapes import Task
from ...tapes.common.text import logger
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import Results
from ...tapes.store.store import Store
from ..interchange.corpus import read_corpus
from ..interchange.imported import Conversation
from ..loop.loop import check_recipe
from ..loop.loop_config import NO_WARM_START, CriticConfig
from ..loop.policy import Policy
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.options import fit_critic
from ..trainer.ranks import Ranks
from ..trainer.sequence_parallel import check_model
from .load_policy import check_custom, load_policy
from .player_config import TrainedConfig
from .players import OWN
from .train_config import CurriculumConfig, EvaluationConfig, TrainConfig
from .warm_start import choose

log = logger("train")


@dataclass(frozen=True)
class Scene:
    """The agent, the environment and the tasks."""

    agent: Agent
    env: EnvironmentFactory
    train_tasks: Sequence[Task]
    held_out: Sequence[Task]
    shows: str | None = None
    """The same as `LoadedSetup.shows`."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same as `LoadedSetup.code`."""


def longest_episode(config: TrainConfig) -> int | None:
    """Return the largest number of tokens that the policy can sample in an episode that is one conversation, or None
    without a limit."""
    context = config.engine.capacity or (DEFAULT_CAPACITY if config.engine.kind == "embedded" else None)
    return config.loop.longest_episode(context)


@dataclass(frozen=True)
class LoadedRun:
    """Everything that a run's configuration names, after loading. It is loaded before the run directory is made, so a
    failure leaves no directory behind."""

    config: TrainConfig
    recipe: Recipe
    """The recipe for the loop's updates."""
    policies: Mapping[str, Policy]
    """The policies that are trained, by the name of their player, with their base weights, which updates change in
    place. The first is the run's own (`OWN`)."""
    scene: Scene | None = None
    """None if nothing is sampled, only recorded updates applied again."""

    @property
    def policy(self) -> Policy:
        """The run's own policy."""
        return self.policies[OWN]

    @classmethod
    def of(cls, config: TrainConfig, setup: LoadedSetup, out: Path, ranks: Ranks) -> LoadedRun:
        """Load the models and the recipe for a run in `out`. `setup` has the agent, the environment and the tasks.
        Raises UsageError if any of them can't be used together."""
        train_tasks, held_out = _split_tasks(setup.tasks, config.evaluation, config.dataset, setup.held_out)
        if config.evaluation.tasks is not None:
            setup.check_tasks(held_out)
        shows = setup.shows or shown_by(held_out)
        scene = Scene(setup.agent, setup.env, train_tasks, held_out, shows=shows, code=setup.code)
        most = longest_episode(config)
        run = None if ranks.rank else out
        recipe = get_recipe(config.loop.recipe, config.loop.changes, run=run, longest=most)
        recipe = cast(Recipe, ranks.broadcast(recipe))
        if recipe.needs_value and "critic" not in config.loop.model_fields_set:
            # Only now is it known whether a recipe that the user wrote needs values.
            loop = config.loop.model_copy(update={"critic": CriticConfig()})
            config = fit_critic(config.model_copy(update={"loop": loop}))
        check_recipe(config.loop, recipe, None if config.warm or config.loop.corpus else 0)
        if setup.unscored is not None and recipe.surrogate.advantages:
            raise UsageError(
                f"nothing scores the episodes of {setup.unscored}, so recipe {recipe.name!r} can't learn from them: "
                "define `answered`, which returns tr.Outcome(reward=..., terminated=True), or set `rewards`"
            )
        for why in recipe.unfit(most) if most and not ranks.rank else ():
            at = f"an episode that is one conversation has at most {most} own tokens"
            log.warning(f"recipe {recipe.name!r}: {why}, and {at}; loop.changes sets another limit")
        check_outermost(config.players, setup.agent.path)
        check_together(config.engine, config.players)
        if ranks.size > 1 and any(not player.frozen for player in config.players.values()):
            raise UsageError(
                "several processes compute the updates of one policy only, and players that learn need updates too: "
                "start a single process, or set players.NAME.frozen"
            )
        made = cls._with_models(config, recipe, ranks, scene)
        if not ranks.rank:
            warn_of_faults(made.policy.renderer, tools=setup.tools)
        if not made.policy.sees:
            refuse_pictures(str(config.engine.model), scene.shows)
        return made

    @classmethod
    def recorded(cls, config: TrainConfig, run: Path, ranks: Ranks | None = None) -> LoadedRun:
        """Load the models and the recipe of the run in `run`, whose recorded updates are to be applied again, by
        default by this process alone."""
        recipe = get_recipe(config.loop.recipe, config.loop.changes, run=run)
        check_recipe(config.loop, recipe)
        return cls._with_models(config, recipe, ranks or Ranks())

    @classmethod
    def _with_models(cls, config: TrainConfig, recipe: Recipe, ranks: Ranks, scene: Scene | None = None) -> LoadedRun:
        if ranks.sequence is not None:
            names = (config.engine.model, config.loop.reference and config.loop.reference.model, config.loop.teacher)
            for name in names:
                if isinstance(name, str) and name not in ("base", "warm", "none"):
                    check_model(name, ranks.sequence.size)
        loop = config.loop
        players = {
            name: load_policy(
                cast(TrainedConfig, player.engine), player.trainer, player.loop_of(loop), recipe, seed=config.seed
            )
            for name, player in config.players.items()
            if not player.frozen and not ranks.rank
        }
        policy = load_policy(
            config.engine,
            config.trainer,
            loop,
            recipe,
            seed=config.seed,
            warm=config.warm or NO_WARM_START,
            ranks=ranks,
        )
        if ranks.sharded and not ranks.rank and scene is not None and config.engine.kind == "embedded":
            log.warning(
                "rank 0 also holds the whole model, because the embedded engine samples with it; with servers "
                "(`engine.kind=vllm` or `sglang`), no rank does"
            )
        return cls(config, recipe, {OWN: policy, **players}, scene)

    def tapes_to_imitate(self) -> Sequence[str]:
        """Return the ids of the tapes that the warm start imitates. They are in another run. Without a warm start,
        return (). Raises UsageError if there are too few tapes."""
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

    def documents(self, results: Results) -> Sequence[Conversation]:
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

    def draw(self, results: Results) -> Callable[[int], Task] | None:
        """Return a function that draws tasks for the curriculum, or None without a curriculum. It uses the pass rates
        at the start of the run."""
        config = self.config.curriculum
        if config is None or self.scene is None:
            return None
        tasks = self.scene.train_tasks
        if not results.task_rates:
            results.task_rates = _rates_of(config, tasks)
        return _drawn(config, tasks, results.task_rates, self.config.seed)

    async def check_custom_engines(self) -> None:
        """Check that the custom engines can be made and used."""
        policies = [(self.config, False), *((player, player.frozen) for player in self.config.players.values())]
        for policy, frozen in policies:
            await check_custom(policy.engine, self.config.loop, frozen=frozen)


def _split_tasks(
    tasks: Taskset, config: EvaluationConfig, dataset: DatasetConfig, held_out: Taskset | None = None
) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return the tasks to train on and the held-out tasks. No task is in both. `dataset` has the settings for the tasks
    to train on. Its columns also apply to held-out tasks that have no columns or row function configured."""
    if config.tasks is not None:
        if held_out is None:
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
    """Return the numbers of attempts (passed, tried) at each task, by task hash. The attempts are in the run
    `config.tapes`. Raises UsageError if this run has no scored attempt at any of the tasks."""
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
