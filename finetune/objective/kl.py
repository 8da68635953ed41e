"""How far two log-probs of a sampled token are apart. d = lp - ref.

    k1 = d          expected value KL(pi || ref); as a loss its expected gradient is 0
    k2 = d^2 / 2    as a loss its expected gradient is exactly that of KL(pi || ref)
    k3 = e^-d - 1 + d    expected value KL(pi || ref), never negative; as a loss it descends KL(ref || pi)

1. Above x = 20, e^x continues along its tangent. So value and gradient stay finite and large where e^x would overflow.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

STEEP = 20.0
"""Above this exponent `exp` continues as a straight line: one token's broken log-prob can't make the loss infinite."""


def exp(x: Tensor) -> Tensor:
    """e^x up to STEEP, its tangent there above."""
    return torch.exp(x.clamp(max=STEEP)) * (1 + (x - STEEP).clamp(min=0))


def estimate(kind: Estimator, lp: Tensor, ref: Tensor) -> Tensor:
    """One number per token, in the shape of lp."""
    d = lp - ref
    match kind:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case _:
            return exp(-d) - 1 + d
