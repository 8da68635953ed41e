"""PPO with a KL in the reward whose coefficient follows a target, slowly: one update from plain lists.

Written from Ziegler et al. 2019 (arXiv 1909.08593) in plain Python and float64. Shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import math
import statistics


@dataclasses.dataclass
class Answer:
    """An episode's own tokens in order of time."""

    old: list[float]
    ref: list[float]
    value: list[float]
    earned: list[float]
    """Reward of the environment at each token; 0 where a turn goes on."""


@dataclasses.dataclass
class Update:
    kl: float
    """Mean k1 per token."""
    advantage: list[list[float]]
    target: list[list[float]]
    beta: float
    """Of the next update."""


def update(answers: list[Answer], beta: float, target: float, horizon: float, lam: float = 0.95) -> Update:
    """gamma is 1, advantages aren't whitened."""
    drift = [[o - r for o, r in zip(a.old, a.ref, strict=True)] for a in answers]
    kl = statistics.fmean(d for one in drift for d in one)
    advantages, targets = [], []
    for a, k1 in zip(answers, drift, strict=True):
        n = len(a.old)
        reward = [e - beta * k for e, k in zip(a.earned, k1, strict=True)]
        delta = [reward[t] + (a.value[t + 1] if t + 1 < n else 0.0) - a.value[t] for t in range(n)]
        advantages.append([math.fsum(lam ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)])
        targets.append([x + v for x, v in zip(advantages[-1], a.value, strict=True)])
    error = max(-0.2, min(0.2, kl / target - 1))
    return Update(kl, advantages, targets, beta * (1 + error * len(answers) / horizon))


def whitened(advantage: list[list[float]]) -> list[list[float]]:
    flat = [a for one in advantage for a in one]
    m = statistics.fmean(flat)
    s = math.sqrt(statistics.fmean((a - m) ** 2 for a in flat))
    return [[(a - m) / s for a in one] for one in advantage]
