"""How a trainer steps, as values: the options of a policy's trainer and of a critic's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .logprobs import MICRO_TOKENS
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of every trainer: its AdamW, its learning-rate schedule, and how it fits a batch into memory."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    """Largest gradient norm. None: no bound."""
    schedule: Schedule = Schedule()
    micro_tokens: int = MICRO_TOKENS
    """Tokens of a micro-batch, at most; a longer row is a micro-batch of its own."""
    autocast: torch.dtype | None = None
    """The dtype of the forward pass (bfloat16). Weights and output layer keep theirs."""
    gradient_checkpointing: bool = False

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * self.schedule.factor(step)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(StepOptions):
    """Options of a policy's trainer."""

    critic_first: int = 0
    """The first updates, in which only the critic learns."""
    ema: float | None = None
    """Decay of a running average of the weights, which is kept in `Trainer.averaged`."""
    pack: bool | None = None
    """Rows end to end instead of padded. None: packed if the attention kernel supports variable lengths."""
