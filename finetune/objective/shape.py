"""shape: changes rewards before the baseline compares them. Only `token_kl` applies after the baseline.

    clip        x = min(max(x, low), high); the share outside is counted before clipping
    running     x / s  or  (x - m) / s, over all training rewards in the run so far (unbiased s)
    overlong    x + max(-factor, min(0, -(len - (limit - buffer)) / buffer * factor))
    episode_kl  x - beta * sum of the estimates over the episode's tokens
    token_kl    adds r_t = -beta * estimate to each token's reward, after the baseline

m and s are the mean and the standard deviation of the run's rewards.

1. `running` changes nothing until the run has two different rewards, because their standard deviation is 0 or unknown
   before. A baseline that divides by the group's standard deviation (`std`) undoes the scaling of `running`.
2. The penalty of `overlong` is at most `factor`. Every later term sees the shaped reward.
3. An adaptive KL coefficient (`kl.Adaptive`) changes once after each update, because all optimiser steps of an update
   share the same rewards. The change depends on the mean k1 between sampler and reference over the tokens that enter,
   whichever estimator the penalty uses. With a recomputed anchor, its log-probs replace the sampler's.
4. If rewards are per turn, the shapes overlong and episode_kl change the reward of the episode's last scored turn.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .kl import Adaptive, Estimator, estimate, moves
from .term import Context, Kinds, Term


class Shape(Term):
    """Base class of shapes, which change rewards before they are compared. Derive from it to write your own shape."""

    @property
    def needs_reference(self) -> bool:
        """True if the shape reads `stream.ref`, the reference model's log-probs."""
        return False

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        """Return the shaped rewards (U,) float64 for the rewards `x` (U,), of which there is one per episode or per
        turn.

        `scored` (U,) bool marks the episodes or turns that have a reward. Elsewhere, `x` is 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the shaped rewards there")


class Clip(Shape):
    """Replaces a reward outside [low, high] with the nearer bound."""

    kind: Literal["clip"] = "clip"
    low: float
    """Smallest reward."""
    high: float
    """Largest reward."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        context.sums.add("reward/clipped", ((x < self.low) | (x > self.high))[scored])
        return x.clamp(self.low, self.high)


class Running(Shape):
    """Divides rewards by the standard deviation of all rewards in the run so far."""

    kind: Literal["running"] = "running"
    centre: bool = False
    """Whether to subtract the running mean before the division."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        # The rewards of all ranks are merged first, so that every rank scales by the same moments. Otherwise equal
        # rewards would get different advantages on different ranks.
        context.moments.take(*context.mean_and_square(x[scored]))
        std = context.moments.std
        if std is None:
            return x
        return (x - context.moments.mean) / std if self.centre else x / std


class Overlong(Shape):
    """Penalises long episodes. The penalty grows over the last `buffer` tokens before the length limit (DAPO)."""

    kind: Literal["overlong"] = "overlong"
    limit: int = Field(gt=0)
    """Length of an episode at which the penalty reaches `factor`, in tokens that its agents produced."""
    buffer: int = Field(gt=0)
    """Number of tokens before the limit over which the penalty grows linearly."""
    factor: float = 1.0
    """The full penalty, in units of reward."""

    def out_of_reach(self, tokens: int) -> str | None:
        start = self.limit - self.buffer
        return None if start < tokens else f"the price of long answers can't act: limit {self.limit}, from {start} on"

    def fitted(self, tokens: int) -> Self:
        """Return the penalty with the limit `tokens`. Its buffer keeps its share of the limit."""
        return self.model_copy(update={"limit": tokens, "buffer": max(1, tokens * self.buffer // self.limit)})

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        over = (stream.episodes.length - (self.limit - self.buffer)).to(x.dtype)
        cost = (-over / self.buffer * self.factor).clamp(min=-self.factor, max=0.0)
        context.sums.add("reward/overlong", cost[stream.episodes.trains])
        return _on_episode(x, cost, scored, stream)


class RewardKL(Shape):
    """Base class of the shapes that subtract a penalty for the KL between sampler and reference model from the
    reward."""

    beta: float = Field(ge=0)
    """KL coefficient (the penalty per nat). With `adaptive`, this is the coefficient for the first update."""
    estimator: Estimator = "k1"
    """Estimator of the KL."""
    adaptive: Adaptive | None = None
    """Controller of the coefficient. If None, the coefficient is fixed."""

    measure: ClassVar[str] = "kl/reward"
    """Beginning of the names of this KL's metrics."""

    _moves = field_validator("adaptive")(moves)

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def first_coefficient(self) -> float:
        """The coefficient `beta` for the first update."""
        return self.beta

    def observe(self, entered: Tensor, stream: Stream, context: Context) -> None:
        """Add the KL (k1) over the tokens that `entered` (T,) bool marks to the metrics. An adaptive coefficient
        depends on it."""
        if self.needs_reference:
            context.sums.add(f"{self.measure}/k1", _kl_estimates("k1", stream)[entered])
            if self.adaptive is not None:
                context.sums.put(f"{self.measure}/beta", self.beta)


class EpisodeKL(RewardKL):
    """Lowers each episode's reward by a penalty for the KL between the sampler and the reference model."""

    kind: Literal["episode_kl"] = "episode_kl"
    estimator: Estimator = "k3"
    """Estimator of the KL."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        if not self.beta:
            return x
        cost = segments.total(_kl_estimates(self.estimator, stream), stream.episode, len(stream.episodes.tape))
        context.sums.add("reward/kl", cost[stream.episodes.trains])
        return _on_episode(x, -self.beta * cost, scored, stream)


class TokenKL(RewardKL):
    """Adds to each token's reward a penalty for the KL between the sampler and the reference model."""

    kind: Literal["token_kl"] = "token_kl"

    def penalty(self, stream: Stream) -> Tensor:
        """Return the penalties (T,) float64 that are added to the tokens' rewards."""
        return -self.beta * _kl_estimates(self.estimator, stream)


AnyShape = Annotated[Shape, Kinds(Clip, Running, Overlong, EpisodeKL, TokenKL)]


def _kl_estimates(kind: Estimator, stream: Stream) -> Tensor:
    """Return an estimate (T,) float64 of the KL to the reference model for each token.

    The estimate compares the reference with the recomputed anchor if there is one, otherwise with the sampler. It is 0
    if the log-prob of the anchor or sampler is unknown.
    """
    if stream.ref is None:
        raise ValueError(
            "a KL in the reward reads the reference's log-probs, and there are none: pass reference=... to the trainer"
        )
    lp = stream.old if stream.anchor is None else stream.anchor
    known = lp.isfinite()
    # This is in float64: near d = 0, the terms of k3 = e^-d - 1 + d cancel, and float32 leaves mostly rounding error.
    d = estimate(kind, lp.to(torch.float64), stream.ref.to(torch.float64))
    return torch.where(known, d, torch.zeros_like(d))


def _on_episode(x: Tensor, change: Tensor, scored: Tensor, stream: Stream) -> Tensor:
    """Return `x` plus each episode's `change`. If `x` is per turn, the change is added to the episode's last scored
    turn."""
    if len(x) == len(change):
        return x + change
    at = scored.nonzero()[:, 0]
    owner = stream.turns.episode[at]
    at = at[torch.cat([owner[1:] != owner[:-1], owner[:1] == owner[:1]])]
    return x.index_add(0, at, change[stream.turns.episode[at]])
