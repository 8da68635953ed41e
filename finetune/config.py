"""Settings of the loop and of warm starts, as pydantic models: Python first, a file and `--set` on top."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..agents.limits import Limits
from ..tapes.config import Config
from ..tapes.records import Sampling
from .schedule import Schedule


class OptimiserConfig(Config):
    """AdamW and its schedule."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; None for no bound."""
    schedule: Schedule = Schedule()
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens forwarded at once, padding included."""


class WarmStartConfig(Config):
    """SFT on recorded tapes."""

    updates: int = Field(default=300, ge=0)
    batch: int = Field(default=64, ge=1)
    """Tapes per update."""
    optimiser: OptimiserConfig = OptimiserConfig(lr=3e-3)


class LoopConfig(Config):
    """The async loop: rollouts of groups go on while the trainer updates on those that closed."""

    updates: int = Field(default=40, ge=0)
    groups: int = Field(default=16, ge=1)
    """Groups per update."""
    group_size: int = Field(default=16, ge=1)
    """Attempts per group."""
    max_lag: int = Field(default=1, ge=0)
    """Updates that a trained token's policy may be behind; 0 is synchronous."""
    max_concurrent: int = Field(default=512, ge=1)
    """Episodes in flight at once; rounded down to whole groups, at least one."""
    recipe: str = "grpo"
    changes: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe's words, as in `{"baseline": {"eps": 1e-4}}`."""
    optimiser: OptimiserConfig = OptimiserConfig()
    sampling: Sampling = Sampling(max_tokens=64)
    limits: Limits = Limits(turns=8, seconds=120.0)
    publish: Literal["reprefill", "drain"] = "reprefill"
    """What becomes of completions in flight when weights change; both keep log-probs exact."""
    sampler_tolerance: float | None = Field(default=1e-4, gt=0)
    """With max_lag 0, the largest |log-prob at sampling - log-prob in training| allowed (nats); None: not checked."""
    group_deadline: float = Field(default=300.0, gt=0)
    """Seconds after which a group's failed attempts are no longer sampled again."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Updates."""
    keep_checkpoints: int | None = Field(default=3, ge=1)
    shuffle_rewards: bool = False
    """A control experiment: rewards are shuffled within each group before the update."""
