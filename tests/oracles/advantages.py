"""Rewards to advantages, slowly: select (episodes), reward, shape, baseline, credit, adjust, one loop per formula.

Written from the ledger in plain Python and float64. A recipe is the mapping of its terms' constants. Shares no code
with the package.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from .objective import baseline, gae, kl, returns
from .world import World

Terms = dict[str, Any]


def point(world: World, e: int) -> str:
    """Where e begins: at the turn that it was forked from, or with its group."""
    return world.episodes[e].fork or f"group {world.episodes[e].group}"


def flat(world: World, e: int, scored: list[bool], by_fork: bool = False) -> bool:
    """Whether e's group (by_fork: what begins where e does) has no spread among what is scored."""
    owner = [point(world, i) if by_fork else a.group for i, a in enumerate(world.episodes)]
    earned = {a.reward for i, a in enumerate(world.episodes) if scored[i] and owner[i] == owner[e]}
    return len(earned - {None}) < 2


def scored(world: World, advantages: bool) -> list[bool]:
    return [a.trains and (a.reward is not None or not advantages) for a in world.episodes]


def entered(world: World, select: Terms, known: list[bool], by: str) -> list[bool]:
    """Episodes that enter, from those that may."""
    return chosen(world, select, known, by)[0]


def chosen(world: World, select: Terms, known: list[bool], by: str) -> tuple[list[bool], list[bool]]:
    """(episodes that enter, those that the baseline compares), from those that may enter."""
    inside = list(known)
    first = select["keep"] is not None and select["keep_when"] == "before_baseline"
    compared = narrowed(world, select, inside) if first else inside
    if select["mean_bounds"] is not None:
        low, high = select["mean_bounds"]
        for group in {a.group for a in world.episodes}:
            members = [e for e, a in enumerate(world.episodes) if a.group == group]
            earned = [r for e in members if compared[e] and (r := world.episodes[e].reward) is not None]
            m = math.fsum(earned) / len(earned) if earned else math.nan
            if not ((low is None or m >= low) and (high is None or m <= high)) or not earned:
                compared = [x and e not in members for e, x in enumerate(compared)]
    inside = list(compared)
    if select["flat"] == "drop":
        inside = [x and not flat(world, e, compared, by == "fork") for e, x in enumerate(inside)]
    return (inside if first else narrowed(world, select, inside)), compared


def narrowed(world: World, select: Terms, inside: list[bool]) -> list[bool]:
    """Those within the bounds, and of each group those that are kept."""
    inside = list(inside)
    if select["bounds"] is not None:
        low, high = select["bounds"]
        for e, a in enumerate(world.episodes):
            r = a.reward
            inside[e] &= r is not None and (low is None or r >= low) and (high is None or r <= high)
    if select["keep"] is not None:
        for group in {a.group for a in world.episodes}:
            members = [e for e, a in enumerate(world.episodes) if a.group == group and inside[e]]
            for e in set(members) - set(best(world, members, select["keep"], select["keep_how"])):
                inside[e] = False
    return inside


def best(world: World, members: list[int], n: int, how: str) -> list[int]:
    """Those of the members that are kept; unscored ranks behind every reward."""
    earned = {e: -math.inf if (r := world.episodes[e].reward) is None else r for e in members}
    ranked = sorted(members, key=lambda e: (-earned[e], e))
    if how == "best" or len(ranked) <= n:
        return ranked[:n]
    worst = n // 2
    return ranked[: n - worst] + (ranked[-worst:] if worst else [])


def rewards(world: World, term: Terms) -> list[float | None]:
    """One per unit; None: unscored."""
    if term["components"] is not None:
        return [
            None
            if a.reward is None or set(term["components"]) - set(a.components)
            else math.fsum(w * a.components[k] for k, w in term["components"].items())
            for a in world.episodes
        ]
    if term["per"] == "turn":
        return [None if world.episodes[e].reward is None else acted(world, e, k) for e, k in world.units("turn")]
    how = {"sum": math.fsum, "mean": statistics.fmean, "max": max}[term["reduce"]]
    return [
        None
        if a.reward is None
        else a.reward
        if term["reduce"] == "sum"
        else how([r for r in a.turn_rewards if r is not None])
        for a in world.episodes
    ]


def acted(world: World, e: int, k: int) -> float | None:
    """What turn k earned, up to the next turn in which the agent acts; None if unscored, or if it doesn't act in k."""
    own = {world.tokens[t].turn for t in world.of_episode(e)}
    if k not in own:
        return None
    until = min((turn for turn in own if turn > k), default=len(world.episodes[e].turn_rewards))
    earned = [r for r in world.episodes[e].turn_rewards[k:until] if r is not None]
    return math.fsum(earned) if earned else None


def drift(world: World, estimator: str, t: int, *, recomputed: bool) -> float:
    """The estimate of sampler against reference at a token; 0 where the sampler's log-prob isn't known."""
    lp = world.tokens[t].prox if recomputed else world.tokens[t].old
    return 0.0 if lp is None else kl(estimator, lp, world.tokens[t].ref)


def shaped(
    world: World, terms: list[Terms], units: list[tuple[int, int]], x: list[float | None], *, recomputed: bool
) -> list[float | None]:
    for term in terms:
        mine = [i for i, value in enumerate(x) if value is not None]
        values = [v for v in x if v is not None]
        if term["kind"] == "clip":
            x = [None if v is None else min(max(v, term["low"]), term["high"]) for v in x]
        elif term["kind"] == "running":
            if len(set(values)) > 1:
                m, s = statistics.fmean(values), statistics.stdev(values)
                x = [None if v is None else (v - (m if term["centre"] else 0.0)) / s for v in x]
        elif term["kind"] in ("overlong", "episode_kl"):
            for i in mine:
                e, k = units[i]
                if k == max(units[j][1] for j in mine if units[j][0] == e):
                    x = [*x[:i], (x[i] or 0.0) + _price(world, term, e, recomputed=recomputed), *x[i + 1 :]]
    return x


def _price(world: World, term: Terms, e: int, *, recomputed: bool) -> float:
    if term["kind"] == "overlong":
        over = world.episodes[e].length - (term["limit"] - term["buffer"])
        return max(-term["factor"], min(0.0, -over / term["buffer"] * term["factor"]))
    return -term["beta"] * math.fsum(
        drift(world, term["estimator"], t, recomputed=recomputed) for t in world.of_episode(e)
    )


def compared(world: World, term: Terms, units: list[tuple[int, int]], x: list[float | None]) -> list[float]:
    """The baseline's advantage of each unit; 0 where it is unscored."""
    mine = [i for i, v in enumerate(x) if v is not None]
    peers = {
        "group": [a.group for a in world.episodes],
        "batch": [""] * len(world.episodes),
        "fork": [point(world, e) for e in range(len(world.episodes))],
    }[term["by"]]
    names = [peers[units[i][0]] for i in mine]
    out = [0.0] * len(x)
    values = [v for v in x if v is not None]
    for i, y in zip(mine, baseline(values, names, term["kind"], term["by"], term["eps"], term["ddof"]), strict=True):
        out[i] = y
    return out


def of_returns(
    world: World, recipe: Terms, units: list[tuple[int, int]], x: list[float | None], price: list[float]
) -> tuple[list[float], list[float] | None]:
    """The credit of each turn compared with the credit of the same turn of the others, counting turns that act."""
    term = recipe["baseline"]
    credit, target = spread(world, recipe, units, [v or 0.0 for v in x], price)
    out = [0.0] * len(world.tokens)
    turns: list[tuple[int, int, int, float]] = []  # (episode, turn, how many before it, credit)
    for e in range(len(world.episodes)):
        last = max((k for (owner, k), v in zip(units, x, strict=True) if owner == e and v is not None), default=-1)
        for place, k in enumerate(sorted({world.tokens[t].turn for t in world.of_episode(e)})):
            first = next(t for t in world.in_time(e) if world.tokens[t].turn == k)
            if k <= last:
                turns.append((e, k, place, credit[first]))
    names = {
        "group": [f"{world.episodes[e].group} {place}" for e, _, place, _ in turns],
        "batch": [""] * len(turns),
        "fork": [f"{point(world, e)} {place}" for e, _, place, _ in turns],
    }[term["by"]]
    ys = baseline([c for *_, c in turns], names, term["kind"], term["by"], term["eps"], term["ddof"])
    for (e, k, _, _), y in zip(turns, ys, strict=True):
        for t in world.of_episode(e):
            if world.tokens[t].turn == k:
                out[t] = y
    return out, target


def spread(
    world: World, recipe: Terms, units: list[tuple[int, int]], y: list[float], price: list[float]
) -> tuple[list[float], list[float] | None]:
    """(advantage of each token, the critic's targets or None)."""
    credit, n = recipe["credit"], len(world.tokens)
    advantage, target = [0.0] * n, [0.0] * n
    for e in range(len(world.episodes)):
        order = world.in_time(e)
        mine = {k: y[i] for i, (owner, k) in enumerate(units) if owner == e}
        if credit["kind"] == "broadcast":
            for t in order:
                advantage[t] = mine[-1] if -1 in mine else mine[world.tokens[t].turn]
            continue
        turns = sorted({world.tokens[t].turn for t in order})
        steps = (
            [[t] for t in order]
            if credit["clock"] == "token"
            else [[t for t in order if world.tokens[t].turn == k] for k in turns]
        )
        if not steps:
            continue
        earned = [math.fsum(price[t] for t in step) for step in steps]
        for k, value in mine.items():
            before = [s for s, step in enumerate(steps) if k in (-1,) or world.tokens[step[0]].turn <= k]
            if before:
                earned[before[-1]] += value
        if credit["kind"] == "returns":
            a = returns(earned, credit["gamma"])
            targets = a
        else:
            values = [world.tokens[step[0]].value for step in steps]
            a, targets = gae(earned, values, credit["gamma"], credit["lam"], world.episodes[e].bootstrap)
        for step, one, two in zip(steps, a, targets, strict=True):
            for t in step:
                advantage[t], target[t] = one, two
    return advantage, target if credit["kind"] == "gae" else None


def adjusted(world: World, terms: list[Terms], a: list[float], inside: list[bool], known: list[bool]) -> list[float]:
    for term in terms:
        if term["kind"] == "clip":
            a = [min(max(v, -term["limit"]), term["limit"]) for v in a]
        elif term["kind"] == "relu":
            a = [max(v, 0.0) for v in a]
        elif term["kind"] == "groups":
            a = [v * group_weight(world, term, token.episode, known) for v, token in zip(a, world.tokens, strict=True)]
        else:
            a = whitened(a, inside, term)
    return a


def whitened(a: list[float], inside: list[bool], term: Terms) -> list[float]:
    mine = [v for v, i in zip(a, inside, strict=True) if i]
    if len(mine) < 2 or max(mine) - min(mine) <= 1e-12 * max(map(abs, mine)):
        return [0.0] * len(a)
    m = statistics.fmean(mine)
    var = math.fsum((v - m) ** 2 for v in mine) / (len(mine) - term["ddof"])
    s = (
        1.0
        if term["centre_only"]
        else math.sqrt(max(var, term["eps"]))
        if term["how"] == "floor"
        else math.sqrt(var) + term["eps"]
    )
    return [(v - m) / s if i else 0.0 for v, i in zip(a, inside, strict=True)]


def group_weight(world: World, term: Terms, e: int, known: list[bool]) -> float:
    scored = [i for i, a in enumerate(world.episodes) if known[i] and a.reward is not None]
    groups = {world.episodes[i].group for i in scored}
    teach = {world.episodes[i].group for i in scored if not flat(world, i, known)}
    if not teach:
        return 1.0
    return min(len(groups) / len(teach), term["cap"]) if world.episodes[e].group in teach else term["flat"]


def advantages(world: World, recipe: Terms) -> tuple[list[float], list[bool], list[float] | None]:
    """(advantage of each token, whether it enters, the critic's targets) of a recipe that learns from rewards."""
    episodes, known = chosen(world, recipe["select"], scored(world, True), recipe["baseline"]["by"])
    inside = [episodes[token.episode] and token.old is not None for token in world.tokens]
    recomputed = recipe["anchor"]["to"] == "recomputed"
    units = world.units(recipe["reward"]["per"])
    x = [v if known[e] else None for v, (e, _) in zip(rewards(world, recipe["reward"]), units, strict=True)]
    x = shaped(world, recipe["shape"], units, x, recomputed=recomputed)
    price = [0.0] * len(world.tokens)
    for term in recipe["shape"]:
        if term["kind"] == "token_kl":
            price = [
                -term["beta"] * drift(world, term["estimator"], t, recomputed=recomputed)
                for t in range(len(world.tokens))
            ]
    turns = recipe["reward"]["per"] == "turn" and recipe["reward"]["components"] is None
    if turns and recipe["credit"]["kind"] != "broadcast" and recipe["baseline"]["kind"] != "none":
        a, target = of_returns(world, recipe, units, x, price)
    else:
        a, target = spread(world, recipe, units, compared(world, recipe["baseline"], units, x), price)
    a = adjusted(world, recipe["adjust"], a, inside, known)
    return [v if i else 0.0 for v, i in zip(a, inside, strict=True)], inside, target
