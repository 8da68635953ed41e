"""anchor: the log-prob that a ratio is taken against, and what is done where sampler and trainer disagree.

    sampler     ratio = exp(lp - old)
    recomputed  ratio = exp(lp - prox), prox = log-prob under the weights that the rollout batch met; times the
                importance weight  i = exp(prox - old)  (decoupled PPO):
                    none      1
                    truncate  min(i, high)
                    mask      i where low <= i <= high, else 0

i is taken per token, or per turn or episode as the geometric mean of its tokens' (combine = mean) or their product
(combine = sum: a long episode leaves any bound soon, see how much is dropped). A dropped token still counts in T.
It carries no gradient. With one update per rollout batch prox is lp itself, without gradient, and costs nothing.
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
    """The log-prob that ratios are taken against."""

    to: Literal["sampler", "recomputed"] = "sampler"
    """Whose log-prob the ratio is taken against."""
    weight: Literal["none", "truncate", "mask"] = "none"
    """The importance weight of `recomputed`."""
    per: Per = "token"
    """Over whose tokens the importance weight is taken."""
    combine: Literal["mean", "sum"] = "mean"
    """How the tokens' log-ratios are combined where `per` is turn or episode."""
    low: float = Field(default=0.0, ge=0)
    """Smallest importance weight that `mask` keeps."""
    high: float = Field(default=2.0, gt=0)
    """Largest importance weight."""

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
        """True: the importance weight of a token reads no other token."""
        return self.weight == "none" or self.per == "token"

    def __call__(self, lp: Tensor, index: Tensor, stream: Stream, context: Context) -> tuple[Tensor, Tensor | None]:
        """The log-probs to divide by (n,), and the importance weights (n,) or None, for the tokens `index` (n,)."""
        old = stream.old[index].to(lp.dtype)
        if self.to == "sampler":
            return old, None
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
    """x (n,) of the tokens `index`, replaced by its mean or sum over each token's turn or episode."""
    if per == "token":
        return x
    owner, n = (stream.turn, len(stream.turns.reward)) if per == "turn" else (stream.episode, len(stream.episodes.tape))
    owner = owner[index]
    return (segments.mean if combine == "mean" else segments.total)(x, owner, n)[owner]
