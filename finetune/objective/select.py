"""select: which groups and episodes enter an update, and which of their tokens keep their loss.

Whole groups and episodes are dropped first. The loss is divided by the tokens (T) or episodes (E) that are left then.
After that, single tokens may be dropped. They still count in T, so dropping a token doesn't raise the weight of the
others. For each reason, a metric reports the share that was dropped.

    flat         drop groups whose scored episodes all have the same reward, whatever it is (dynamic sampling); if the
                 baseline compares by fork, the test is on the continuations of each fork point instead
    bounds       drop episodes whose reward lies outside [low, high]
    keep         keep the best `keep` episodes of each group, or those with the widest spread (half best, half worst)
    mean_bounds  drop groups whose mean reward lies outside [low, high]
    entropy_top  keep only this share of each episode's tokens, those with the highest entropy, and at least one
    kl_mask      drop tokens whose (lp - old)^2 / 2 is above this
    shift_mask   drop tokens whose probability has already moved in the advantage's direction by more than this

1. An episode enters only if its status allows training. A recipe with advantages also needs the episode's reward, and
   trains only on tokens with a known log-prob at sampling.
2. `keep` and `mean_bounds` apply before the baseline. Only the episodes that they keep count in the statistics: in
   `flat`, in the baseline and elsewhere. `keep` chooses among the episodes within `bounds`. Flat groups stay in the
   statistics. Without `keep`, episodes outside `bounds` stay in the statistics too.
3. `keep_when = after_baseline` is the order of earlier versions, for the runs that they recorded. In this order, `keep`
   applies last, and the episodes that it drops count in the statistics too.
4. `entropy_top` chooses among the tokens that enter, and breaks ties by position. Entropies are rounded to six decimals
   first, because the entropies of equal contexts differ by rounding errors that depend on the micro-batches.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .baseline import flat_groups
from .term import Context, Term


class Select(Term):
    """Which groups, episodes and tokens an update leaves out."""

    flat: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop a group whose scored episodes all have the same reward."""
    bounds: tuple[float | None, float | None] | None = None
    """An episode enters if its reward is in this range (low, high), where None leaves an end open. An unscored episode
    is outside the range."""
    keep: int | None = Field(default=None, ge=1)
    """Number of episodes kept in each group. If None, all are kept."""
    keep_how: Literal["best", "spread"] = "best"
    """Which episodes `keep` keeps: the best, or those with the widest spread (half best, half worst)."""
    keep_when: Literal["before_baseline", "after_baseline"] = "before_baseline"
    """Whether `keep` applies before or after the baseline. If it applies before, the baseline compares only the
    episodes that are kept."""
    mean_bounds: tuple[float | None, float | None] | None = None
    """A group enters if its mean reward is in this range (low, high), where None leaves an end open. A group without a
    scored episode is outside the range."""
    entropy_top: float | None = Field(default=None, gt=0, le=1)
    """Share of each episode's tokens that keep their loss. If None, all keep it."""
    kl_mask: float | None = Field(default=None, gt=0)
    """Largest (lp - old)^2 / 2 at which a token keeps its loss. None sets no bound."""
    shift_mask: float | None = Field(default=None, gt=0)
    """Largest change of a token's probability since sampling at which the token keeps its loss. The change is counted
    upwards if the token's advantage is positive, otherwise downwards. None sets no bound."""

    def scored(self, stream: Stream, advantages: bool, context: Context) -> Tensor:
        """Return a mask (E,) of the episodes whose status allows training. If `advantages` is True, they must have a
        reward too."""
        table = stream.episodes
        context.sums.add("episode/status", ~table.trains)
        scored = table.trains
        if advantages:
            context.sums.add("episode/unscored", table.trains & table.reward.isnan())
            scored = scored & ~table.reward.isnan()
        return scored

    def episodes(
        self, scored: Tensor, stream: Stream, context: Context, *, by_fork: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return two masks (E,): the episodes that enter the update, and the episodes whose rewards are compared.

        `scored` (E,) is the result of `scored()`. `by_fork` is True if the baseline compares by fork.
        """
        table, compared, entered = stream.episodes, scored, scored
        first = self.keep is not None and self.keep_when == "before_baseline"
        if first:
            entered = compared = self._kept(self._within(entered, stream, context), stream, context)
        if self.mean_bounds is not None:
            known = compared & ~table.reward.isnan()
            mean = segments.mean(table.reward[known], table.group[known], len(table.groups))
            seen = segments.count(table.group[known], len(table.groups)) > 0
            outside = ~(seen & _inside(mean, self.mean_bounds))[table.group]
            context.sums.add("episode/mean_outside", outside & entered)
            entered, compared = entered & ~outside, compared & ~outside
        if self.flat == "drop":
            owner = table.fork if by_fork else table.group
            # A recipe without advantages may have unscored episodes. They are left out, because their reward is NaN.
            flat = flat_groups(table.reward, compared & ~table.reward.isnan(), owner, len(owner))[owner]
            context.sums.add("episode/flat", flat & entered)
            entered = entered & ~flat
        if not first:
            entered = self._kept(self._within(entered, stream, context), stream, context)
        return entered, compared

    def _within(self, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        """Return a mask (E,) of the episodes in `entered` with a reward within `bounds`."""
        if self.bounds is None:
            return entered
        outside = ~_inside(stream.episodes.reward, self.bounds)
        context.sums.add("episode/outside", outside & entered)
        return entered & ~outside

    def _kept(self, entered: Tensor, stream: Stream, context: Context) -> Tensor:
        """Return a mask (E,) of the episodes in `entered` that the setting `keep` keeps: the best ones of each group,
        or the best and the worst."""
        if self.keep is None:
            return entered
        table = stream.episodes
        kept = torch.zeros_like(entered)
        for group in torch.unique(table.group[entered]).tolist():
            members = ((table.group == group) & entered).nonzero()[:, 0]
            known = table.reward[members].nan_to_num(nan=-math.inf)  # unscored sorts last; NaN would sort first
            ranked = members[torch.argsort(known, descending=True, stable=True)]
            if self.keep_how == "best" or len(ranked) <= self.keep:
                kept[ranked[: self.keep]] = True
            else:
                kept[ranked[: (self.keep + 1) // 2]] = True
                kept[ranked[len(ranked) - self.keep // 2 :]] = True
        context.sums.add("episode/surplus", entered & ~kept)
        return kept

    def top_entropy(self, entered: Tensor, stream: Stream) -> Tensor:
        """Return a mask (T,) of the tokens in `entered` (T,) that keep their loss under the setting `entropy_top`."""
        if self.entropy_top is None:
            return entered
        if stream.entropy is None:
            raise ValueError(
                "select.entropy_top reads the entropy of each token before the update, and there is none: use "
                "Trainer.prepare"
            )
        at = entered.nonzero()[:, 0]
        # There are two stable sorts, first by entropy, then by episode. So an episode's tokens are in the order of
        # their entropies, and tokens with equal entropies stay in their order. Any stable sort gives the same choice.
        by_entropy = at[torch.argsort(stream.entropy[at].round(decimals=6), descending=True, stable=True)]
        ranked = by_entropy[torch.argsort(stream.episode[by_entropy], stable=True)]
        owner = stream.episode[ranked]
        size = torch.bincount(owner, minlength=len(stream.episodes.tape))
        rank = torch.arange(len(ranked)) - (torch.cumsum(size, 0) - size)[owner]
        # The 1e-9 is needed because 0.29 * 100 is 28.999999999999996, whose floor would drop one token too many.
        quota = torch.floor(self.entropy_top * size.to(torch.float64) + 1e-9).clamp(min=1)
        out = torch.zeros_like(entered)
        out[ranked[rank < quota[owner]]] = True
        return out

    def tokens(self, lp: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context) -> Tensor | None:
        """Return a mask (n,) of the tokens `index` (n,) that keep their loss under the settings `kl_mask` and
        `shift_mask`.

        Without these settings, it is None. `lp` (n,) are the tokens' current log-probs, and `a` (n,) their advantages.
        """
        keep: Tensor | None = None
        old = stream.old[index].to(lp.dtype)
        if self.kl_mask is not None:
            near = (lp.detach() - old).square() / 2 <= self.kl_mask
            context.sums.add("token/kl_masked", ~near)
            keep = near
        if self.shift_mask is not None:
            shift = lp.detach().exp() - old.exp()
            gone = torch.where(a > 0, shift, -shift) > self.shift_mask
            context.sums.add("token/shift_masked", gone)
            keep = ~gone if keep is None else keep & ~gone
        return keep


def _inside(x: Tensor, bounds: tuple[float | None, float | None]) -> Tensor:
    """Return a mask, in the shape of `x`, of the values within [low, high]. NaN is outside."""
    low, high = (end if bound is None else bound for bound, end in zip(bounds, (-math.inf, math.inf), strict=True))
    return (x >= low) & (x <= high)
