"""Estimators of the KL between two policies from the log-probs of a sampled token, with d = lp - ref.

    k1 = d          expected value KL(pi || ref); as a loss its expected gradient is 0
    k2 = d^2 / 2    as a loss its expected gradient is exactly the gradient of KL(pi || ref)
    k3 = e^-d - 1 + d    expected value KL(pi || ref), never negative; as a loss it descends KL(ref || pi)

The coefficient of a KL in the loss (regulariser) or in the reward (shape) is fixed or adaptive. An adaptive coefficient
changes after each update. kl is the update's mean k1 per token, and n is its number of episodes:

    beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon

1. Above x = 20, `exp` continues along the tangent of e^x, so that its value and gradient stay finite where e^x would
   overflow.
2. An adaptive coefficient is multiplied by at least 0, whatever n is. A negative coefficient would reward divergence.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from pydantic import Field, ValidationInfo
from torch import Tensor

from .term import Term

Estimator = Literal["k1", "k2", "k3"]

STEEP = 20.0
"""Exponent above which `exp` is linear. With this bound, a wrong log-prob of one token can't make the loss infinite."""


def exp(x: Tensor) -> Tensor:
    """Return e^x, or its tangent at STEEP for x above STEEP. A clamp would have gradient 0 there, and the tangent
    doesn't."""
    return torch.exp(x.clamp(max=STEEP)) * (1 + (x - STEEP).clamp(min=0))


def estimate(kind: Estimator, lp: Tensor, ref: Tensor) -> Tensor:
    """Return the KL estimate for each token, in the shape of `lp`."""
    d = lp - ref
    match kind:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return exp(-d) - 1 + d
        case _:
            assert_never(kind)


class Adaptive(Term):
    """A proportional controller, which changes the coefficient of a KL after each update to keep the KL near a
    target."""

    target: float = Field(gt=0)
    """The KL to keep, in nats per token."""
    horizon: float = Field(gt=0)
    """Number of episodes in which the coefficient can change by at most 20 %. With a larger number, it changes more
    slowly."""

    def next(self, beta: float, kl: float, episodes: int) -> float:
        """Return the coefficient for the next update. `kl` is the KL in this update, in nats per token. `episodes` is
        the number of episodes in this update."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return beta * max(0.0, 1 + error * episodes / self.horizon)


def moves(adaptive: Adaptive | None, info: ValidationInfo) -> Adaptive | None:
    """Validate the field `adaptive` of a KL: a coefficient that begins at 0 would stay there."""
    if adaptive is not None and not info.data.get("beta", 1):
        raise ValueError("adaptive multiplies beta, and beta is 0: set the coefficient of the first update above 0")
    return adaptive
