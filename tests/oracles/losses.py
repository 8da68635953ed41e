"""Advantages to a loss, slowly: select (tokens), anchor, surrogate, regulariser, weigh; the critic's loss; score.

Written from the ledger in plain Python and NumPy float64. `stopped` is what carries no gradient: the log-probs that a
weight was computed from, which a difference quotient must hold still. Shares no code with the package.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from .objective import kl, weights
from .world import World

Terms = dict[str, Any]


def top_entropy(world: World, inside: list[bool], share: float | None) -> list[bool]:
    """The share of each episode's tokens with the highest entropy, at least one."""
    if share is None:
        return list(inside)
    keep = [False] * len(inside)
    for e in range(len(world.episodes)):
        mine = [t for t in world.of_episode(e) if inside[t]]
        ranked = sorted(mine, key=lambda t: (-world.tokens[t].entropy, t))
        for t in ranked[: max(1, math.floor(share * len(mine) + 1e-9))]:
            keep[t] = True
    return keep


def unit_mates(world: World, t: int, per: str, live: list[bool]) -> list[int]:
    """The tokens that share t's ratio, t among them."""
    if per == "token":
        return [t]
    one = world.tokens[t]
    return [
        u for u in world.of_episode(one.episode) if live[u] and (per == "episode" or world.tokens[u].turn == one.turn)
    ]


def over(world: World, t: int, per: str, live: list[bool], values: list[float], how: str = "mean") -> float:
    """values of t's unit, as mean or sum."""
    mine = [values[u] for u in unit_mates(world, t, per, live)]
    return statistics.fmean(mine) if how == "mean" else math.fsum(mine)


def anchored(world: World, term: Terms, t: int, live: list[bool]) -> tuple[float, float]:
    """(the log-prob that the ratio is taken against, the importance weight)."""
    old = [token.old if token.old is not None else math.nan for token in world.tokens]
    if term["to"] == "sampler":
        return old[t], 1.0
    prox = world.tokens[t].prox
    if term["weight"] == "none":
        return prox, 1.0
    gap = [token.prox - o for token, o in zip(world.tokens, old, strict=True)]
    i = math.exp(over(world, t, term["per"], live, gap, term["combine"]))
    if term["weight"] == "truncate":
        return prox, min(i, term["high"])
    return prox, i if term["low"] <= i <= term["high"] else 0.0


def surrogate(
    world: World,
    term: Terms,
    t: int,
    a: float,
    lp: list[float],
    stopped: list[float],
    anchor: list[float],
    live: list[bool],
) -> float:
    """The loss of one token."""
    kind = term["kind"]
    if kind == "none":
        return 0.0
    if kind == "nll":
        return -lp[t]
    if kind == "minor_nll":
        gap = [x - token.ref for x, token in zip(lp, world.tokens, strict=True)]
        return -2 / term["beta"] * math.log(1 / (1 + math.exp(-term["beta"] * over(world, t, term["per"], live, gap))))
    if kind == "reinforce":
        return -a * lp[t]
    if kind == "cispo":
        low = -math.inf if term["low"] is None else 1 - term["low"]
        return -min(max(math.exp(stopped[t] - anchor[t]), low), term["cap"]) * a * lp[t]
    if kind == "cpg":
        if a > 0:
            return -a * min(lp[t], anchor[t] + math.log(1 + term["high"]))
        return -a * max(lp[t], anchor[t] + math.log(1 - term["low"]))
    r = math.exp(over(world, t, term.get("per", "token"), live, [x - y for x, y in zip(lp, anchor, strict=True)]))
    if kind == "sapo":
        tau = term["tau"] if a > 0 else term["tau_negative"]
        return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
    loss = -min(r * a, min(max(r, 1 - term["low"]), 1 + term["high"]) * a)
    return min(loss, -term["dual"] * a) if term["dual"] is not None and a < 0 else loss


def kept(world: World, select: Terms, t: int, a: float, lp: float) -> bool:
    """Whether the token's loss survives the masks that look at its log-prob now."""
    old = world.tokens[t].old
    if old is None:
        return True
    if select["kl_mask"] is not None and (lp - old) ** 2 / 2 > select["kl_mask"]:
        return False
    moved = math.exp(lp) - math.exp(old)
    return select["shift_mask"] is None or (moved if a > 0 else -moved) <= select["shift_mask"]


def total(
    world: World, recipe: Terms, a: list[float], inside: list[bool], lp: list[float], stopped: list[float]
) -> float:
    """sum of w l over the batch."""
    live = top_entropy(world, inside, recipe["select"]["entropy_top"])
    names = [
        (world.episodes[token.episode].group, str(token.episode), token.turn)
        for token, i in zip(world.tokens, inside, strict=True)
        if i
    ]
    weighed = iter(weights(recipe["weigh"]["kind"], names, recipe["weigh"]["limit"]))
    w = [next(weighed) if i else 0.0 for i in inside]
    pairs = [anchored(world, recipe["anchor"], t, live) if live[t] else (0.0, 0.0) for t in range(len(inside))]
    anchor = [p[0] for p in pairs]
    out = []
    for t in (t for t, x in enumerate(live) if x and kept(world, recipe["select"], t, a[t], stopped[t])):
        scale = pairs[t][1] if recipe["surrogate"]["kind"] not in ("nll", "minor_nll", "none") else 1.0
        loss = scale * surrogate(world, recipe["surrogate"], t, a[t], lp, stopped, anchor, live)
        for term in recipe["regulariser"]:
            if term["kind"] == "kl" and term["beta"]:
                other = world.tokens[t].old if term["to"] == "sampler" else world.tokens[t].ref
                assert other is not None
                loss += term["beta"] * kl(term["estimator"], lp[t], other)
            elif term["kind"] == "entropy":
                loss -= term["coefficient"] * world.tokens[t].entropy
        out.append(w[t] * loss)
    return math.fsum(out)


def value(v: float, old: float, target: float, clip: float | None) -> float:
    """The critic's loss at one token."""
    error = (v - target) ** 2
    bounded = error if clip is None else (old + min(max(v - old, -clip), clip) - target) ** 2
    return max(error, bounded) / 2


def score(logits: np.ndarray, token: int, temperature: float) -> tuple[float, float]:
    """(log-prob of the token, entropy in nats) of the distribution that logits (V,) give at a temperature."""
    z = logits.astype(np.float64) / temperature
    z = z - z.max()
    lsm = z - math.log(np.exp(z).sum())
    return float(lsm[token]), float(-(np.exp(lsm) * lsm).sum())
