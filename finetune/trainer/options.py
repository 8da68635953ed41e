"""The settings of an optimiser, which are also the options of a trainer. Doesn't import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...tapes.common.config import Config
from .schedule import Schedule
from .training_profiles import from_scratch

if TYPE_CHECKING:
    import torch


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
    and takes more time."""

    @property
    def forward_dtype(self) -> torch.dtype | None:
        """`autocast` as a dtype of torch."""
        import torch

        return None if self.autocast is None else getattr(torch, self.autocast)


class CriticOptimiserConfig(OptimiserConfig):
    """AdamW for a critic. Its defaults suit a head that learns from scratch."""

    lr: float = Field(default=from_scratch("loop.critic.optimiser.lr"), gt=0)
