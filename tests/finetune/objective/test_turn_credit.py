"""Rewards per turn: returns are compared, an unscored turn isn't 0, and the other player's turns aren't mine.

Each advantage is compared with a loop over lists in float64, which shares no code with the package or other oracles.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapereel.finetune import Episode
from tapereel.finetune.data import apart
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe

from ..build import episode, exact, row

Rewards = list[float | None]
RETURNS = {"reward": {"per": "turn"}, "credit": {"kind": "returns", "clock": "turn", "gamma": 0.9}}
RECIPES: dict[str, dict[str, Any]] = {"grpo": RETURNS, "rloo": RETURNS, "reinforce_plain": RETURNS}
RECIPES["reinforce_pp_baseline"] = {**RETURNS, "adjust": []}


def draw(kind: str, rng: random.Random) -> Rewards:
    """The rewards of an episode of one to six turns."""
    turns = rng.randint(1, 6)
    if kind == "sparse":
        return [0.0] * (turns - 1) + [float(rng.random() < 0.5)]
    if kind == "dense":
        return [1.0] * turns
    if kind == "negative":
        return [-rng.random() for _ in range(turns)]
    return [rng.choice([None, None, 0.0, 0.5, -1.0]) for _ in range(turns)]


def loop(attempts: list[Rewards], compare: str, eps: float, gamma: float) -> list[list[float]]:
    """The advantage of each turn: the return from it on, compared with the returns of the others' k-th turns."""
    led_to: list[list[float | None]] = []
    for rewards in attempts:
        led_to.append([])
        for k in range(len(rewards)):
            scored = [(n, r) for n, r in enumerate(rewards[k:]) if r is not None]
            led_to[-1].append(math.fsum(gamma**n * r for n, r in scored) if scored else None)
    out = []
    for returns in led_to:
        out.append([])
        for k, g in enumerate(returns):
            peers = [other[k] for other in led_to if len(other) > k and other[k] is not None]
            if g is None:
                out[-1].append(0.0)
            elif compare == "none":
                out[-1].append(g)
            elif len(peers) < 2 or min(peers) == max(peers):
                out[-1].append(0.0)
            elif compare == "loo":
                out[-1].append(g - (math.fsum(peers) - g) / (len(peers) - 1))
            else:
                y = g - math.fsum(peers) / len(peers)
                out[-1].append(y / (statistics.stdev(peers) + eps) if compare == "std" else y)
    return out


def made(name: str, rewards: Rewards, **fields: Any) -> Episode:
    known = [r for r in rewards if r is not None]
    turns = [math.nan if r is None else r for r in rewards]
    return episode(name, reward=math.fsum(known) if known else None, turn_rewards=turns, **fields)


def advantages(recipe: Any, rows: list, episodes: list[Episode]) -> dict[str, list[float]]:
    """The advantage of each turn with own tokens, by episode; all tokens of a turn have the same."""
    stream = exact(rows, episodes)
    batch = objective.prepare(recipe, stream, Context())
    found: dict[str, dict[int, set[float]]] = {}
    for e, turn, a in zip(stream.episode.tolist(), stream.turn.tolist(), batch.advantage.tolist(), strict=True):
        found.setdefault(stream.episodes.tape[e], {}).setdefault(turn, set()).add(a)
    assert all(len(values) == 1 for turns in found.values() for values in turns.values())
    return {tape: [values.pop() for _, values in sorted(turns.items())] for tape, turns in found.items()}


@pytest.mark.ledger("F43", "F31")
@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("kind", ["sparse", "dense", "negative", "unscored"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_advantage_of_a_turn_is_the_loops(name: str, kind: str, agents: int) -> None:
    recipe = get_recipe(name, RECIPES[name])
    for seed in range(20):
        rng = random.Random(f"{name} {kind} {seed}")
        attempts = [draw(kind, rng) for _ in range(4)]
        want = loop(attempts, recipe.baseline.kind, recipe.baseline.eps, 0.9)
        names = [f"t{i}" for i in range(4)]
        if agents == 1:
            rows = [row(n, turns=[rng.randint(1, 3) for _ in one]) for n, one in zip(names, attempts, strict=True)]
            episodes = [made(n, one) for n, one in zip(names, attempts, strict=True)]
        else:
            rows, episodes = [], []
            for n, one in zip(names, attempts, strict=True):
                parts = two_players(n, one, rng)
                rows, episodes = rows + parts[0], episodes + parts[1]
        found = advantages(recipe, rows, episodes)
        for n, one, right in zip(names, attempts, want, strict=True):
            mine = found[n if agents == 1 else f"{n}#x"]
            scored = any(r is not None for r in one)
            assert mine == pytest.approx(right if scored else [0.0] * len(one), rel=1e-12, abs=1e-12), (seed, one)


def two_players(name: str, mine: Rewards, rng: random.Random) -> tuple[list, list[Episode]]:
    """A game of x, o, x, o: x earns `mine`, some of it by what o does next; o earns something of its own."""
    turns: list[float] = []
    for r in mine:
        later = r is not None and rng.random() < 0.5
        turns += [math.nan if r is None or later else r, r if r is not None and later else math.nan]
    theirs = [rng.random() if k % 2 else math.nan for k in range(len(turns))]
    whole = math.fsum(r for r in [*turns, *theirs] if r == r)
    both = row(name, turns=[2] * len(turns))
    both = replace(both, agents=tuple("xo"[k % 2] for k in range(len(turns))))
    alone = {"o": np.array(theirs)} | ({"x": np.array(turns)} if any(r == r for r in turns) else {})
    return apart([both], episode(name, reward=whole, turn_rewards=None, alone=alone))


def test_winners_after_six_turns_are_pushed_up_and_early_losers_down() -> None:
    recipe = get_recipe("grpo", RETURNS | {"baseline": {"kind": "mean"}, "credit": {"kind": "returns"}})
    attempts: list[Rewards] = [[0.0] * 5 + [1.0], [0.3], [0.0] * 5 + [1.0], [0.3]]
    rows = [row(f"t{i}", turns=[2] * len(one)) for i, one in enumerate(attempts)]
    found = advantages(recipe, rows, [made(f"t{i}", one) for i, one in enumerate(attempts)])
    assert found["t0"] == pytest.approx([0.35, 0, 0, 0, 0, 0])
    assert found["t1"] == pytest.approx([-0.35])


def test_a_turn_after_which_nothing_is_scored_is_not_a_turn_that_earned_nothing() -> None:
    rows = [row(f"t{i}", turns=[1, 1]) for i in range(3)]
    recipe = get_recipe("grpo", RETURNS | {"baseline": {"kind": "mean"}})

    def of(last: float | None) -> dict[str, list[float]]:
        return advantages(recipe, rows, [made("t0", [1.0, last]), made("t1", [0.0, 1.0]), made("t2", [0.0, 0.5])])

    assert of(0.0)["t1"][1] == pytest.approx(0.5)
    assert (of(None)["t1"][1], of(None)["t0"][1]) == pytest.approx((0.25, 0.0))


def test_a_mean_and_a_maximum_are_over_scored_turns() -> None:
    stream = exact([row("t0", turns=[1, 1, 1])], [made("t0", [None, -1.0, -3.0])])
    for how, want in (("mean", -2.0), ("max", -1.0), ("sum", -4.0)):
        assert get_recipe("grpo", {"reward": {"reduce": how}}).reward(stream, Context()).tolist() == [want]


def test_a_length_penalty_of_an_episode_whose_last_turn_is_unscored_still_acts() -> None:
    price = {"shape": [{"kind": "overlong", "limit": 4, "buffer": 2}], "baseline": {"kind": "none"}}
    found = advantages(get_recipe("grpo", RETURNS | price), [row("t0", turns=[4, 4])], [made("t0", [1.0, None])])
    assert found["t0"][0] == 0.0, "1 minus the whole penalty"


def test_weighed_components_are_one_reward_for_the_episode() -> None:
    recipe = get_recipe("reinforce_plain", {"reward": {"components": {"a": 2.0}}})
    one = episode("t0", reward=1.0, turn_rewards=[0.0, 1.0], components={"a": 1.0})
    assert advantages(recipe, [row("t0", turns=[1, 1])], [one])["t0"] == [2.0, 2.0]
