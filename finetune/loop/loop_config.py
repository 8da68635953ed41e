"""Settings of the loop and of warm starts, as pydantic models."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from ...agents.episode.limits import Limits
from ...agents.setup.engine_config import CustomConfig, ServerConfig, engine_kind
from ...agents.setup.setup import DatasetConfig
from ...tapes.common.config import Config, Keys, translation
from ...tapes.common.config_yaml import Group
from ...tapes.records import Sampling
from ..trainer.options import CriticOptimiserConfig, OptimiserConfig


class WarmStartConfig(Config):
    """The warm start: SFT on recorded tapes before the loop begins."""

    updates: int = Field(default=300, ge=0)
    batch: int = Field(default=64, ge=1)
    """Tapes per update."""
    optimiser: OptimiserConfig = OptimiserConfig()


NO_WARM_START = WarmStartConfig(updates=0, batch=1)


class CriticConfig(Config):
    """The critic for a recipe that uses values, such as `ppo`."""

    body: Literal["own", "policy"] = "own"
    """`own` trains a value head and a copy of the policy's body. `policy` trains only a head, which reads the policy's
    hidden states."""
    optimiser: CriticOptimiserConfig = CriticOptimiserConfig()
    clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a token's predicted value during one update, in units of reward. A prediction that moved
    further towards its target has no gradient. None sets no bound."""
    normalised: bool = True
    """Whether targets are scaled by their running mean and deviation. If so, the critic begins at the mean of its
    first targets."""
    passes: int = Field(default=4, ge=1)
    """Number of optimiser steps on each update's targets."""
    first: int = Field(default=0, ge=0)
    """Number of updates at the beginning of the loop that train only the critic. The policy's schedule begins after
    them."""

    @model_validator(mode="after")
    def _keeps_activations(self) -> CriticConfig:
        if self.body == "policy" and self.optimiser.gradient_checkpointing:
            raise ValueError(
                "a critic that reads the policy's states goes back through its head alone, so checkpointing would save "
                "nothing: remove optimiser.gradient_checkpointing, or set body to `own`"
            )
        if self.optimiser.ema is not None or self.optimiser.pack:
            raise ValueError(
                f"a critic has no averaged weights and its rows are padded, so optimiser.ema={self.optimiser.ema} and "
                f"optimiser.pack={self.optimiser.pack} would do nothing: remove them"
            )
        return self


class ForkConfig(Config):
    """How attempts are forked: several new episodes continue an attempt from one of its turns. This is for a recipe
    that compares such continuations (`baseline: {by: fork}`)."""

    attempts: int = Field(default=1, ge=1)
    """Number of attempts to fork in each group. They are drawn from the attempts with at least two turns."""
    turns: int = Field(default=1, ge=1)
    """Number of turns at which to fork an attempt. They are drawn from the attempt's turns after the first."""
    continuations: int = Field(default=4, ge=2)
    """Number of episodes that continue from each turn at which an attempt is forked."""


class CorpusConfig(DatasetConfig):
    """Plain text to imitate in addition to the rollouts. The text is copied into the run directory, so a resumed run
    doesn't need the original."""

    path: str
    """A JSONL, JSON, Parquet or CSV file, a folder with a dataset, or `org/name@revision` for a dataset on the hub."""
    columns: dict[str, str] = Field(default={"text": "text"})
    """The column with the text, as `{text: column}`, and optionally a column with a prompt (`prompt: column`). The
    prompt is context before the text, and is cut to its last `tokens` tokens. Duplicate rows are used once."""
    tokens: int = Field(default=512, ge=1)
    """Largest number of tokens in a demonstration. A longer text is divided into parts of this length."""
    count: int | None = Field(default=None, ge=1)
    """Use only this many rows, from the beginning. None uses all."""


class ProcessesConfig(Config):
    """How processes that were launched together share the work of an update."""

    shard: bool = False
    """If true, each process keeps only a shard of every weight, gradient and optimiser state (FSDP2). If false, each
    process keeps a full copy."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of processes that compute the same rows together, each a part of their tokens, so that long rows take less
    memory (Ulysses). It must divide the number of processes, and the model's attention heads and key/value heads."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a process waits for the others before it ends with an error. All processes but one also wait while a
    batch is sampled, so the limit must be longer than this takes."""


class ReferenceConfig(Config):
    """The reference model, with which a KL term or `minor_sft` compares the policy."""

    model: str
    """`base` is the model at the beginning of the run, `warm` is the model after the warm start, and `none` disables
    the reference. Any other value is the folder, or the name on the hub, of a model with the same tokenizer."""
    every: int | None = Field(default=None, ge=1)
    """Number of updates between two changes of a reference `base` or `warm`, which then follows the policy. None never
    changes it."""
    decay: float = Field(default=0.0, ge=0, lt=1)
    """Every `every` updates, the reference becomes decay * reference + (1 - decay) * policy. With 0, it becomes a copy
    of the policy."""

    @model_validator(mode="after")
    def _refreshes_what_it_can(self) -> ReferenceConfig:
        if (self.every is not None and self.model not in OWN) or (self.decay and self.every is None):
            raise ValueError(
                f"every={self.every} with decay={self.decay:g} can't refresh {self.model!r}: only base and warm are "
                "refreshed, after each `every` updates; set both or neither"
            )
        return self


def _teacher_kind(settings: object) -> str:
    """Return the tag of these settings in `Teacher`. An error then concerns the kind that is meant, and no other."""
    return "name" if isinstance(settings, str) else "custom" if engine_kind(settings) == "custom" else "servers"


Teacher = Annotated[
    Annotated[str, Tag("name")] | Annotated[ServerConfig, Tag("servers")] | Annotated[CustomConfig, Tag("custom")],
    Discriminator(_teacher_kind),
]
OWN = ("base", "warm")
"""Values of `ReferenceConfig.model` that mean an earlier state of the policy."""
SECOND = {
    "ppo": ("critic",),
    "ppo_kl": ("reference", "critic"),
    "minor_sft": ("reference",),
    "distill": ("teacher",),
}
"""For each recipe, the models that it needs in addition to the policy."""
RECIPES = ("sft", "grpo", "gdpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "cpgd", "rft", "rloo", "decoupled_ppo")
RECIPES += ("reinforce", "reinforce_plain", "reinforce_pp", "reinforce_pp_baseline", *SECOND)
"""The names of all recipes. The module that defines the recipes has them too, but importing it would import torch."""


@translation
def _of_earlier_loops(settings: Group, keys: Keys, value: Any) -> tuple[Keys, Any] | None:
    """Before `in_flight`, this setting was called `publish`. A bound in bytes on the kept checkpoints is gone."""
    if keys == ("loop", "keep_checkpoint_bytes"):
        return None
    return (("loop", "in_flight"), value) if keys == ("loop", "publish") else (keys, value)


def _named(value: object) -> object:
    """Turn a reference that is given only by name, such as `base`, into `{model: base}`."""
    return {"model": value} if isinstance(value, str) else value


class RecipeConfig(Config):
    """The name of a recipe, and changes to the recipe."""

    recipe: str = "grpo"
    changes: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe's terms, for example `{"baseline": {"eps": 1e-4}}`."""

    @field_validator("recipe")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in RECIPES:
            known = ", ".join(dict.fromkeys([*get_close_matches(name, RECIPES, n=2), *sorted(RECIPES)]))
            raise ValueError(f"unknown recipe {name!r}: take one of {known}, or name your own as module:name")
        return name


class LoopConfig(RecipeConfig):
    """The asynchronous loop, which samples groups while the trainer updates the policy on finished groups."""

    updates: int = Field(default=40, ge=0)
    """Number of updates that the loop makes."""
    stop_at: float | None = Field(default=None, allow_inf_nan=False)
    """The loop ends early if the mean reward of an evaluation on held-out tasks is at least this value. The update that
    is in progress is completed. None makes all updates."""
    groups: int = Field(default=16, ge=1)
    """Groups per rollout batch."""
    group_size: int = Field(default=16, ge=1)
    """Attempts per group."""
    rollouts: int = Field(default=1, ge=1)
    """Number of rollout batches that one update trains on, in one optimiser step. A baseline with `by = batch` compares
    episodes only within one rollout batch."""
    epochs: int = Field(default=1, ge=1)
    """How many times an update passes over its batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per epoch, each on one part of the episodes."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents to train, such as `planner/searcher`. Tokens of other agents are context. None trains all
    agents."""
    by_agent: bool = False
    """If true, each agent is compared with itself in the group's other attempts, by its own rewards (components named
    `name@path`) plus the rewards that all agents share. If false, an episode has one reward for all of its agents."""
    extra_groups: int | None = Field(default=None, ge=0)
    """For a recipe that drops flat groups (groups with equal rewards): the largest number of groups that are sampled to
    replace them in one update. If they aren't enough, the update trains on a smaller batch. None allows three times the
    number of groups in an update."""
    forks: ForkConfig | None = None
    """Settings for forking attempts. None disables forking."""
    demonstrations: int = Field(default=0, ge=0)
    """Number of tapes that each update also imitates, if the recipe has an `nll` regulariser. The tapes come from the
    corpus if there is one, otherwise from the warm start."""
    corpus: CorpusConfig | None = None
    """Plain text that every trained policy imitates as `demonstrations`. None uses tapes from the warm start."""
    max_lag: int = Field(default=1, ge=0)
    """Largest staleness of a token in training: the number of updates that were made between the sampling of the token
    and the update that trains on it. With 0, the loop is synchronous."""
    max_concurrent: int = Field(default=512, ge=1)
    """Maximum number of episodes in flight at once. It is rounded down to whole groups, but at least one group runs."""
    optimiser: OptimiserConfig = OptimiserConfig()
    reference: Annotated[ReferenceConfig, BeforeValidator(_named)] | None = None
    """The reference model: `base`, `warm`, `none`, a folder or a name on the hub. With a mapping such as {model: warm,
    every: 10}, the reference follows the policy. None means `warm` if the run has a warm start, otherwise `base`."""
    teacher: Teacher | None = None
    """The teacher for a KL term: a folder, a name on the hub, or an engine that scores tokens. An engine is either
    {model: DIR, urls: [http://...]} for vLLM servers, or a custom engine whose kind is `module:name`."""
    critic: CriticConfig | None = None
    """Settings of the critic. By default, a recipe that uses values has a critic, and other recipes have none."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    in_flight: Literal["reprefill", "drain"] = "reprefill"
    """How unfinished completions are handled when the weights change. `reprefill` continues them with the new weights,
    and `drain` finishes them with the old weights first. Log-probs are exact with both. If servers take adapters, the
    default is `drain`."""
    sleep: bool = False
    """Whether servers free their GPU memory during an update, so that the trainer can use the same GPU. Nothing can be
    sampled meanwhile, so max_lag must be 0."""
    sampler_tolerance: float | None = Field(default=1e-4, gt=0)
    """Largest allowed |log-prob at sampling - log-prob in training| in nats. It is checked only if max_lag is 0, and
    None disables the check. Under autocast, a larger difference is allowed if rounding explains it. After a weight
    sync, differences up to this number always count as rounding."""
    group_deadline: float = Field(default=300.0, gt=0)
    """Seconds after which a group closes. It keeps the attempts that have finished, and the others are cancelled."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Updates between two checkpoints."""
    keep_checkpoints: int | None = Field(default=1, ge=1)
    """Number of checkpoints to keep. None keeps all. The base checkpoint, the last checkpoint, the checkpoint with the
    best held-out reward and the checkpoints at the end of a phase are always kept. If the only checkpoint is damaged,
    a resumed run applies all updates again, and `replay model` scores only tokens of versions that were kept."""
    shuffle_rewards: Literal["within", "across"] | None = None
    """Shuffle the rewards of each update `within` each group or `across` all of its groups, as a control experiment.
    `within` keeps the number of successes in each group. `across` removes all information from the rewards."""

    @model_validator(mode="before")
    @classmethod
    def _with_its_critic(cls, data: Any) -> Any:
        """Add the settings of a default critic if the recipe needs one. This is done before validation, so that a
        profile can fill the critic's fields."""
        if not isinstance(data, dict) or "critic" in data:
            return data
        changes = data.get("changes")
        credit = changes.get("credit") if isinstance(changes, dict) else None
        kind = credit.get("kind") if isinstance(credit, dict) else getattr(credit, "kind", None)
        takes = kind == "gae" if kind else "critic" in SECOND.get(str(data.get("recipe")), ())
        return data | {"critic": {}} if takes else data

    @field_validator("sampling")
    @classmethod
    def _trainable(cls, sampling: Sampling) -> Sampling:
        if not sampling.exact:
            raise ValueError(f"tokens that are sampled with these settings can't be trained on: {sampling.inexact}")
        return sampling

    @model_validator(mode="after")
    def _agrees(self) -> LoopConfig:
        if self.rollouts > 1 and self.minibatches > 1:
            raise ValueError(
                f"rollouts={self.rollouts} trains on several batches in one step, and "
                f"minibatches={self.minibatches} makes several steps on one batch: set one of them to 1"
            )
        if self.sleep and self.max_lag:
            raise ValueError(
                f"sleep stops the servers during every update, and with max_lag={self.max_lag} they sample meanwhile: "
                "set max_lag=0, or remove sleep"
            )
        if self.corpus is not None and not self.demonstrations:
            raise ValueError(
                "corpus would do nothing: set demonstrations, the number of documents that an update imitates"
            )
        if 0 < self.demonstrations < self.minibatches:
            raise ValueError(
                f"demonstrations={self.demonstrations} can't be divided into minibatches={self.minibatches}: set "
                "demonstrations to at least as many"
            )
        if self.by_agent and (self.rollouts > 1 or self.shuffle_rewards):
            raise ValueError(
                "by_agent compares agents within one rollout batch by their own rewards: set rollouts to 1 and remove "
                "shuffle_rewards"
            )
        if self.agents is not None and not self.agents:
            raise ValueError(
                "agents is empty, so that no agent would be trained: name at least one path, or remove it to train all"
            )
        return self

    def longest_episode(self, context: int | None) -> int | None:
        """Return the largest number of tokens that the policy can sample in one episode, or None without a limit.

        This assumes that the episode is a single conversation of at most `context` tokens.
        """
        limits, bounds = self.limits, [self.limits.tokens, self.limits.context, context]
        bounds += [n * self.sampling.max_tokens for n in (limits.calls, limits.turns) if n is not None]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def episodes_per_group(self) -> int:
        """Number of attempts and continuations in a group. Retries of failed episodes don't count."""
        forks = self.forks
        return self.group_size + (forks.attempts * forks.turns * forks.continuations if forks is not None else 0)
