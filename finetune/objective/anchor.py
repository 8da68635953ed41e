"""anchor: the log-prob in the denominator of the ratio, and the correction for differences between sampler and trainer.

    sampler     ratio = exp(lp - old)
    recomputed  ratio = exp(lp - prox), prox = log-prob under the weights at the start of the update; the loss is
                multiplied by the importance weight  i = exp(prox - old)  (decoupled PPO):
                    none      1
                    truncate  min(i, high)
                    mask      i where low <= i <= high, else 0

Each token, turn or episode (`per`) has one i. For a turn or an episode, i is the geometric mean (combine = mean) or the
product (combine = sum) of its tokens' i. The product over a long episode is often out of bounds, so watch the metrics
`importance/truncated` and `importance/masked`. A token that `mask` drops still counts in T. i carries no gradient. With
one update per rollout batch, prox is lp itself, without gradient, and needs no extra forward pass.
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
    """The log-prob in the denominator of ratios."""

    to: Literal["sampler", "recomputed"] = "sampler"
    """The log-prob in the ratio's denominator. `sampler` takes the recorded one. `recomputed` takes one that the
    trainer computes."""
    weight: Literal["none", "truncate", "mask"] = "none"
    """How the importance weight (only with `recomputed`) is bounded. With `none`, tokens have no importance weight."""
    per: Per = "token"
    """The unit that shares one importance weight."""
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
        """Return the anchor log-probs (n,) of the tokens `index` (n,), and their importance weights (n,) or None. `lp`
        (n,) are the current log-probs."""
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
    """For each token in `index` (n,), return the mean or sum (n,) of `x` (n,) over the token's turn or episode.

    `index` must hold all entering tokens of each turn or episode. Otherwise the mean covers only a part of it.
    """
    if per == "token":
        return x
    owner, n = (stream.turn, len(stream.turns.reward)) if per == "turn" else (stream.episode, len(stream.episodes.tape))
    owner = owner[index]
    return (segments.mean if combine == "mean" else segments.total)(x, owner, n)[owner]
