"""shape: rewards as the recipe wants to see them, before the baseline; the KL penalty per token comes after it.

    clip        x = min(max(x, low), high); the share outside is counted before clipping
    running     x / s  or  (x - m) / s, over all rewards of the run so far (unbiased s); never touched by evaluation
    overlong    x + max(-factor, min(0, -(len - (limit - buffer)) / buffer * factor))
    episode_kl  x - beta * sum of the estimates over the episode's tokens
    token_kl    adds r_t = -beta * estimate to each token's reward, after the baseline

1. `running` leaves rewards as they are until two different ones were seen (a deviation of 0 or of one value scales
   nothing); it comes before the group baseline, which would otherwise undo it.
2. `overlong` never costs more than `factor`, and every later term sees the shaped reward.
3. Shapes of an episode (overlong, episode_kl) count on its last turn where rewards are per turn.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .kl import Estimator, estimate
from .term import Context, Kinds, Term


class Shape(Term):
    """Base class of all shapes; derive from it to write one of your own."""

    @property
    def needs_reference(self) -> bool:
        """True when it reads `stream.ref`, the reference model's log-probs."""
        return False

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        """(U,) float64 rewards from x (U,): one per episode, or one per turn. x is 0 where `scored` is False."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the shaped rewards there")


class Clip(Shape):
    """Rewards outside [low, high] count as the bound."""

    kind: Literal["clip"] = "clip"
    low: float
    """The least that a reward counts."""
    high: float
    """The most that a reward counts."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        context.sums.add("reward/clipped", ((x < self.low) | (x > self.high))[scored])
        return x.clamp(self.low, self.high)


class Running(Shape):
    """Rewards on the scale of all rewards seen so far."""

    kind: Literal["running"] = "running"
    centre: bool = False
    """True: the running mean is subtracted first."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        context.moments.take(*context.mean_and_square(x[scored]))
        std = context.moments.std
        if std is None:
            return x
        return (x - context.moments.mean) / std if self.centre else x / std


class Overlong(Shape):
    """A penalty on the last `buffer` tokens before the length limit (DAPO)."""

    kind: Literal["overlong"] = "overlong"
    limit: int = Field(gt=0)
    """Tokens of an episode, the agent's own, from which on the whole penalty is charged."""
    buffer: int = Field(gt=0)
    """Tokens ahead of the limit in which it grows."""
    factor: float = 1.0
    """The whole penalty."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        over = (stream.episodes.length - (self.limit - self.buffer)).to(x.dtype)
        cost = (-over / self.buffer * self.factor).clamp(min=-self.factor, max=0.0)
        context.sums.add("reward/overlong", cost[stream.episodes.trains])
        return _on_episode(x, cost, stream)


class EpisodeKL(Shape):
    """A penalty on the KL between sampler and reference, subtracted from the episode's reward."""

    kind: Literal["episode_kl"] = "episode_kl"
    beta: float = Field(ge=0)
    """KL coefficient: the penalty per nat."""
    estimator: Estimator = "k3"
    """Of the KL."""

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        if not self.beta:
            return x
        cost = segments.total(_kl_estimates(self.estimator, stream), stream.episode, len(stream.episodes.tape))
        context.sums.add("reward/kl", cost[stream.episodes.trains])
        return _on_episode(x, -self.beta * cost, stream)


class TokenKL(Shape):
    """A penalty per token on the KL between sampler and reference."""

    kind: Literal["token_kl"] = "token_kl"
    beta: float = Field(ge=0)
    """KL coefficient: the penalty per nat."""
    estimator: Estimator = "k1"
    """Of the KL."""

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def penalty(self, stream: Stream) -> Tensor:
        """(T,) float64 to add to the tokens' rewards."""
        return -self.beta * _kl_estimates(self.estimator, stream)


AnyShape = Annotated[Shape, Kinds(Clip, Running, Overlong, EpisodeKL, TokenKL)]


def _kl_estimates(kind: Estimator, stream: Stream) -> Tensor:
    """(T,) float64 estimates of sampler against reference; 0 where the sampler's log-prob is unknown."""
    if stream.ref is None:
        raise ValueError(
            "a KL in the reward reads the reference's log-probs, and there are none: pass reference=... to the trainer"
        )
    lp = stream.old if stream.anchor is None else stream.anchor
    known = lp.isfinite()
    d = estimate(kind, lp.to(torch.float64), stream.ref.to(torch.float64))
    return torch.where(known, d, torch.zeros_like(d))


def _on_episode(x: Tensor, change: Tensor, stream: Stream) -> Tensor:
    """x with an episode's change added, on its last turn when x is per turn."""
    if len(x) == len(change):
        return x + change
    owner = stream.turns.episode
    last = torch.cat([owner[1:] != owner[:-1], owner.new_ones(1, dtype=torch.bool)])
    return x + torch.where(last, change[owner], torch.zeros_like(x))
