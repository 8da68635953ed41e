"""baseline: what a reward is compared with. y = advantage of a unit (an episode, or a turn where rewards are per turn).

    none       y = x
    mean       y = x - m
    loo        y = x - mean of the others = n / (n - 1) * (x - m)
    std        y = (x - m) / (s + eps),  s^2 = sum (x - m)^2 / (n - ddof)
    batch_std  y = (x - m) / (s_batch + eps): the group's mean, the whole batch's deviation

m, s and n are over the units of one group (by = group), over the continuations of one fork point (by = fork) or over
the whole batch (by = batch). Units are grouped by id, never by position, and a unit that isn't scored is in no group.

1. A group whose values are all equal gives exactly 0, tested on the values: s + eps only makes rounding look large.
2. A group of one gives exactly 0 (`none` apart): it has nothing to be compared with.
3. Episodes are the units by default. Over turns (`reward: per = turn`) a longer episode weighs more in m and s.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Context, Term


class Baseline(Term):
    """What is subtracted from a reward, and what it is divided by."""

    kind: Literal["none", "mean", "loo", "std", "batch_std"] = "std"
    """One of the lines above."""
    by: Literal["group", "fork", "batch"] = "group"
    """Whose rewards are compared."""
    eps: float = 1e-9
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Subtracted from n in the variance."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        """(U,) float64 from x (U,) over the units where `scored` (U,) bool; 0 elsewhere."""
        y = torch.zeros_like(x)
        if self.kind == "none":
            return torch.where(scored, x, y)
        owners, owner = torch.unique(self._owner(len(x), stream)[scored], return_inverse=True)
        y[scored] = self._compare(x[scored], owner, len(owners), context)
        return y

    def _owner(self, units: int, stream: Stream) -> Tensor:
        """(U,) the number of the set that each unit is compared with."""
        if self.by == "batch":
            return torch.zeros(units, dtype=torch.int64)
        of_episode = stream.episodes.group if self.by == "group" else stream.episodes.fork
        return of_episode if units == len(of_episode) else of_episode[stream.turns.episode]

    def _compare(self, x: Tensor, owner: Tensor, n: int, context: Context) -> Tensor:
        if self.by == "batch":
            return self._whole(x, context)
        size = segments.count(owner, n).to(x.dtype)
        low, high = segments.extremes(x, owner, n)
        flat = low == high
        context.sums.add("group/flat", flat)
        context.sums.add("group/size", size)
        context.sums.add("group/single", size == 1)
        y = x - segments.mean(x, owner, n)[owner]
        match self.kind:
            case "loo":
                y = y * (size / (size - 1))[owner]
            case "std":
                spread = segments.total(y * y, owner, n) / (size - self.ddof)
                y = y / (spread.sqrt() + self.eps)[owner]
            case "batch_std":
                count, _, square = context.mean_and_square(x)
                y = y / ((square / max(count - self.ddof, 1.0)) ** 0.5 + self.eps)
        return torch.where(flat[owner], torch.zeros_like(y), y)

    def _whole(self, x: Tensor, context: Context) -> Tensor:
        """Compares over the whole batch, over all ranks."""
        n, mean, square = context.mean_and_square(x)
        y = x - mean
        # Equal values leave rounding in `square`, which a division by s would scale up to advantages of size 1. The
        # bound is the rounding of n sums in float64, relative to the mean.
        if n < 2 or square <= (n * 1e-15 * max(abs(mean), 1e-300)) ** 2:
            return torch.zeros_like(y)
        match self.kind:
            case "loo":
                y = y * (n / (n - 1))
            case "std" | "batch_std":
                y = y / ((square / (n - self.ddof)) ** 0.5 + self.eps)
        return y


def flat_groups(x: Tensor, scored: Tensor, group: Tensor, n: int) -> Tensor:
    """(n,) bool: groups whose scored units all earned the same (or that have none)."""
    low, high = segments.extremes(x[scored], group[scored], n)
    return low >= high
