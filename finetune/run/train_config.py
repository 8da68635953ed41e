"""The settings of `train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...agents.runs.runner import ScoresConfig, SuccessConfig
from ...agents.setup.engine_config import check_models, pinned
from ...agents.setup.setup import Setup, TasksConfig
from ...agents.setup.team_config import threads_of
from ...envs.curriculum import EASY, HARD
from ...envs.taskset import TASK_FILES
from ...tapes import Sampling
from ...tapes.errors import UsageError
from ...tapes.store.store import Store
from ..loop.loop_config import SECOND, LoopConfig, ProcessesConfig, WarmStartConfig
from ..trainer.options import fitted
from .player_config import (
    Players,
    TrainedEngine,
    TrainerConfig,
    adapters_of,
    check_engine,
    check_players_of,
)
from .trackers import TrackedConfig

MeasuredBy = Literal["own", "loop"]
"""The engine for evaluations: `own` is an engine in this process with a copy of the weights, and `loop` is the loop's
engine."""

EndedBy = Literal["updates", "stop_at"]
"""The setting that ended a loop: `loop.updates` or `loop.stop_at`."""


class EvaluationConfig(ScoresConfig, TasksConfig):
    """Held-out tasks, and when and how the policy is evaluated on them. An evaluation doesn't change training.

    If `tasks` is given, `fraction` is ignored, and no held-out task may be a task to train on. `attempts` is the number
    of episodes for each held-out task.
    """

    fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the tasks that are held out. They are chosen by task hash. 0 disables evaluations."""
    limit: int | None = Field(default=128, ge=1)
    """Maximum number of held-out tasks in one evaluation. None uses all."""
    every: int | None = Field(default=20, ge=1)
    """Updates of the loop between two evaluations. None evaluates only before and after the loop."""
    sampling: Sampling | None = None
    """Sampling settings for evaluations. None uses the loop's settings."""
    greedy: bool = False
    """Whether to evaluate at temperature 0 in addition."""
    engine: MeasuredBy | None = None
    """`own` samples in this process with a copy of the weights, while the loop continues. `loop` samples with the
    loop's engine, which gets no new weights meanwhile. None means `own` if the loop's engine is embedded, otherwise
    `loop`."""


class ImitationConfig(WarmStartConfig):
    """A warm start on the tapes of another run."""

    tapes: str
    """The directory of the other run. Its tapes are copied, so a resumed run doesn't need it."""
    split: str | None = None
    """Only tapes in this split are used. None uses `train` and `demo`."""
    min_reward: float | None = None
    """Only tapes with at least this reward are used. None uses all."""


class CurriculumConfig(SuccessConfig):
    """Draws tasks from four pools. Tasks without attempts are in the pool `new`. Other tasks are in the pool `easy`,
    `normal` or `hard`, depending on the share of their attempts that passed."""

    tapes: str
    """A run directory. Its attempts at the tasks to train on are counted once, when training begins."""
    easy: float = Field(default=EASY, ge=0, le=1)
    """A task is easy if more than this share of its attempts passed."""
    hard: float = Field(default=HARD, ge=0, le=1)
    """A task is hard if less than this share of its attempts passed."""
    weights: dict[str, float] = Field(default={"easy": 1.0, "normal": 2.0, "hard": 1.0, "new": 1.0})
    """How often a task is drawn from each pool, relative to the others. An empty pool's share goes to the others."""


_OTHER_NAMES = {
    "adam_beta1 adam_beta2": "loop.optimiser.betas",
    "adam_epsilon": "loop.optimiser.eps",
    "adv_estimator advantage_estimator loss_type policy_loss": "loop.recipe",
    "attn_implementation": "trainer.attention",
    "beta entropy_coeff entropy_coef kl_coef kl_loss_coef": "loop.changes.regulariser",
    "bf16": "loop.optimiser.autocast trainer.dtype",
    "clip_grad max_grad_norm": "loop.optimiser.grad_clip",
    "clip_ratio cliprange epsilon": "loop.changes.surrogate.low loop.changes.surrogate.high",
    "clip_ratio_high epsilon_high": "loop.changes.surrogate.high",
    "clip_ratio_low epsilon_low": "loop.changes.surrogate.low",
    "dataset_name train_files": "tasks",
    "enable_gradient_checkpointing": "loop.optimiser.gradient_checkpointing",
    "eval_steps test_freq": "evaluation.every",
    "free_cache_engine vllm_enable_sleep_mode": "loop.sleep",
    "fsdp": "processes.shard",
    "sp_size ulysses_sequence_parallel_size": "processes.sequence_parallel",
    "generation_batch_size per_device_train_batch_size train_batch_size": "loop.groups",
    "gpu_memory_utilization vllm_gpu_memory_utilization": "engine.slots engine.capacity",
    "gradient_accumulation_steps ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu": "loop.optimiser.micro_tokens",
    "learning_rate": "loop.optimiser.lr",
    "logger report_to": "trackers",
    "lora_alpha": "trainer.lora.alpha engine.weights.alpha",
    "lora_r lora_rank": "trainer.lora.rank engine.weights.rank",
    "lora_target_modules target_modules": "trainer.lora.targets engine.weights.targets",
    "lr_scheduler_type": "loop.optimiser.schedule.kind",
    "lr_warmup_steps warmup_steps": "loop.optimiser.schedule.warmup",
    "max_actor_ckpt_to_keep save_total_limit": "loop.keep_checkpoints",
    "max_assistant_turns max_turns": "loop.limits.turns",
    "max_completion_length max_new_tokens max_response_length response_length": "loop.sampling.max_tokens",
    "max_model_len vllm_max_model_length": "engine.capacity",
    "max_num_seqs": "loop.max_concurrent",
    "max_prompt_length": "loop.limits.prompt_tokens",
    "max_steps num_train_epochs total_epochs total_training_steps": "loop.updates",
    "model_name_or_path": "engine.model",
    "multi_objective_aggregation": "loop.recipe",
    "n num_generations": "loop.group_size",
    "num_iterations ppo_epochs": "loop.epochs",
    "ppo_mini_batch_size": "loop.minibatches",
    "ref_model": "loop.reference",
    "ref_model_mixup_alpha": "loop.reference.decay",
    "ref_model_sync_steps": "loop.reference.every",
    "reward_fn reward_funcs reward_model": "rewards",
    "save_freq save_steps": "loop.checkpoint_every",
    "scale_rewards": "loop.changes.baseline.kind",
    "use_vllm vllm_mode": "engine.kind",
    "val_files": "evaluation.tasks",
    "vllm_server_base_url vllm_server_host": "engine.urls",
}
"""Names of settings in TRL and verl, with our settings. Several names or settings are separated by spaces."""
_EARLIER_NAMES = {
    f"{engine}.{name}": f"{engine}.{now}"
    for engine in ("engine", "loop.teacher")
    for name, now in {
        "publish": "weights",
        "nccl": "weights",
        "nccl.address": "weights.address",
        "nccl.port": "weights.port",
    }.items()
} | {"loop.publish": "loop.in_flight"}
"""Names of settings in earlier versions."""


def _item(group: Any, name: str) -> Any:
    return group.get(name) if isinstance(group, Mapping) else getattr(group, name, None)


class TrainConfig(Setup, TrackedConfig):
    """The settings of a training run."""

    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: tuple(keys.split()) for names, keys in (_OTHER_NAMES | _EARLIER_NAMES).items() for name in names.split()
    }
    engine: TrainedEngine
    """The model to train, and the engine that samples with it: an embedded engine, or one that receives the weights."""
    trainer: TrainerConfig = TrainerConfig()
    """Where and how the model is trained."""
    loop: LoopConfig = LoopConfig()
    players: Players = Field(default={})
    """Other models that speak in the episodes, by names of your choice. A player is frozen, or it learns from its
    agents' tokens. The model of `engine` learns from `loop.agents` and speaks for every agent without a player."""
    warm: ImitationConfig | None = None
    curriculum: CurriculumConfig | None = None
    """How tasks are drawn by their difficulty. None takes each task once an epoch, in a new order each time."""
    evaluation: EvaluationConfig = EvaluationConfig()
    processes: ProcessesConfig = ProcessesConfig()
    """Settings for several processes. They are ignored unless `accelerate launch` or `torchrun` starts the run."""

    @property
    def environment_seconds(self) -> float:
        return self.loop.limits.environment_seconds or super().environment_seconds

    @model_validator(mode="before")
    @classmethod
    def _drained_for_adapters(cls, data: Any) -> Any:
        """Set the default of `loop.in_flight` if servers take adapters, with which completions keep their own."""
        if not isinstance(data, Mapping):
            return data
        models = [data, *(data.get("players") or {}).values()]
        ways = [_item(_item(one, "engine"), "weights") for one in models if not _item(one, "frozen")]
        loop = data.get("loop") or {}
        if (
            isinstance(loop, Mapping)
            and "in_flight" not in loop
            and "adapters" in [_item(w, "kind") or w for w in ways]
        ):
            return {**data, "loop": {**loop, "in_flight": "drain"}}
        return data

    @model_validator(mode="after")
    def _agree(self) -> TrainConfig:
        check_engine(self.engine, self.trainer, self.loop, warm=self.warm)
        check_players_of(self.players, self.loop, warm=self.warm is not None)
        loop, evaluation, lora = self.loop, self.evaluation, adapters_of(self.engine, self.trainer)
        if self.processes.shard and lora is not None and lora.quantise is not None:
            raise ValueError(
                f"quantise={lora.quantise} of the adapters makes weights of 4 bits, which can't be sharded as "
                "processes.shard=true asks: remove processes.shard, so that each process holds all of them"
            )
        if self.processes.sequence_parallel > 1 and self.trainer.attention not in (None, "sdpa"):
            raise ValueError(
                f"processes.sequence_parallel={self.processes.sequence_parallel} needs the attention sdpa, and "
                f"trainer.attention={self.trainer.attention}: remove it"
            )
        if loop.stop_at is not None and not (evaluation.every and (evaluation.tasks or evaluation.fraction)):
            raise ValueError(
                f"loop.stop_at={loop.stop_at:g} is a reward on held-out tasks, and this run measures none while it "
                "trains: set evaluation.every, and evaluation.tasks or evaluation.fraction; or remove loop.stop_at"
            )
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
        """Make the checks that don't need torch, download the models from the hub, and apply the model's profile.

        This reports a wrong setting at once. With `resume`, the corpus isn't checked, and neither are the runs of
        `warm` and `curriculum`, because they may have been deleted. Raises UsageError if a check fails."""
        check_models([self.engine, *(player.engine for player in self.players.values())])
        files = {"evaluation.tasks": str(self.evaluation.tasks)}
        if self.loop.corpus is not None and not resume:
            files["loop.corpus.path"] = self.loop.corpus.path
        for setting, name in files.items():
            if name.endswith(TASK_FILES) and not Path(name).is_file():
                raise UsageError(f"{setting}: the file {name} doesn't exist")
        for run in () if resume else filter(None, (self.warm, self.curriculum)):
            Store.open(run.tapes).close()
        return fitted(pinned(self))

    @property
    def threads(self) -> int | None:
        """The number of torch threads in the process, or None to leave torch's own number."""
        trainers = (self.trainer, *(player.trainer for player in self.players.values() if not player.frozen))
        chosen = [trainer.threads for trainer in trainers if trainer.threads is not None]
        frozen = threads_of(player.engine for player in self.players.values())
        return max(frozen, *chosen) if chosen else None
