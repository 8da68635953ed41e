"""adjust: changes the advantages of the tokens, after `credit` has computed them. Several adjustments apply in the
order in which the recipe lists them.

    whiten  A = (A - m) / s over the tokens of the batch:  s = sqrt(max(var, eps))  (how = floor)
                                                            s = sqrt(var) + eps      (how = add)
    clip    A = min(max(A, -limit), limit); the share outside is counted before clipping
    relu    A = max(A, 0): learn only from what went better
    groups  A = weight of the group * A: `flat` for a group without spread, else min(groups / groups with spread, cap);
            1 for all groups if no group has spread (clip-filter weights)

1. `whiten` gives exactly 0 if all advantages are equal.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Context, Kinds, Term


class Adjust(Term):
    """Base class of adjustments, which change the advantages of all tokens. Derive from it to write your own
    adjustment."""

    def __call__(self, a: Tensor, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        """Return the adjusted advantages (T,) float64.

        `a` (T,) are the advantages so far. `entered` (T,) bool marks the tokens that enter the update. The caller sets
        the result to 0 at all other tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the adjusted advantages there")


class Whiten(Adjust):
    """Shifts and scales the advantages of the tokens that enter to mean 0 and deviation 1, or only shifts them."""

    kind: Literal["whiten"] = "whiten"
    ddof: Literal[0, 1] = 0
    """Subtracted from the count n in the variance."""
    eps: float = 1e-8
    """Keeps the divisor above 0."""
    how: Literal["floor", "add"] = "floor"
    """With `floor`, eps is the smallest variance. With `add`, eps is added to the standard deviation."""
    centre_only: bool = False
    """Whether to subtract the mean without dividing."""

    def __call__(self, a: Tensor, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        n, mean, square = context.mean_and_square(a[entered])
        # If all advantages are equal, `square` has only rounding error, which the division would scale to size 1 (see
        # baseline.py).
        if n < 2 or square <= (n * 1e-15 * max(abs(mean), 1e-300)) ** 2:
            return torch.zeros_like(a)
        var = square / (n - self.ddof)
        scale = 1.0 if self.centre_only else max(var, self.eps) ** 0.5 if self.how == "floor" else var**0.5 + self.eps
        return torch.where(entered, (a - mean) / scale, torch.zeros_like(a))


class ClipAdvantage(Adjust):
    """Bounds advantages to [-limit, limit]."""

    kind: Literal["clip"] = "clip"
    limit: float = Field(gt=0)
    """Largest absolute advantage."""

    def __call__(self, a: Tensor, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        context.sums.add("advantage/clipped", (a.abs() > self.limit)[entered])
        return a.clamp(-self.limit, self.limit)


class Relu(Adjust):
    """Sets negative advantages to 0."""

    kind: Literal["relu"] = "relu"

    def __call__(self, a: Tensor, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        return a.clamp(min=0)


class GroupWeights(Adjust):
    """Raises the weights of the other groups if some groups have no spread (all of their rewards are equal)."""

    kind: Literal["groups"] = "groups"
    flat: float = Field(default=1.0, ge=0)
    """Weight of the advantages in a group without spread. Most baselines make these advantages 0 anyway. The weight
    doesn't apply to regularisers."""
    cap: float = Field(default=3.0, gt=0)
    """Largest weight of a group with spread."""

    def __call__(self, a: Tensor, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        return a * self.weights(stream, context).to(a.dtype)[stream.group]

    def weights(self, stream: Stream, context: Context) -> Tensor:
        """Return the weight of each group, (G,) float64. The groups of all ranks are counted, so every rank computes
        the same weights."""
        table = stream.episodes
        scored = table.trains & ~table.reward.isnan()
        seen = torch.zeros(len(table.groups), dtype=torch.bool)
        seen[table.group[scored]] = True
        low, high = segments.extremes(table.reward[scored], table.group[scored], len(seen))
        spread = high > low
        counts = context.add_up(torch.tensor([float(seen.sum()), float(spread.sum())], dtype=torch.float64))
        groups, informative = counts.tolist()
        if not informative:
            return torch.ones_like(low)
        return torch.full_like(low, self.flat).masked_fill(spread, min(groups / informative, self.cap))


AnyAdjust = Annotated[Adjust, Kinds(Whiten, ClipAdvantage, Relu, GroupWeights)]
