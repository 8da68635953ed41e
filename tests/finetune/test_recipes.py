"""Every recipe: its documented equation, written out in plain loops, equals the code, loss and gradient."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import pytest
import torch

from tapereel.finetune import objective
from tapereel.finetune.recipes import RECIPES, BadRecipe, Recipe, get_recipe, read
from tapereel.finetune.words import Context, Whiten

from ..oracles import objective as oracle
from .build import doubles, episode, exact, row

GROUPS = ["g", "g", "g", "h", "h", "h", "k", "k"]
TURNS = [(2, 1), (1,), (3,), (2,), (1, 1), (2,), (1,), (2,)]
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, 0.0, 1.0, 1.0]
LENGTHS = [17000, 10, 19000, 20480, 30000, 20, 18000, 10]
"""What counts against a length limit; only a recipe with one looks at it."""
N = sum(map(sum, TURNS))


@dataclasses.dataclass
class World:
    """A batch as plain lists; `of` is each token's episode."""

    of: list[int]
    lp: list[float]
    old: list[float]
    ref: list[float]
    value: list[float]

    def group(self, i: int) -> list[float]:
        return [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == GROUPS[i]]

    def tokens(self, i: int) -> list[int]:
        return [t for t, e in enumerate(self.of) if e == i]

    def std(self, eps: float) -> list[float]:
        return oracle.baseline(REWARDS, GROUPS, "std", "group", eps, 1)

    def ratio(self, t: int) -> float:
        return math.exp(self.lp[t] - self.old[t])

    def clipped(self, t: int, a: float, low: float = 0.2, high: float = 0.2) -> float:
        return min(self.ratio(t) * a, min(max(self.ratio(t), 1 - low), 1 + high) * a)


def world(seed: int = 3) -> World:
    g = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> list[float]:
        return (-1 + scale * torch.randn(N, generator=g, dtype=torch.float64)).clamp(max=-0.01).tolist()

    of = [i for i, turns in enumerate(TURNS) for _ in range(sum(turns))]
    old = draw(0.3)
    lp = [min(o + 0.4 * d, -0.01) for o, d in zip(old, torch.randn(N, generator=g).tolist(), strict=True)]
    return World(of, lp, old, draw(0.3), torch.rand(N, generator=g, dtype=torch.float64).tolist())


def whitened(a: list[float]) -> list[float]:
    m = statistics.fmean(a)
    var = statistics.fmean((x - m) ** 2 for x in a)
    return [(x - m) / math.sqrt(max(var, 1e-8)) for x in a]


def grpo(w: World) -> float:
    a = w.std(1e-9)
    return -sum(w.clipped(t, a[w.of[t]]) for t in range(N)) / N


def reinforce(w: World) -> float:
    a = w.std(1e-4)
    return -sum(w.lp[t] * a[w.of[t]] for t in range(N)) / N


def reinforce_plain(w: World) -> float:
    return -sum(w.lp[t] * REWARDS[w.of[t]] for t in range(N)) / N


def rloo(w: World) -> float:
    a = oracle.baseline(REWARDS, GROUPS, "loo", "group", 0, 0)
    return -sum(w.lp[t] * a[w.of[t]] for t in range(N)) / N


def reinforce_pp(w: World) -> float:
    a = whitened([REWARDS[e] for e in w.of])
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def reinforce_pp_baseline(w: World) -> float:
    a = whitened([REWARDS[e] - statistics.fmean(w.group(e)) for e in w.of])
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def ppo(w: World) -> float:
    a: list[float] = []
    for i, r in enumerate(REWARDS):
        mine = w.tokens(i)
        a += oracle.gae([0.0] * (len(mine) - 1) + [r], [w.value[t] for t in mine], 1.0, 0.95, 0.0)[0]
    a = whitened(a)
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def cpgd(w: World) -> float:
    a = oracle.baseline(REWARDS, GROUPS, "std", "batch", 1e-6, 0)
    loss = 0.0
    for t in range(N):
        adv = a[w.of[t]]
        bound = min(w.lp[t], w.old[t] + math.log(1.2)) if adv > 0 else max(w.lp[t], w.old[t] + math.log(0.8))
        loss += -adv * bound + 0.1 * oracle.kl("k3", w.lp[t], w.old[t])
    return loss / N


def dr_grpo(w: World) -> float:
    a = oracle.baseline(REWARDS, GROUPS, "mean", "group", 0, 0)
    return -sum(w.clipped(t, a[w.of[t]]) for t in range(N)) / (len(REWARDS) * 512)


def dapo(w: World) -> float:
    priced = [r - min(max(n - (20480 - 4096), 0) / 4096, 1) for r, n in zip(REWARDS, LENGTHS, strict=True)]
    a = oracle.baseline(priced, GROUPS, "std", "group", 1e-9, 1)
    used = [t for t in range(N) if len(set(w.group(w.of[t]))) > 1]
    return -sum(w.clipped(t, a[w.of[t]], 0.2, 0.28) for t in used) / len(used)


def gspo(w: World) -> float:
    a, loss = w.std(1e-9), 0.0
    for i in range(len(REWARDS)):
        s = math.exp(statistics.fmean(w.lp[t] - w.old[t] for t in w.tokens(i)))
        loss -= min(s * a[i], min(max(s, 1 - 3e-4), 1 + 4e-4) * a[i]) / len(REWARDS)
    return loss


def cispo(w: World) -> float:
    """The value of the loss; its gradient is checked apart, since the weight carries none."""
    a = w.std(1e-9)
    return -sum(min(w.ratio(t), 5) * a[w.of[t]] * w.lp[t] for t in range(N)) / N


def sapo(w: World) -> float:
    a, loss = w.std(1e-9), 0.0
    for t in range(N):
        adv = a[w.of[t]]
        tau = 1.0 if adv > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (w.ratio(t) - 1)))
        loss -= 4 / tau * gate * adv / (len(REWARDS) * len(w.tokens(w.of[t])))
    return loss


def decoupled_ppo(w: World) -> float:
    """prox is lp: the ratio is 1, the weight min(exp(lp - old), 2)."""
    a = w.std(1e-9)
    return -sum(min(w.ratio(t), 2) * a[w.of[t]] for t in range(N)) / N


def sft(w: World) -> float:
    return -sum(w.lp) / N


def rft(w: World) -> float:
    used = [t for t in range(N) if REWARDS[w.of[t]] >= 1]
    return -sum(w.lp[t] for t in used) / len(used)


def minor_sft(w: World) -> float:
    loss = 0.0
    for t in range(N):
        ratio = statistics.fmean(w.lp[u] - w.ref[u] for u in w.tokens(w.of[t]))
        loss += -2 / 0.1 * math.log(1 / (1 + math.exp(-0.1 * ratio))) / N
    return loss


def distill(w: World) -> float:
    return sum(oracle.kl("k3", w.lp[t], w.ref[t]) for t in range(N)) / N


EQUATIONS: dict[str, Callable[[World], float]] = {
    f.__name__: f for f in (sft, grpo, reinforce, reinforce_plain, rloo, reinforce_pp, reinforce_pp_baseline, ppo, cpgd,
                            dr_grpo, dapo, gspo, cispo, sapo, decoupled_ppo, rft, minor_sft, distill)}
STOPPED = {"cispo", "decoupled_ppo"}
"""Recipes with a factor that carries no gradient, so that differences of the loss aren't its gradient."""


def computed(recipe: Recipe, w: World) -> tuple[float, torch.Tensor]:
    rows = [row(f"t{i}", g, turns=t) for i, (g, t) in enumerate(zip(GROUPS, TURNS, strict=True))]
    episodes = [episode(f"t{i}", g, reward=r, length=n)
                for i, (g, r, n) in enumerate(zip(GROUPS, REWARDS, LENGTHS, strict=True))]
    stream = exact(rows, episodes, old=w.old, ref=w.ref, value=w.value)
    part = objective.prepare(recipe, stream, Context()).part()
    lp = doubles(w.lp).requires_grad_()
    loss = part.loss(lp, None, torch.arange(N), Context(), objective.betas(recipe))
    return loss.item(), torch.autograd.grad(loss, lp)[0]


@pytest.mark.ledger("F34", "F35", "F36", "F37", "F38", "F40", "F45", "F52", "F53", "F54", "F56", "X1", "X2", "X13")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_documented_equation_equals_the_code(name):
    w = world()
    recipe = RECIPES[name]
    loss, grad = computed(recipe, w)
    assert loss == pytest.approx(EQUATIONS[name](w), rel=1e-9)
    if name in STOPPED:
        return
    for t in range(N):
        up, down = (dataclasses.replace(w, lp=[*w.lp[:t], w.lp[t] + e, *w.lp[t + 1:]]) for e in (1e-6, -1e-6))
        slope = (EQUATIONS[name](up) - EQUATIONS[name](down)) / 2e-6
        assert grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.ledger("X2", "T23")
def test_a_weight_without_gradient_leaves_the_score_function_alone():
    w = world()
    a = w.std(1e-9)
    _, grad = computed(RECIPES["cispo"], w)
    assert grad.tolist() == pytest.approx([-min(w.ratio(t), 5) * a[w.of[t]] / N for t in range(N)], rel=1e-9, abs=1e-15)
    _, grad = computed(RECIPES["decoupled_ppo"], w)
    assert grad.tolist() == pytest.approx([-min(w.ratio(t), 2) * a[w.of[t]] / N for t in range(N)], rel=1e-9, abs=1e-15)


@pytest.mark.ledger("F45", "F47")
def test_the_floor_of_the_batch_deviation_is_that_of_the_source():
    for name in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
        assert RECIPES[name].adjust == (Whiten(ddof=0, eps=1e-8, how="floor", centre_only=False),)


def test_clips_are_the_papers():
    clips = {name: (r.surrogate.low, r.surrogate.high) for name, r in RECIPES.items() if r.surrogate.kind == "ppo"}
    assert clips.pop("dapo") == (0.2, 0.28)
    assert clips.pop("gspo") == (3e-4, 4e-4)
    assert set(clips.values()) == {(0.2, 0.2)}


def test_a_recipe_prints_every_word_with_its_constants():
    text = str(RECIPES["grpo"])
    assert text.splitlines()[0] == "recipe grpo"
    words = "score reward shape baseline credit adjust anchor surrogate regulariser select weigh"
    for word in words.split():
        assert f"\n  {word} " in text
    assert "std(by=group, eps=1e-09, ddof=1)" in text
    assert "ppo(low=0.2, high=0.2, dual=None, per=token)" in text


def test_recipes_are_frozen_named_after_their_module_and_survive_a_round_trip():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert read(recipe.model_dump()) == recipe
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    with pytest.raises(ValueError, match="frozen"):
        RECIPES["grpo"].name = "mine"  # type: ignore[misc]


@pytest.mark.parametrize(("changes", "message"), [
    ({"basline": {}}, "unknown key 'basline'; did you mean baseline"),
    ({"baseline": {"epsilon": 1}}, "unknown key 'baseline.epsilon'"),
    ({"surrogate": {"kind": "ppo", "clip": 0.2}}, "clip"),
    ({"baseline": {"kind": "median"}}, "baseline.kind"),
    ({"weigh": {"limit": "long"}}, "weigh.limit"),
    ({"regulariser": [{"kind": "kl", "estimator": "k1", "beta": 0.1}]}, "expected gradient of 0"),
])
def test_what_cannot_be_meant_is_refused_by_name(changes, message):
    with pytest.raises(BadRecipe, match=message):
        get_recipe("grpo", changes)


def test_an_unknown_recipe_names_its_neighbours():
    with pytest.raises(BadRecipe, match="there is no recipe 'grop': take one of grpo"):
        get_recipe("grop")


def test_changes_keep_what_they_do_not_name():
    changed = get_recipe("dapo", {"surrogate": {"high": 0.3}, "weigh": {"kind": "episode"}})
    assert changed.surrogate.model_dump() == {"kind": "ppo", "low": 0.2, "high": 0.3, "dual": None, "per": "token"}
    assert changed.select.flat == "drop"
    other = get_recipe("dapo", {"surrogate": {"kind": "cispo"}})
    assert other.surrogate.model_dump() == {"kind": "cispo", "low": None, "cap": 5.0}
    assert RECIPES["dapo"].surrogate.kind == "ppo"
