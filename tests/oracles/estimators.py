"""OPO's baseline and GiGPO's step groups, slowly: one loop per formula of the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Turn:
    """What one turn answered, how many own tokens it has, and what it earned."""

    seen: str | None
    tokens: int
    reward: float


@dataclass
class Attempt:
    """One episode; `scored` is False if it has no reward."""

    group: str
    turns: list[Turn]
    scored: bool = True

    @property
    def reward(self) -> float:
        return math.fsum(turn.reward for turn in self.turns)

    def after(self, t: int, gamma: float) -> float:
        """Discounted return from turn t on."""
        return math.fsum(gamma ** (k - t) * turn.reward for k, turn in enumerate(self.turns) if k >= t)


def opo(attempts: Sequence[Attempt]) -> list[float]:
    """The advantage of each episode."""
    out = []
    for one in attempts:
        peers = [(sum(t.tokens for t in a.turns), a.reward) for a in attempts if a.scored and a.group == one.group]
        if not one.scored or len({r for _, r in peers}) == 1:
            out.append(0.0)
            continue
        out.append(one.reward - math.fsum(n * r for n, r in peers) / sum(n for n, _ in peers))
    return out


def gigpo(attempts: Sequence[Attempt], weight: float, gamma: float, eps: float) -> list[list[float]]:
    """The advantage of each turn of each episode."""
    out = []
    for one in attempts:
        row = []
        for t, turn in enumerate(one.turns):
            if not one.scored:
                row.append(0.0)
                continue
            peers = [a for a in attempts if a.scored and a.group == one.group]
            same = [
                a.after(k, gamma)
                for a in peers
                for k, other in enumerate(a.turns)
                if turn.seen is not None and other.seen == turn.seen
            ]
            whole = _normalised(one.reward, [a.reward for a in peers], eps)
            row.append(whole + weight * _normalised(one.after(t, gamma), same, eps))
        out.append(row)
    return out


def _normalised(x: float, peers: list[float], eps: float) -> float:
    if not peers or min(peers) == max(peers):
        return 0.0
    mean = math.fsum(peers) / len(peers)
    return (x - mean) / (math.sqrt(math.fsum((p - mean) ** 2 for p in peers) / (len(peers) - 1)) + eps)
