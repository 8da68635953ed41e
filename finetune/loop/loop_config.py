"""Settings of the loop and of warm starts, as pydantic models."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ...agents.episode.limits import Limits
from ...agents.setup.engine_config import CustomConfig, ServerConfig
from ...agents.setup.setup import DatasetConfig
from ...tapes.common.config import Config
from ...tapes.records import Sampling
from ..trainer.schedule import Schedule


class OptimiserConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, which is added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float | None = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm. None disables clipping."""
    schedule: Schedule = Schedule()
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay, per optimiser step, of a moving average of the weights. None keeps no average."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens of one forward pass, padding included."""
    pack: bool | None = None
    """Put rows end to end in one sequence instead of padding them. None packs if the attention kernel knows the
    boundaries of rows (flash attention on a GPU). Packing is exact with other kernels too, but slower than padding."""
    autocast: Literal["bfloat16"] | None = None
    """Dtype of the forward pass; weights, output layer and optimiser state stay in float32. None: all in float32."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them: less memory, more time."""


class WarmStartConfig(Config):
    """SFT on recorded tapes."""

    updates: int = Field(default=300, ge=0)
    batch: int = Field(default=64, ge=1)
    """Tapes per update."""
    optimiser: OptimiserConfig = OptimiserConfig()


class CriticOptimiserConfig(OptimiserConfig):
    """AdamW of a critic: a head learns from scratch."""

    lr: float = Field(default=1e-3, gt=0)


class CriticConfig(Config):
    """The critic of a recipe that takes values, as `ppo` does."""

    body: Literal["own", "policy"] = "own"
    """`own` trains a copy of the policy's body with the head. `policy` trains only a head, on the policy's states."""
    optimiser: CriticOptimiserConfig = CriticOptimiserConfig()
    clip: float | None = Field(default=0.2, gt=0)
    """A value that has moved this far from its value before the update, in units of reward, has no further loss. None
    sets no bound."""
    normalised: bool = True
    """Targets are scaled by their running mean and deviation, and the critic begins at the mean of its first
    targets."""
    passes: int = Field(default=4, ge=1)
    """Optimiser steps on each update's targets."""
    first: int = Field(default=0, ge=0)
    """Updates at the beginning in which the critic learns and the policy stays as it is."""

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
    """Continuations of a group's attempts, for a recipe that compares them: `baseline: {by: fork}`."""

    attempts: int = Field(default=1, ge=1)
    """Attempts of each group that are forked, drawn from those with at least two turns."""
    turns: int = Field(default=1, ge=1)
    """Turns at which each of these attempts is forked, drawn from those after its first."""
    continuations: int = Field(default=4, ge=2)
    """Episodes that continue from each of these turns."""


class CorpusConfig(DatasetConfig):
    """Plain text to imitate in addition to the rollouts. It is copied into the run, so the corpus isn't needed
    again."""

    path: str
    """A JSONL, JSON, Parquet or CSV file, a dataset of the hub as `org/name@revision`, or a folder with a dataset."""
    columns: dict[str, str] = Field(default={"text": "text"})
    """`{text: column}`, and optionally `prompt: column`: context before each document, of which the last `tokens`
    tokens are kept. Duplicate rows are used once."""
    tokens: int = Field(default=512, ge=1)
    """A longer document is divided into parts of this many tokens, and each part counts as a demonstration."""
    count: int | None = Field(default=None, ge=1)
    """Use only the first rows, this many. None uses all."""


class ProcessesConfig(Config):
    """How processes that were launched together share the work of an update."""

    shard: bool = False
    """Each process keeps a shard of every weight, gradient and optimiser state (FSDP2). With False, each keeps a full
    copy."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a process waits for the others, while a batch is sampled too, before it ends with an error."""


class ReferenceConfig(Config):
    """The model that a KL to the reference, and `minor_sft`, compare the policy with."""

    model: str
    """`base` is the model at the beginning of the run, `warm` the model after the warm start, and `none` disables the
    reference. Any other value names a model with the same tokenizer, as a folder or a name on the hub."""
    every: int | None = Field(default=None, ge=1)
    """Updates of the loop between two refreshes of `base` or `warm`. None never refreshes the reference."""
    decay: float = Field(default=0.0, ge=0, lt=1)
    """Each refresh makes the reference decay * reference + (1 - decay) * policy; 0: the policy as it is then."""

    @model_validator(mode="after")
    def _refreshes_what_it_can(self) -> ReferenceConfig:
        if (self.every is not None and self.model not in OWN) or (self.decay and self.every is None):
            raise ValueError(
                f"every={self.every} with decay={self.decay:g} can't refresh {self.model!r}: only base and warm are "
                "refreshed, after each `every` updates; set both or neither"
            )
        return self


OWN = ("base", "warm")
"""References that are the policy at another moment."""
SECOND = {
    "ppo": ("critic",),
    "ppo_kl": ("reference", "critic"),
    "minor_sft": ("reference",),
    "distill": ("teacher",),
}
"""Recipe -> the other models that it needs."""
RECIPES = ("sft", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "cpgd", "rft", "rloo", "decoupled_ppo")
RECIPES += ("reinforce", "reinforce_plain", "reinforce_pp", "reinforce_pp_baseline", *SECOND)
"""The names of all recipes. They stand here too because the module of the recipes imports torch."""


def _named(value: object) -> object:
    """A reference that is its model's name alone."""
    return {"model": value} if isinstance(value, str) else value


class RecipeConfig(Config):
    """A recipe by name, and what differs from it."""

    recipe: str = "grpo"
    changes: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe's terms, as in `{"baseline": {"eps": 1e-4}}`."""

    @field_validator("recipe")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in RECIPES:
            known = ", ".join(dict.fromkeys([*get_close_matches(name, RECIPES, n=2), *sorted(RECIPES)]))
            raise ValueError(f"unknown recipe {name!r}: take one of {known}, or name your own as module:name")
        return name


class LoopConfig(RecipeConfig):
    """The asynchronous loop: it samples groups while the trainer updates on closed ones."""

    updates: int = Field(default=40, ge=0)
    """Versions of the policy that the loop makes."""
    groups: int = Field(default=16, ge=1)
    """Groups of a rollout batch."""
    group_size: int = Field(default=16, ge=1)
    """Attempts per group."""
    rollouts: int = Field(default=1, ge=1)
    """Rollout batches that one update trains on, in one optimiser step. Baselines by batch compare within one of
    them."""
    epochs: int = Field(default=1, ge=1)
    """Passes of an update over its batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps of an epoch, each on one part of the episodes."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that are trained, as `planner/searcher`; tokens of other agents are context. None: all."""
    by_agent: bool = False
    """Compare each agent with itself in the other attempts, by its own rewards (components named `name@path`) and the
    rewards of all agents. False: an episode has one reward for all of its agents."""
    extra_groups: int | None = Field(default=None, ge=0)
    """With a recipe that drops flat groups: how many groups may be sampled in their place for one update, before it
    trains on a smaller batch. None: three times its groups."""
    forks: ForkConfig | None = None
    """None disables forking of attempts."""
    demonstrations: int = Field(default=0, ge=0)
    """With a recipe that has an `nll` regulariser: tapes of the corpus, or else of the warm start, that each update
    imitates as well."""
    corpus: CorpusConfig | None = None
    """Plain text for `demonstrations`, which every trained policy imitates. None uses tapes of the warm start."""
    max_lag: int = Field(default=1, ge=0)
    """Largest staleness of a trained token: updates between the policy that sampled it and the one that trains on it.
    0 is synchronous."""
    max_concurrent: int = Field(default=512, ge=1)
    """Episodes in flight at once; rounded down to whole groups, at least one."""
    optimiser: OptimiserConfig = OptimiserConfig()
    reference: Annotated[ReferenceConfig, BeforeValidator(_named)] | None = None
    """The model that a KL to the reference compares the policy with: `base`, `warm`, `none`, or a folder or name on the
    hub. {model: warm, every: 10} refreshes it. None means `warm` after a warm start, otherwise `base`."""
    teacher: str | ServerConfig | CustomConfig | None = None
    """The model that a KL to the teacher draws the policy to: a folder, a name on the hub, or an engine that scores
    tokens, as {model: DIR, urls: [http://...]} of vLLM servers, or of kind `module:name`."""
    critic: CriticConfig | None = None
    """None: a critic with the general defaults if the recipe takes values, otherwise no critic."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    publish: Literal["reprefill", "drain"] = "reprefill"
    """What happens to completions in flight when weights change; both ways keep log-probs exact."""
    sleep: bool = False
    """Servers free their GPU's memory during an update, for a trainer on the same GPU. Needs max_lag 0, since nothing
    is sampled then."""
    sampler_tolerance: float | None = Field(default=1e-4, gt=0)
    """With max_lag 0: the largest allowed |log-prob at sampling - log-prob in training| in nats. None disables the
    check."""
    group_deadline: float = Field(default=300.0, gt=0)
    """Seconds after which a group closes with its finished attempts and cancels the others."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Updates between two checkpoints."""
    keep_checkpoints: int | None = Field(default=3, ge=1)
    """None: all. The base, the last, the best measured and those at the end of a phase are always kept."""
    keep_checkpoint_bytes: int | None = Field(default=None, ge=0)
    """The oldest checkpoints are deleted until the others take at most this many bytes. None sets no bound."""
    shuffle_rewards: Literal["within", "across"] | None = None
    """A control experiment: the rewards of each update are shuffled `within` each group or `across` all of its groups.
    `within` keeps each group's number of successes; `across` removes all information from the rewards."""

    @model_validator(mode="before")
    @classmethod
    def _with_its_critic(cls, data: Any) -> Any:
        """The critic of a recipe that takes values is a setting from the start, so that a profile can fill it."""
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
            raise ValueError(
                "tokens that are sampled with these settings can't be trained on: their recorded log-probs don't "
                "belong to the distribution that they are drawn from. Set a temperature above 0, no top_p, no top_k "
                "and no extra but `stop`"
            )
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
        """The most own tokens of an episode that is one conversation of at most `context` tokens, or None without a
        limit."""
        limits, bounds = self.limits, [self.limits.tokens, self.limits.context, context]
        bounds += [n * self.sampling.max_tokens for n in (limits.calls, limits.turns) if n is not None]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def episodes_per_group(self) -> int:
        """Attempts and continuations of a group, without those that are retries of failed ones."""
        forks = self.forks
        return self.group_size + (forks.attempts * forks.turns * forks.continuations if forks is not None else 0)
