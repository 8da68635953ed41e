"""A slow reading of the ledger in plain Python and float64, written from the ledger alone: one loop per formula.

It shares no code with the package, and takes and gives lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def baseline(rewards: Sequence[float], groups: Sequence[str], kind: str, by: str, eps: float, ddof: int) -> list[float]:
    out = []
    for i, r in enumerate(rewards):
        peers = [x for j, x in enumerate(rewards) if by == "batch" or groups[j] == groups[i]]
        n = len(peers)
        mean = math.fsum(peers) / n
        if kind == "none":
            out.append(r)
            continue
        if n == 1 or min(peers) == max(peers):
            out.append(0.0)
            continue
        if kind == "mean":
            out.append(r - mean)
        elif kind == "loo":
            out.append(r - (math.fsum(peers) - r) / (n - 1))
        elif kind in ("std", "batch_std"):
            spread = peers if kind == "std" else list(rewards)
            m = math.fsum(spread) / len(spread)
            var = math.fsum((x - m) ** 2 for x in spread) / (len(spread) - ddof)
            out.append((r - mean) / (math.sqrt(var) + eps))
        else:
            raise ValueError(kind)
    return out


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    out = [0.0] * len(rewards)
    after = 0.0
    for t in reversed(range(len(rewards))):
        after = rewards[t] + gamma * after
        out[t] = after
    return out


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, beyond: float
) -> tuple[list[float], list[float]]:
    out = [0.0] * len(rewards)
    after = 0.0
    for t in reversed(range(len(rewards))):
        nxt = values[t + 1] if t + 1 < len(rewards) else beyond
        after = rewards[t] + gamma * nxt - values[t] + gamma * lam * after
        out[t] = after
    return out, [a + v for a, v in zip(out, values, strict=True)]


def kl(kind: str, lp: float, ref: float) -> float:
    d = lp - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def ppo(lp: float, old: float, a: float, low: float, high: float) -> float:
    r = math.exp(lp - old)
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def weights(kind: str, tokens: Sequence[tuple[str, str, int]], limit: float) -> list[float]:
    """tokens: (group, episode, turn) of each."""
    n = len(tokens)
    episodes = {e for _, e, _ in tokens}
    turns = {(e, k) for _, e, k in tokens}
    groups = {g for g, _, _ in tokens}
    out = []
    for g, e, k in tokens:
        if kind == "token":
            out.append(1 / n)
        elif kind == "episode":
            out.append(1 / (len(episodes) * sum(t[1] == e for t in tokens)))
        elif kind == "turn":
            out.append(1 / (len(turns) * sum(t[1:] == (e, k) for t in tokens)))
        elif kind == "group":
            out.append(1 / (len(groups) * sum(t[0] == g for t in tokens)))
        elif kind == "constant":
            out.append(1 / (len(episodes) * limit))
        elif kind == "sum":
            out.append(1 / limit)
        else:
            raise ValueError(kind)
    return out


def loss(
    surrogate: str,
    weigh: str,
    lp: Sequence[float],
    old: Sequence[float],
    ref: Sequence[float] | None,
    beta: float,
    advantages: Sequence[float],
    tokens: Sequence[tuple[str, str, int]],
    low: float = 0.2,
    high: float = 0.2,
) -> float:
    """sum_t w_t (l_t + beta k3_t), token by token."""
    total = 0.0
    for t, w in enumerate(weights(weigh, tokens, 1.0)):
        if surrogate == "ppo":
            l = ppo(lp[t], old[t], advantages[t], low, high)
        elif surrogate == "reinforce":
            l = -advantages[t] * lp[t]
        else:
            l = -lp[t]
        if beta:
            assert ref is not None
            l += beta * kl("k3", lp[t], ref[t])
        total += w * l
    return total
