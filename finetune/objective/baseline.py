"""baseline: turns rewards into advantages by comparing each reward with others. x is the reward of a unit, and y its
advantage. A unit is an episode, or a turn if rewards are per turn.

    none       y = x
    mean       y = x - m
    loo        y = x - mean of the others = n / (n - 1) * (x - m)
    std        y = (x - m) / (s + eps),  s^2 = sum (x - m)^2 / (n - ddof)
    batch_std  y = (x - m) / (s_batch + eps), with the group's mean and the whole batch's deviation
    decoupled  y = Y / (s_batch(Y) + eps),  Y = sum_k w_k (c_k - m(c_k)) / (s(c_k) + eps)

c_k is a component of the reward, and w_k its weight. m (mean), s (standard deviation) and n (count) are taken over the
units in one group (by = group), the continuations from one fork point (by = fork) or the whole batch (by = batch).
Units are grouped by id, never by position. An unscored unit is in no group.

If the units are turns and `credit` is `returns` or `gae`, x is the turn's return or its GAE, so the credit comes before
the baseline. By group and by fork, the k-th turn of an attempt is compared with the k-th turns of the others. All
tokens of the turn get y.

1. If all rewards in a group are equal, all its advantages are exactly 0. The rewards are compared with each other,
   because s may be a rounding error instead of 0. A division by s + eps would then magnify this error.
2. The advantage in a group of one is exactly 0 (except with `none`), because there is no other unit to compare with.
3. If the units are turns and credit is `broadcast`, an episode with more turns has more weight in m and s.
4. Returns before the baseline follow rLLM (`stepwise_advantage.mode = per_step`, which compares `mc_returns` at the
   same step) and GiGPO (Feng et al. 2025, arXiv 2505.10978, which compares them in the same state). GRPO with process
   supervision (DeepSeekMath, arXiv 2402.03300) subtracts the mean from each step's reward first and then adds up the
   differences, so every further turn costs the mean. Here, k counts turns with own tokens, and a k-th turn that only
   one attempt has gets advantage 0. With by = batch, all returns of the batch are compared.
5. `decoupled` is GDPO (Liu et al. 2026, arXiv 2601.05242), with the weights as in TRL (`normalize_then_sum`). It needs
   one reward per episode. What a `shape` adds to the reward is one more component, of weight 1. An episode that lacks a
   component isn't compared in it. Y has mean 0 in each group, so the batch's mean isn't subtracted. Flat groups then
   keep exactly 0.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, assert_never

import torch
from pydantic import model_validator
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Context, Kinds, Term


class Baseline(Term):
    """Base class of baselines, which compare each reward with others. Derive from it to write your own baseline."""

    by: Literal["group", "fork", "batch"] = "group"
    """Which rewards are compared with each other: all in a `group`, the continuations from one `fork` point, or the
    whole `batch`."""

    @property
    def compares(self) -> bool:
        """True if an advantage depends on the rewards of other units."""
        return True

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        """Return the advantages (U,) float64 for the rewards `x` (U,). There is one reward for each episode, or for
        each turn. With `credit: returns`, the reward of a turn is its return.

        `scored` (U,) bool marks the episodes or turns that have a reward. Elsewhere, `x` and the result are 0."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the advantage of each reward there")

    def owner(self, units: int, stream: Stream) -> Tensor:
        """Return, for each unit, the index (U,) int64 of the set in which its reward is compared.

        A unit is an episode or a turn, and `units` is their number U. A set is a group, a fork point or the batch.
        """
        if self.by == "batch":
            return torch.zeros(units, dtype=torch.int64)
        of_episode = stream.episodes.group if self.by == "group" else stream.episodes.fork
        if units == len(of_episode) and stream.turns.place is None:
            return of_episode
        of_turn, place = of_episode[stream.turns.episode], stream.turns.place
        return of_turn if place is None else of_turn * (units + 1) + place


class GroupBaseline(Baseline):
    """Subtracts the mean of the compared rewards from each reward, and may divide by a standard deviation."""

    kind: Literal["none", "mean", "loo", "std", "batch_std"] = "std"
    """How rewards are compared, as listed above."""
    eps: float = 1e-9
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """Subtracted from the count n in the divisor of the variance."""

    @property
    def compares(self) -> bool:
        return self.kind != "none"

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        y = torch.zeros_like(x)
        if self.kind == "none":
            return torch.where(scored, x, y)
        owners, owner = torch.unique(self.owner(len(x), stream)[scored], return_inverse=True)
        y[scored] = self._compare(x[scored], owner, len(owners), context)
        return y

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
            case "none" | "mean":
                pass
            case "loo":
                y = y * (size / (size - 1))[owner]
            case "std":
                spread = segments.total(y * y, owner, n) / (size - self.ddof)
                y = y / (spread.sqrt() + self.eps)[owner]
            case "batch_std":
                count, _, square = context.mean_and_square(x)
                y = y / ((square / max(count - self.ddof, 1.0)) ** 0.5 + self.eps)
            case _:
                assert_never(self.kind)
        # The mask also replaces the NaN and inf of a group of one, where n / (n - 1) and 0 / (n - ddof) divide by 0.
        return torch.where(flat[owner], torch.zeros_like(y), y)

    def _whole(self, x: Tensor, context: Context) -> Tensor:
        """Compare over the whole batch, across all ranks."""
        n, mean, square = context.mean_and_square(x)
        y = x - mean
        # If all rewards are equal, `square` has only rounding error, which a division by s would scale to advantages of
        # size 1. The bound is the rounding error of n float64 additions, relative to the mean.
        if n < 2 or square <= (n * 1e-15 * max(abs(mean), 1e-300)) ** 2:
            return torch.zeros_like(y)
        match self.kind:
            case "none" | "mean":
                pass
            case "loo":
                y = y * (n / (n - 1))
            case "std" | "batch_std":
                y = y / ((square / (n - self.ddof)) ** 0.5 + self.eps)
            case _:
                assert_never(self.kind)
        return y


class DecoupledBaseline(Baseline):
    """Compares each component of the reward by itself, and adds up the results (GDPO). In a sum of components, the one
    with the largest scale would decide the comparison."""

    kind: Literal["decoupled"] = "decoupled"
    eps: float = 1e-4
    """Added to each standard deviation."""
    ddof: Literal[0, 1] = 1
    """Subtracted from the count n in the divisor of a variance."""

    @model_validator(mode="after")
    def _of_groups(self) -> Self:
        if self.by == "batch":
            raise ValueError("baseline 'decoupled' compares within groups or forks: set by to one of these, not batch")
        return self

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        table = stream.episodes
        if len(x) != len(table.tape) or stream.turns.place is not None:
            raise ValueError(
                "baseline 'decoupled' compares the components of whole episodes, and the rewards are per turn: set "
                "reward.per to episode, or take a baseline of kind std"
            )
        single = GroupBaseline(by=self.by, eps=self.eps, ddof=self.ddof)
        single(x, scored, stream, context)  # for the metrics of groups, which are about the whole reward
        y, rest = torch.zeros_like(x), x.clone()
        for name in sorted({name for weights in table.weights for name in weights}):
            weight = x.new_tensor([own.get(name, 0.0) for own in table.weights])
            value = x.new_tensor([own.get(name, float("nan")) for own in table.components])
            known = scored & ~value.isnan()
            value = torch.where(known, value, 0.0)
            y += weight * single(value, known, stream, Context())
            rest -= weight * value
        # The difference of equal sums is a rounding error, whose deviation would be as large as any other.
        rest = torch.where(rest.abs() <= 1e-9 * x.abs().clamp(min=1.0), 0.0, rest)
        y += single(rest, scored, stream, Context())
        n, _, square = context.mean_and_square(y[scored])
        return y / ((square / max(n - self.ddof, 1.0)) ** 0.5 + self.eps)


AnyBaseline = Annotated[Baseline, Kinds(GroupBaseline, DecoupledBaseline)]


def flat_groups(x: Tensor, scored: Tensor, group: Tensor, n: int) -> Tensor:
    """Return a mask (n,) that is True for each flat group: all rewards in it are equal, or it has no reward.

    `x` are the rewards, `scored` marks the rewards that count, and `group` has the index of each reward's group, from 0
    to n - 1.
    """
    low, high = segments.extremes(x[scored], group[scored], n)
    return low >= high
