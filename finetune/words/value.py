"""value: the critic's loss at one token. V its value now, v the one the rollout batch met, R the target A + v.

    l = 1/2 max((V - R)^2, (v + clip(V - v, -c, c) - R)^2)        with clip c; without, 1/2 (V - R)^2

It has its own optimiser and denominator: a token mean over what entered, whatever the recipe weighs by.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from .word import Context, Word


class Value(Word):
    """How far the critic is off."""

    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was and still be pulled; None: no bound."""

    def __call__(self, value: Tensor, old: Tensor, target: Tensor, context: Context) -> Tensor:
        """(n,) losses."""
        error = (value - target).square()
        if self.clip is None:
            return error / 2
        bounded = (old + (value - old).clamp(-self.clip, self.clip) - target).square()
        context.sums.add("value/clipped", (bounded > error).detach())
        return torch.maximum(error, bounded) / 2
