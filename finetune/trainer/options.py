"""The settings of an optimiser, which are also the options of a trainer, and the profiles of training: defaults that
depend on the model's size. Doesn't import torch."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from ...agents.setup.profiles import EPISODES, SLOTS, Default, fill, shape_of
from ...tapes.common.config import Config
from .schedule import Schedule

if TYPE_CHECKING:
    import torch

ConfigT = TypeVar("ConfigT", bound=BaseModel)

# The key, then the values for `tiny`, `small` and `large`, the source, and from which factor on a value is called far.
# Values for adapters, `light` and `light` with adapters may follow (`Default`).
PROFILES: tuple[Default, ...] = (
    Default("loop.optimiser.lr", 3e-4, 1e-6, 1e-6, "TRL's GRPOConfig; LoRA Without Regret", 10, 1e-5, 1e-5, 3e-4),
    Default(
        "loop.optimiser.schedule",
        {},
        {"warmup": 10},
        {"warmup": 10},
        "verl's DAPO on 7B; light: for short runs",
        0,
        None,
        {"warmup": 3},
    ),
    Default("loop.optimiser.gradient_checkpointing", False, True, True, "TRL's GRPOConfig", 0, None, False),
    Default("loop.optimiser.micro_tokens", 4096, 4096, 4096, "light: activations of 1024 tokens", 0, None, 1024),
    Default(
        "loop.optimiser.autocast",
        None,
        None,
        None,
        "light: if the CPU has AVX512-BF16 or AMX",
        0,
        None,
        None,
        "bfloat16",
    ),
    Default("loop.groups", 16, 16, 16, "light: 64 answers an update, for a CPU", 0, None, 8),
    Default("loop.group_size", 16, 8, 16, "TRL's GRPOConfig: 8; DAPO: 16", 4, None),
    *(row._replace(key=f"loop.{row.key}") for row in EPISODES),
    Default("loop.group_deadline", 300.0, 1800.0, 1800.0, "as long as the rest of an episode may take", 0, None),
    Default("warm.optimiser.lr", 3e-3, 2e-5, 2e-5, "TRL's SFTConfig; LoRA Without Regret", 10, 2e-4),
    Default("warm.optimiser.gradient_checkpointing", False, True, True, "TRL's SFTConfig", 0, None),
    SLOTS,
    Default("trainer.threads", 1, None, None, "torch's own number; a tiny model gains nothing by more", 0, None),
    Default("evaluation.fraction", 0.25, 0.1, 0.1, "a tenth of few tasks is too few to see a rise", 0, None),
    Default("evaluation.engine", None, "loop", "loop", "another copy of the weights costs memory", 0, None),
)
CRITICS: dict[str, tuple[Default, ...]] = {
    "own": (
        Default("loop.critic.optimiser.lr", 1e-3, 1e-5, 1e-5, "verl's critic; LoRA Without Regret", 10, 1e-4),
        Default("loop.critic.optimiser.schedule", {}, {"warmup": 10}, {"warmup": 10}, "as the policy's", 0, None),
        Default("loop.critic.optimiser.gradient_checkpointing", False, True, True, "as the policy's", 0, None),
    ),
    "policy": (Default("loop.critic.optimiser.lr", 1e-3, 1e-3, 1e-3, "a new head learns from scratch", 10, None),),
}
"""For each `body` of a critic, its settings."""


def from_scratch(key: str) -> float:
    """The learning rate for a model made from scratch, which is also its default if no profile applies."""
    return next(row.tiny for row in (*PROFILES, *CRITICS["policy"]) if row.key == key)


class OptimiserConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=from_scratch("loop.optimiser.lr"), gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, which is added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights in matrices. Norms and biases have none."""
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Maximum norm of the gradient. A larger gradient is scaled down to this norm. None disables clipping."""
    schedule: Schedule = Schedule()
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay, per optimiser step, of a moving average of the weights. None keeps no average."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens per forward pass, including padding."""
    pack: bool | None = None
    """Whether to put rows end to end in one sequence instead of padding them. With None, rows are packed if the
    attention kernel knows their boundaries (flash attention on a GPU). Packing is exact with other kernels too, but
    slower than padding."""
    autocast: Literal["bfloat16"] | None = None
    """Dtype of the forward pass. Weights, output layer and optimiser state stay in float32. None uses float32 for
    everything."""
    gradient_checkpointing: bool = False
    """Whether to compute each layer's activations again in the backward pass instead of storing them. This saves memory
    and takes more time. With the embedded engine, `train` turns it on for the policy only if it would need more than
    0.8 of the free memory without."""

    @property
    def forward_dtype(self) -> torch.dtype | None:
        """`autocast` as a dtype of torch."""
        import torch

        return None if self.autocast is None else getattr(torch, self.autocast)


class CriticOptimiserConfig(OptimiserConfig):
    """AdamW for a critic. Its defaults suit a head that learns from scratch."""

    lr: float = Field(default=from_scratch("loop.critic.optimiser.lr"), gt=0)


def fitted(config: ConfigT) -> ConfigT:
    """Return the configuration with each unset setting filled from the profile.

    Logs which profile applies and why. Also logs a warning for each number that is far from the profile's number.
    Hosted models and models that aren't on this machine have no profile. If a trained player has no optimiser settings,
    it gets the loop's settings from the user. The profile of the player's own model fills the others.
    """
    whole: Any = config
    made: Any = fill(config, PROFILES, config)
    for name, player in _trained(config).items():
        if player.optimiser is None and "optimiser" in player.model_fields_set:
            continue  # recorded as unset, so that the loop's optimiser applies
        own = player.model_copy(update={"optimiser": player.optimiser or whole.loop.optimiser})
        rows = [row for row in PROFILES if row.key.startswith("loop.optimiser.")]
        own = fill(own, [row._replace(key=row.key.removeprefix("loop.")) for row in rows], own, f"players.{name}.")
        if own.optimiser != (player.optimiser or made.loop.optimiser):
            made = made.model_copy(update={"players": {**made.players, name: own}})
    return fit_critic(made)


def fit_critic(config: ConfigT) -> ConfigT:
    """Return the configuration with the unset settings of `loop.critic` filled from the profile of the largest trained
    model. Without a critic, the configuration is unchanged."""
    whole: Any = config
    critic = getattr(getattr(whole, "loop", None), "critic", None)
    if critic is None:
        return config
    shapes = [(shape_of(one.engine.model), one) for one in (whole, *_trained(whole).values())]
    largest = max(shapes, key=lambda found: inf if found[0] is None else found[0].parameters)[1]
    return fill(config, CRITICS[critic.body], largest)


def _trained(config: Any) -> dict[str, Any]:
    return {name: one for name, one in getattr(config, "players", {}).items() if not getattr(one, "frozen", True)}
