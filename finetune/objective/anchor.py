"""anchor: the log-prob in the denominator of the ratio, and a weight that corrects for the difference between the
sampler and the policy at the start of the update.

    sampler     ratio = exp(lp - old)
    recomputed  ratio = exp(lp - prox), prox = log-prob under the weights at the start of the update; the loss is
                multiplied by the importance weight  i = exp(prox - old)  (decoupled PPO):
                    none      1
                    truncate  min(i, high)
                    mask      i where low <= i <= high, else 0

`per` decides whether each token, each turn or each episode has one i. For a turn or an episode, i is the geometric mean
(combine = mean) or the product (combine = sum) of its tokens' i. The product over a long episode is often out of
bounds, so watch the metrics `importance/truncated` and `importance/masked`. i carries no gradient.

A token that `mask` drops still counts in T, the number of tokens that divides the loss. With one update per rollout
batch, prox is lp itself, without gradient, and needs no extra forward pass.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .kl import exp
from .term import Context, Term

Per = Literal["token", "turn", "episode"]


class Anchor(Term):
    """Which log-prob is the denominator of the ratio, and how the importance weight is bounded."""

    to: Literal["sampler", "recomputed"] = "sampler"
    """The log-prob in the ratio's denominator. `sampler` is the log-prob that was recorded at sampling. `recomputed` is
    the log-prob under the weights at the start of the update, which the trainer computes."""
    weight: Literal["none", "truncate", "mask"] = "none"
    """How the importance weight exp(recomputed - recorded log-prob) is bounded. It is only used with `recomputed`. With
    `none`, the loss has no importance weight."""
    per: Per = "token"
    """Whether each token, turn or episode has one importance weight."""
    combine: Literal["mean", "sum"] = "mean"
    """How the tokens' log-ratios are combined if `per` is turn or episode."""
    low: float = Field(default=0.0, ge=0)
    """Smallest importance weight that `mask` keeps."""
    high: float = Field(default=2.0, gt=0)
    """Largest importance weight: `truncate` lowers a larger weight to it, and `mask` drops the token."""

    @model_validator(mode="after")
    def _weighs_what_differs(self) -> Anchor:
        if self.weight != "none" and self.to == "sampler":
            raise ValueError(
                f"anchor weight {self.weight!r} corrects a recomputed log-prob: set anchor.to to "
                "'recomputed' (against the sampler's own log-prob the ratio is the correction)"
            )
        return self

    @property
    def local(self) -> bool:
        """True if the importance weight of a token depends on no other token."""
        return self.weight == "none" or self.per == "token"

    def __call__(self, lp: Tensor, index: Tensor, stream: Stream, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the anchor's log-probs (n,) and the importance weights (n,) of the tokens `index` (n,).

        `lp` (n,) are the current log-probs of these tokens. The importance weights are None if the recipe has none.
        """
        old = stream.old[index].to(lp.dtype)
        if self.to == "sampler":
            return old, None
        # Without the detach the ratio exp(lp - prox) would be the constant 1, with gradient 0.
        prox = lp.detach() if stream.anchor is None else stream.anchor[index].to(lp.dtype)
        if self.weight == "none":
            return prox, None
        i = exp(over_unit(prox - old, self.per, index, stream, self.combine))
        if self.weight == "truncate":
            context.sums.add("importance/truncated", i > self.high)
            i = i.clamp(max=self.high)
        else:
            keep = (i >= self.low) & (i <= self.high)
            context.sums.add("importance/masked", ~keep)
            i = torch.where(keep, i, torch.zeros_like(i))
        return prox, i


def over_unit(x: Tensor, per: Per, index: Tensor, stream: Stream, combine: str = "mean") -> Tensor:
    """Return, for each token in `index` (n,), the mean or the sum (n,) of `x` (n,) over its turn or episode.

    `x` has one value per token. `index` must hold all tokens of a turn or episode that enter the update. Otherwise the
    mean would cover only some of them.
    """
    if per == "token":
        return x
    owner, n = (stream.turn, len(stream.turns.reward)) if per == "turn" else (stream.episode, len(stream.episodes.tape))
    owner = owner[index]
    return (segments.mean if combine == "mean" else segments.total)(x, owner, n)[owner]
