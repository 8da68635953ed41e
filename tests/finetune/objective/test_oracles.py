"""Every term against a slow reading of the ledger in plain loops: random batches, random constants, one term at a time
and all of them at once; losses by value, gradients by difference quotients of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tapereel.finetune import Recipe
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Value
from tapereel.finetune.trainer import lm_head as head

from ...oracles import advantages as slow
from ...oracles import losses as slower
from ...oracles.world import World
from ..build import doubles
from ..worlds import TERMS, recipes, streamed, worlds

MANY = settings(
    max_examples=15,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def recipe_of(changes: dict) -> Recipe:
    return get_recipe("grpo", {"both_kls": True, **changes})


def check(world: World, recipe: Recipe, rows: list, episodes: list) -> None:
    """Advantages, targets, weights, loss and gradient of the package are the oracle's."""
    terms = recipe.model_dump()
    stream = streamed(world, rows, episodes, recomputed=recipe.anchor.to == "recomputed")
    batch = objective.prepare(recipe, stream, Context())
    if recipe.surrogate.advantages:
        a, inside, target = slow.advantages(world, terms)
    else:
        known = slow.scored(world, False)
        kept = slow.entered(world, terms["select"], known, terms["baseline"]["by"])
        a, inside, target = [0.0] * len(stream), [kept[token.episode] for token in world.tokens], None
    assert batch.entered.tolist() == inside
    assert batch.advantage.tolist() == pytest.approx(a, rel=1e-9, abs=1e-9)
    if target is not None:
        assert batch.target is not None
        assert batch.target.tolist() == pytest.approx(target, rel=1e-9, abs=1e-9)
    part = batch.part()
    lp = doubles([token.lp for token in world.tokens]).requires_grad_()
    entropy = doubles([token.entropy for token in world.tokens])
    loss = part.loss(lp, entropy, torch.arange(len(stream)), Context(), objective.betas(recipe))
    here = [token.lp for token in world.tokens]
    assert loss.item() == pytest.approx(slower.total(world, terms, a, inside, here, here), rel=1e-8, abs=1e-8)
    slope = torch.autograd.grad(loss, lp)[0].numpy() if loss.requires_grad else np.zeros(len(here))
    assert np.isfinite(slope).all()
    for way in np.random.default_rng(0).standard_normal((2, len(here))):
        _differences(world, terms, a, inside, np.array(here), slope, way)


def _differences(
    world: World,
    terms: dict,
    a: list[float],
    inside: list[bool],
    here: np.ndarray,
    slope: np.ndarray,
    way: np.ndarray,
    step: float = 1e-6,
) -> None:
    """The gradient along one direction, unless the loss has a kink within the step."""

    def at(x: float) -> float:
        return slower.total(world, terms, a, inside, (here + x * way).tolist(), here.tolist())

    right, left = (at(step) - at(0)) / step, (at(0) - at(-step)) / step
    if abs(right - left) < 1e-3 * max(1.0, abs(right)):
        scale = 1 + float(np.abs(slope * way).sum())
        assert float(slope @ way) == pytest.approx((right + left) / 2, rel=1e-4, abs=3e-5 * scale)


@pytest.mark.ledger(
    "F27", "F28", "F29", "F30", "F34", "F35", "F36", "F37", "F40", "F41", "F43", "F44", "F45", "F48", "F51", "X5", "X12"
)
@pytest.mark.parametrize("name", ["reward", "shape", "baseline", "credit", "adjust", "select"])
@MANY
@given(st.data())
def test_advantages_of_each_term_are_those_of_the_oracle(name, data):
    world, rows, episodes = data.draw(worlds())
    check(world, recipe_of(data.draw(recipes(name))), rows, episodes)


@pytest.mark.ledger("F52", "F53", "F54", "F56", "F57", "F60", "F61", "F63", "F64", "X1", "X2", "X3", "X4", "X13")
@pytest.mark.parametrize("name", ["anchor", "surrogate", "regulariser", "select", "weigh"])
@MANY
@given(st.data())
def test_losses_and_gradients_of_each_term_are_those_of_the_oracle(name, data):
    world, rows, episodes = data.draw(worlds(scored_only=True))
    check(world, recipe_of(data.draw(recipes(name))), rows, episodes)


@pytest.mark.ledger("P11", "F31", "F32", "T01", "T16", "T22")
@settings(MANY, max_examples=40)
@given(worlds(), recipes())
def test_all_terms_at_once_are_those_of_the_oracle(batch, changes):
    world, rows, episodes = batch
    recipe = recipe_of(changes)
    stop = recipe.surrogate.kind in ("nll", "minor_nll", "none")
    assume(not (stop and recipe.anchor.weight == "none" and recipe.anchor.per != "token"))
    near = (
        any(w.kind == "kl" and w.to == "sampler" and w.active for w in recipe.regulariser)
        or recipe.select.kl_mask
        or recipe.select.shift_mask
        or recipe.anchor.weight != "none"
    )
    # Authored text has no log-prob at sampling: a recipe that imitates it can't also stay near its sampler.
    assume(not (stop and near) or all(token.old is not None for token in world.tokens))
    check(world, recipe, rows, episodes)


@pytest.mark.ledger("F31", "F32", "F43", "T01")
@settings(MANY, max_examples=60)
@given(worlds(), recipes("baseline", "credit", "shape"))
def test_rewards_per_turn_are_compared_as_the_oracle_does(batch, changes):
    recipe = recipe_of({**changes, "reward": {"per": "turn"}})
    check(batch[0], recipe, *batch[1:])


def test_every_term_is_compared():
    assert {*TERMS, "score"} == set(Recipe.model_fields) - {"name", "both_kls"}


@pytest.mark.ledger("F58")
@MANY
@given(*[st.floats(-3, 3)] * 3, st.sampled_from([None, 0.1, 1.0]))
def test_the_critics_loss_is_the_oracles(v, old, target, clip):
    got = Value(clip=clip)(doubles([v]), doubles([old]), doubles([target]), Context()).item()
    assert got == pytest.approx(slower.value(v, old, target, clip), rel=1e-9, abs=1e-12)


@pytest.mark.ledger("F19", "T24")
@MANY
@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**31 - 1))
def test_scores_at_any_temperature_are_the_oracles(n, vocabulary, seed):
    rng = np.random.default_rng(seed)
    hidden, weight = rng.standard_normal((n, 4)), 3 * rng.standard_normal((vocabulary, 4))
    token, temperature = rng.integers(0, vocabulary, n), rng.uniform(0.3, 2, n)
    lp, h = head.log_probs(
        torch.from_numpy(hidden),
        torch.from_numpy(weight),
        None,
        torch.from_numpy(token),
        torch.from_numpy(temperature),
        entropy=True,
    )
    want = [slower.score(hidden[i] @ weight.T, int(token[i]), float(temperature[i])) for i in range(n)]
    assert h is not None
    assert lp.tolist() == pytest.approx([a for a, _ in want], rel=1e-9, abs=1e-12)
    assert h.tolist() == pytest.approx([b for _, b in want], rel=1e-9, abs=1e-12)
