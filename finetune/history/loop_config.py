"""Settings of the loop and of warm starts, as pydantic models: Python first, a file and `--set` on top."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ...agents.episode.limits import Limits
from ...tapes.common.config import Config
from ...tapes.records import Sampling
from ..trainer.schedule import Schedule


class OptimiserConfig(Config):
    """AdamW and its schedule."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; None for no bound."""
    schedule: Schedule = Schedule()
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay, per optimiser step, of a running average of the weights that is kept beside them; None: none is."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens forwarded at once, padding included."""
    autocast: Literal["bfloat16"] | None = None
    """Forward in that dtype, while weights, output layer and optimiser state stay in float32; None: all in float32."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again on the way back, in place of keeping them: less memory, more time."""


class WarmStartConfig(Config):
    """SFT on recorded tapes."""

    updates: int = Field(default=300, ge=0)
    batch: int = Field(default=64, ge=1)
    """Tapes per update."""
    optimiser: OptimiserConfig = OptimiserConfig(lr=3e-3)


class CriticConfig(Config):
    """The critic of a recipe that takes values, as `ppo` does."""

    body: Literal["own", "policy"] = "own"
    """`own`: a copy of the policy's body, trained with the head; `policy`: a head alone, on the policy's states."""
    optimiser: OptimiserConfig = OptimiserConfig(lr=1e-3)
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was and still be pulled, in units of reward; None for no bound."""
    normalised: bool = True
    """Targets are scaled by their running mean and deviation, and the critic begins at the mean of the first ones."""
    passes: int = Field(default=4, ge=1)
    """Optimiser steps on each update's targets."""
    first: int = Field(default=0, ge=0)
    """Updates at the beginning in which the critic learns and the policy stays as it is."""

    @model_validator(mode="after")
    def _keeps_activations(self) -> CriticConfig:
        if self.body == "policy" and self.optimiser.gradient_checkpointing:
            raise ValueError(
                "a critic that reads the policy's states goes back through its head alone: leave "
                "optimiser.gradient_checkpointing out, or set body to `own`"
            )
        return self


class ForkConfig(Config):
    """Continuations of a group's attempts, for a recipe that compares them: `baseline: {by: fork}`."""

    attempts: int = Field(default=1, ge=1)
    """Attempts of each group that are gone on from, drawn from those with a turn inside."""
    turns: int = Field(default=1, ge=1)
    """Turns of each of them, drawn from those inside."""
    continuations: int = Field(default=4, ge=2)
    """Episodes that go on from each turn."""


class ProcessesConfig(Config):
    """How the processes that were launched together share the work of an update."""

    shard: bool = False
    """Each keeps a part of every weight, gradient and optimiser state (FSDP2); else a copy of all of them."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that one waits for the others, a batch of rollouts included, before it gives up."""


class LoopConfig(Config):
    """The async loop: rollouts of groups go on while the trainer updates on those that closed."""

    updates: int = Field(default=40, ge=0)
    """Versions of the policy that the loop makes."""
    groups: int = Field(default=16, ge=1)
    """Groups of a rollout batch."""
    group_size: int = Field(default=16, ge=1)
    """Attempts per group."""
    rollouts: int = Field(default=1, ge=1)
    """Rollout batches that one update trains on, in one optimiser step; what is compared by batch is compared within
    one of them."""
    epochs: int = Field(default=1, ge=1)
    """How often an update goes over its batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps of an epoch: episodes are cut into so many parts."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that are trained, as `planner/searcher`; what others say is context. None: all are."""
    by_agent: bool = False
    """Each agent of an episode is compared with itself in the other attempts, by the rewards that are its alone
    (components named `name@path`) and those of all; False: an episode is one whole."""
    extra_groups: int | None = Field(default=None, ge=0)
    """With a recipe that drops flat groups, how many more may be sampled in their place for one update, which then
    trains on what there is; None: three times its groups."""
    forks: ForkConfig | None = None
    """None: no attempt is gone on from."""
    demonstrations: int = Field(default=0, ge=0)
    """With a recipe that has an `nll` regulariser, imitated tapes in each update, from those of the warm start."""
    max_lag: int = Field(default=1, ge=0)
    """Updates that a trained token's policy may be behind; 0 is synchronous."""
    max_concurrent: int = Field(default=512, ge=1)
    """Episodes in flight at once; rounded down to whole groups, at least one."""
    recipe: str = "grpo"
    changes: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe's terms, as in `{"baseline": {"eps": 1e-4}}`."""
    optimiser: OptimiserConfig = OptimiserConfig()
    critic: CriticConfig | None = None
    """None: where the recipe takes values, a critic by the defaults; else none."""
    sampling: Sampling = Sampling(max_tokens=64)
    limits: Limits = Limits(turns=8, seconds=120.0)
    publish: Literal["reprefill", "drain"] = "reprefill"
    """What becomes of completions in flight when weights change; both keep log-probs exact."""
    sleep: bool = False
    """The servers give their GPU's memory away while an update is computed, as to a trainer on the same GPU; with
    max_lag 0, since nothing is sampled then."""
    sampler_tolerance: float | None = Field(default=1e-4, gt=0)
    """With max_lag 0, the largest |log-prob at sampling - log-prob in training| allowed (nats); None: not checked."""
    group_deadline: float = Field(default=300.0, gt=0)
    """Seconds after which a group closes with what it has; what still runs is cancelled."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Updates."""
    keep_checkpoints: int | None = Field(default=3, ge=1)
    """None: all. The base, the last, the best measured and those at the end of a phase always stay."""
    keep_checkpoint_bytes: int | None = Field(default=None, ge=0)
    """The oldest go until all that stay take no more; None: no bound."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group before the update."""

    @field_validator("sampling")
    @classmethod
    def _trainable(cls, sampling: Sampling) -> Sampling:
        if not sampling.exact:
            raise ValueError(
                "what is sampled so can't be trained on: its log-probs are not those of the distribution "
                "drawn from. Sample with a temperature above 0, no top_p, no top_k and no extra beside "
                "`stop`"
            )
        return sampling

    @model_validator(mode="after")
    def _agrees(self) -> LoopConfig:
        if self.rollouts > 1 and self.minibatches > 1:
            raise ValueError(
                f"{self.rollouts} rollout batches in one step and {self.minibatches} steps on one rollout "
                "batch exclude each other: set rollouts or minibatches to 1"
            )
        if self.sleep and self.max_lag:
            raise ValueError(
                f"sleep puts the servers to sleep for every update, and with max_lag={self.max_lag} they "
                "sample meanwhile: set max_lag=0, or leave sleep out"
            )
        if 0 < self.demonstrations < self.minibatches:
            raise ValueError(
                f"{self.demonstrations} demonstrations can't be cut into {self.minibatches} mini-batches: "
                "give at least as many"
            )
        if self.by_agent and (self.rollouts > 1 or self.shuffle_rewards):
            raise ValueError(
                "by_agent compares agents within one rollout batch by their own rewards: leave rollouts "
                "at 1 and shuffle_rewards out"
            )
        if self.agents is not None and not self.agents:
            raise ValueError(
                "agents is empty, so that nobody would be trained: name at least one path, or leave it out to train all"
            )
        return self

    @property
    def episodes_per_group(self) -> int:
        """Attempts and continuations of a group, sampled again ones apart."""
        forks = self.forks
        return self.group_size + (forks.attempts * forks.turns * forks.continuations if forks is not None else 0)
