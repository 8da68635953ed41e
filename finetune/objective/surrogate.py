"""surrogate: the loss of each token, whose gradient is the policy gradient. r is the ratio exp(lp - anchor), and A is
the token's advantage.

    ppo        l = -min(r A, clip(r, 1 - low, 1 + high) A); with `dual` c, at least c A where A < 0
    reinforce  l = -A lp
    cispo      l = -sg(min(max(r, 1 - low), cap)) A lp
    cpg        l = -A min(lp, anchor + log(1 + high)) where A > 0, -A max(lp, anchor + log(1 - low)) where A < 0
    sapo       l = -(4 / tau) sigmoid(tau (r - 1)) A, with a tau for each sign of A
    nll        l = -lp: every own token is a target, even in authored text
    minor_nll  l = -(2 / beta) log sigmoid(beta (lp - ref)): like nll, fading as the model outgrows the reference
    none       l = 0: only regularisers apply (distillation)

sg stops the gradient. With per = turn or episode, r is the geometric mean of the ratios of all tokens in the turn or
episode (GSPO).

1. For ppo, reinforce, cispo, cpg and sapo, a token whose advantage is exactly 0 has loss and gradient exactly 0.
2. Above lp - anchor = 20, r continues along its tangent instead of growing exponentially. Otherwise r A could overflow,
   because for A < 0, r isn't clipped from above.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ..data.stream import Stream
from .anchor import Per, over_unit
from .kl import exp
from .term import Context, Kinds, Term


class Surrogate(Term):
    """Base class of surrogates, which compute the loss of each token. Derive from it to write your own
    (docs/how-to/write_a_recipe.md)."""

    advantages: ClassVar[bool] = True
    """Whether the loss uses advantages. If so, an episode without a reward and a token without a known log-prob at
    sampling don't train."""
    needs_reference: ClassVar[bool] = False
    """Whether the loss reads `stream.ref`, the reference model's log-probs."""
    zero_at_zero: ClassVar[bool] = False
    """Whether a token with advantage 0 has loss and gradient exactly 0. The trainer may then skip the token."""

    @property
    def local(self) -> bool:
        """True if a token's loss doesn't depend on other tokens, so that the batch can be split in any way.

        False is always correct, but then the trainer needs a second forward pass.
        """
        return False

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        """Return the losses (n,) of the tokens `index` (n,).

        `lp` (n,) are the tokens' current log-probs, with gradient. `anchor` (n,) are the log-probs in the denominator
        of the ratio. `a` (n,) are the advantages.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the loss of each token there")


def _count_clipped(context: Context, **sides: Tensor) -> None:
    """Add the share of clipped tokens to the metrics, in total and for each bound. `sides` maps a bound's name to the
    mask (n,) of the tokens that it clipped."""
    context.sums.add("clip", torch.stack(list(sides.values())).any(0))
    for side, clipped in sides.items():
        context.sums.add(f"clip/{side}", clipped)


class _Local(Surrogate):
    """A surrogate in which a token's loss doesn't depend on other tokens."""

    @property
    def local(self) -> bool:
        return True


class PPO(Surrogate):
    """The ratio times the advantage, with the ratio clipped."""

    zero_at_zero: ClassVar[bool] = True
    kind: Literal["ppo"] = "ppo"
    low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped to at least 1 - low."""
    high: float = Field(default=0.2, ge=0)
    """The ratio is clipped to at most 1 + high."""
    dual: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for tokens with a negative advantage (dual clip). None sets no bound."""
    per: Per = "token"
    """Whether each token, turn or episode has one ratio. The ratio of a turn or an episode is the geometric mean of its
    tokens' ratios."""

    @property
    def local(self) -> bool:
        return self.per == "token"

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        r = exp(over_unit(lp - anchor, self.per, index, stream))
        raw, bound = r * a, r.clamp(1 - self.low, 1 + self.high) * a
        # The minimum is pessimistic: a ratio that moved the right way is held back, and one that moved the wrong way
        # keeps its gradient.
        loss = -torch.minimum(raw, bound)
        clipped = bound < raw
        sides = {"low": clipped & (a < 0), "high": clipped & (a > 0)}
        if self.dual is not None:
            # Where A < 0, the minimum takes any large ratio, so one token could outweigh the batch.
            loss = torch.where(a < 0, torch.minimum(loss, -self.dual * a), loss)
            sides["dual"] = (a < 0) & (r > self.dual)
        _count_clipped(context, **sides)
        return loss


class Reinforce(_Local):
    """The score function (gradient of the log-prob) times the advantage, without a ratio."""

    zero_at_zero: ClassVar[bool] = True
    kind: Literal["reinforce"] = "reinforce"

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return -lp * a


class CISPO(_Local):
    """The score function with a clipped ratio as its weight, so that every token keeps its gradient."""

    zero_at_zero: ClassVar[bool] = True
    kind: Literal["cispo"] = "cispo"
    low: float | None = Field(default=None, ge=0, le=1)
    """The weight is at least 1 - low. If `low` is None, the weight has no lower bound."""
    cap: float = Field(default=5.0, gt=0)
    """The weight is at most `cap`."""

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        # The ratio is a weight here. Its own gradient would vanish where it is clipped, and the token with it.
        r = exp(lp.detach() - anchor)
        bounded = r.clamp(min=None if self.low is None else 1 - self.low, max=self.cap)
        _count_clipped(context, low=bounded > r, high=bounded < r)
        return -bounded * a * lp


class CPG(_Local):
    """Clipped policy gradient. It bounds the log-prob instead of the ratio, so the gradient contains no ratio."""

    zero_at_zero: ClassVar[bool] = True
    kind: Literal["cpg"] = "cpg"
    low: float = Field(default=0.2, ge=0, lt=1)
    """Where A < 0, the log-prob is bounded below by anchor + log(1 - low)."""
    high: float = Field(default=0.2, ge=0)
    """Where A > 0, the log-prob is bounded above by anchor + log(1 + high)."""

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        up = torch.minimum(lp, anchor + math.log1p(self.high))
        down = torch.maximum(lp, anchor + math.log1p(-self.low))
        used = torch.where(a > 0, up, down)
        _count_clipped(context, low=(used != lp) & (a < 0), high=(used != lp) & (a > 0))
        return -a * used


class SAPO(_Local):
    """Passes the ratio through a sigmoid gate instead of clipping it as PPO does."""

    zero_at_zero: ClassVar[bool] = True
    kind: Literal["sapo"] = "sapo"
    tau: float = Field(default=1.0, gt=0)
    """Temperature of the gate where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate where A < 0."""

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        tau = torch.full_like(lp, self.tau_negative).masked_fill(a > 0, self.tau)
        return -4 / tau * torch.sigmoid(tau * (exp(lp - anchor) - 1)) * a


class NLL(_Local):
    """Next-token cross-entropy on the agent's own tokens."""

    advantages: ClassVar[bool] = False
    kind: Literal["nll"] = "nll"

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return -lp


class MinorNLL(Surrogate):
    """Cross-entropy with a gradient that fades as the model's log-prob rises above the reference model's."""

    advantages: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    kind: Literal["minor_nll"] = "minor_nll"
    beta: float = Field(default=0.1, gt=0)
    """How fast the gradient fades as the model's log-prob rises above the reference model's."""
    per: Per = "episode"
    """Whether the log-ratio lp - ref is taken per token, or averaged over a turn or an episode."""

    @property
    def local(self) -> bool:
        return self.per == "token"

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        if stream.ref is None:
            raise ValueError(
                "surrogate minor_nll reads the reference's log-probs, and there are none: pass reference=... "
                "to the trainer"
            )
        ratio = over_unit(lp - stream.ref[index].to(lp.dtype), self.per, index, stream)
        return -2 / self.beta * F.logsigmoid(self.beta * ratio)


class NoSurrogate(_Local):
    """A loss of 0, so that the regularisers are the whole loss."""

    advantages: ClassVar[bool] = False
    kind: Literal["none"] = "none"

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return torch.zeros_like(lp)


AnySurrogate = Annotated[Surrogate, Kinds(PPO, Reinforce, CISPO, CPG, SAPO, NLL, MinorNLL, NoSurrogate)]
