"""The options for the trainers of a policy and of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .logprobs import MICRO_TOKENS
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options that the trainers of policy and critic share: AdamW, the learning-rate schedule and the use of
    memory."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    """Largest gradient norm. None sets no bound."""
    schedule: Schedule = Schedule()
    micro_tokens: int = MICRO_TOKENS
    """Maximum number of tokens in a micro-batch. A longer row is a micro-batch of its own."""
    autocast: torch.dtype | None = None
    """Dtype of the forward pass, such as bfloat16. The weights and the output layer keep their own dtype."""
    gradient_checkpointing: bool = False
    offload: bool = False
    """Whether the optimiser's state is kept in main memory (`OffloadedAdamW`)."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(StepOptions):
    """Options of a policy's trainer."""

    critic_first: int = 0
    """Number of updates at the start in which only the critic learns."""
    ema: float | None = None
    """Decay of the running average of the weights in `Trainer.averaged`. None keeps no average."""
    pack: bool | None = None
    """Whether to pack rows end to end instead of padding them. If None, rows are packed on a GPU with a variable-length
    attention kernel, and padded otherwise."""
