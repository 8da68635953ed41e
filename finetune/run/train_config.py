"""The settings of `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from ...agents.runs.runner import ScoresConfig, SuccessConfig
from ...agents.setup.engine_config import check_models
from ...agents.setup.profiles import fitted
from ...agents.setup.setup import Setup, TasksConfig
from ...agents.setup.team_config import threads_of
from ...envs.curriculum import EASY, HARD
from ...envs.taskset import TASK_FILES
from ...tapes import Sampling
from ...tapes.errors import UsageError
from ...tapes.store.store import Store
from ..loop.loop_config import SECOND, LoopConfig, ProcessesConfig, WarmStartConfig
from .player_config import (
    Players,
    TrainedEngine,
    TrainerConfig,
    check_engine,
    check_players_of,
)
from .trackers import TrackedConfig

MeasuredBy = Literal["own", "loop"]
"""The engine that samples held-out tasks: `own` is in this process and has a copy of the weights, `loop` is the
loop's."""


class EvaluationConfig(ScoresConfig, TasksConfig):
    """Held-out tasks, and when and how the policy is evaluated on them. An evaluation doesn't change training.

    If `tasks` are given, they replace `fraction`, and none of them may be a task to train on. `attempts` is the number
    of episodes for each held-out task.
    """

    fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the tasks that is held out, chosen by task hash. 0 disables held-out tasks and evaluation."""
    limit: int | None = Field(default=128, ge=1)
    """Largest number of held-out tasks in one evaluation. None uses all."""
    every: int | None = Field(default=20, ge=1)
    """Updates of the loop between two evaluations. None evaluates only before and after the loop."""
    sampling: Sampling | None = None
    """How evaluations sample. None uses the loop's sampling."""
    greedy: bool = False
    """Whether to evaluate at temperature 0 too."""
    engine: MeasuredBy | None = None
    """`own` samples with a copy of the weights in this process while the loop continues. `loop` uses the loop's engine,
    which gets its next weights after the evaluation. None means `own` with an embedded engine, otherwise `loop`."""


class ImitationConfig(WarmStartConfig):
    """A warm start on the tapes of another run."""

    tapes: str
    """The other run's directory. The tapes are copied, so it isn't needed again."""
    split: str | None = None
    """Only tapes in this split are used. None uses `train` and `demo`."""
    min_reward: float | None = None
    """Only tapes with at least this reward are used. None uses all."""


class CurriculumConfig(SuccessConfig):
    """Tasks are drawn from the pools easy, normal and hard, by the share of attempts that passed. Tasks without any
    attempt are in the pool new."""

    tapes: str
    """A run directory. Its attempts at these tasks are counted once, when training begins."""
    easy: float = Field(default=EASY, ge=0, le=1)
    """A task is easy if a larger share of its attempts passed."""
    hard: float = Field(default=HARD, ge=0, le=1)
    """A task is hard if a smaller share of its attempts passed."""
    weights: dict[str, float] = Field(default={"easy": 1.0, "normal": 2.0, "hard": 1.0, "new": 1.0})
    """How often each pool is drawn from, relative to the others. The share of an empty pool goes to the others."""


class TrainConfig(Setup, TrackedConfig):
    """The settings of a training run."""

    engine: TrainedEngine
    """The model to train, and the engine that samples with it. The engine is embedded, or it takes the weights."""
    trainer: TrainerConfig = TrainerConfig()
    """Where and how the model is trained."""
    loop: LoopConfig = LoopConfig()
    players: Players = Field(default={})
    """Other models in the episodes, by names of your choice. Each learns from its agents' tokens or is frozen. The
    model of `engine` learns from the agents in `loop.agents`, and speaks for every agent that no player has."""
    warm: ImitationConfig | None = None
    curriculum: CurriculumConfig | None = None
    """Draw tasks by their difficulty. None takes the tasks in turn."""
    evaluation: EvaluationConfig = EvaluationConfig()
    processes: ProcessesConfig = ProcessesConfig()
    """Multi-process settings. They are ignored unless the run is started by `accelerate launch` or `torchrun`."""

    @model_validator(mode="after")
    def _agree(self) -> TrainConfig:
        check_engine(self.engine, self.trainer, self.loop, warm=self.warm)
        check_players_of(self.players, self.loop, warm=self.warm is not None)
        loop = self.loop
        if "teacher" in SECOND.get(loop.recipe, ()) and loop.teacher is None and "regulariser" not in loop.changes:
            raise ValueError(
                f"recipe {loop.recipe!r} learns from a teacher: set loop.teacher to another model's folder"
            )
        if getattr(loop.teacher, "model", loop.teacher) == self.engine.model and not (self.warm and self.warm.updates):
            raise ValueError(f"loop.teacher={self.engine.model} is the model that is trained: name another model")
        for name, player in self.players.items():
            if not player.frozen:
                check_engine(player.engine, player.trainer, self.loop, name)
        return self

    def checked(self, resume: bool = False) -> TrainConfig:
        """Make the checks that don't need torch, download models from the hub, and apply the model's profile.

        So a wrong setting is reported at once. With `resume`, the runs in `warm` and `curriculum` may be gone.
        Raises UsageError if a check fails."""
        check_models([self.engine, *(player.engine for player in self.players.values())])
        files = {"evaluation.tasks": str(self.evaluation.tasks)}
        if self.loop.corpus is not None and not resume:
            files["loop.corpus.path"] = self.loop.corpus.path
        for setting, name in files.items():
            if name.endswith(tuple(TASK_FILES)) and not Path(name).is_file():
                raise UsageError(f"{setting}: the file {name} doesn't exist")
        for run in () if resume else filter(None, (self.warm, self.curriculum)):
            Store.open(run.tapes).close()
        return fitted(self)

    @property
    def threads(self) -> int:
        """The number of torch threads in the process."""
        trainers = (self.trainer, *(player.trainer for player in self.players.values()))
        frozen = threads_of(player.engine for player in self.players.values())
        return max(frozen, *(trainer.threads for trainer in trainers))
