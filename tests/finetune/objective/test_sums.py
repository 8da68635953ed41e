"""Metrics as sums and counts, and the running moments: closed forms and edges."""

from __future__ import annotations

import pytest
import torch

from tapereel.finetune.objective import KL, Context, Moments, Reinforce, Sums
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe

from ..build import doubles, episode, exact, row, simple


def test_sums_counts_extremes_means_and_deviations():
    sums = Sums()
    sums.add("x", torch.tensor([1.0, 4.0]), extremes=True)
    sums.add("x", torch.tensor([7.0]), extremes=True)
    sums.add("x/square", torch.tensor([1.0, 16.0, 49.0]))
    sums.add("flag", torch.tensor([True, False, True, True]))
    sums.put("once", 2.5)
    sums.add("empty", torch.zeros(0), extremes=True)
    assert (sums["x"], sums.counts["x"], sums.mean("x")) == (12.0, 3, 4.0)
    assert sums.std("x") == pytest.approx((22 - 16) ** 0.5)
    assert sums.std("flag") is None
    assert sums.std("nothing") is None
    assert sums.mean("flag") == 0.75
    assert (sums["once"], sums.counts["once"]) == (2.5, 1)
    assert (sums["empty"], sums.counts["empty"], sums.mean("empty")) == (0.0, 0, None)
    assert "x" in sums
    assert "y" not in sums
    assert next(iter(sums.items())) == ("x", 12.0, 3)
    flat = {"x": 4.0, "x/square": 22.0, "flag": 0.75, "once": 2.5, "x/std": 6**0.5, "x/min": 1.0, "x/max": 7.0}
    assert sums.flat() == pytest.approx(flat)


@pytest.mark.ledger("T49", "F75")
def test_parts_merge_to_what_the_whole_would_have_been():
    whole, one, two = Sums(), Sums(), Sums()
    for part, values in ((one, [3.0, -1.0]), (two, [5.0])):
        part.add("x", torch.tensor(values), extremes=True)
        whole.add("x", torch.tensor(values), extremes=True)
    two.put("only", 1.0, 4)
    whole.put("only", 1.0, 4)
    one.merge(two)
    assert (one.sums, one.counts, one.lows, one.highs) == (whole.sums, whole.counts, whole.lows, whole.highs)


@pytest.mark.ledger("F28", "T05")
def test_running_moments_at_their_edges():
    moments = Moments()
    assert (moments.n, moments.mean, moments.m2, moments.std) == (0, 0, 0, None)
    moments.take(0, 9.0, 9.0)
    assert (moments.n, moments.mean) == (0, 0)
    moments.take(1, 0.1, 0.0)
    assert moments.std is None
    moments.take(1, 0.2, 0.0)
    assert moments.std == pytest.approx(0.1 / 2**0.5)
    assert moments.mean == pytest.approx(0.15)


def test_rounding_never_makes_a_deviation_of_equal_values_negative():
    sums = Sums()
    sums.put("x", 0.3, 3)
    sums.put("x/square", 0.03 - 1e-12, 3)
    assert sums.std("x") == 0.0


def test_the_parts_of_a_loss_add_up_over_micro_batches():
    context = Context()
    for name, loss in (("policy", 0.5), ("kl/teacher", 2.0), ("policy", -0.125)):
        context.add_part(name, loss)
    assert context.parts == {"policy": 0.375, "kl/teacher": 2.0}


def test_each_term_of_a_loss_is_counted_apart_and_all_are_added():
    """One token a turn, weight 1/2. A second regulariser after the first: each has its own part."""
    rows, episodes = simple([1.0, 0.0], tokens=1)
    stream = exact(rows, episodes, ref=[-1.5, -1.0], teacher=[-1.0, -3.0])
    terms = (KL(to="reference", estimator="k2", beta=0.5), KL(to="teacher", estimator="k2", beta=2.0))
    recipe = get_recipe("rloo").but(surrogate=Reinforce(), regulariser=terms)
    context, lp = Context(), doubles([-1.0, -2.0])
    part = objective.prepare(recipe, stream, Context()).part()
    loss = part.loss(lp, None, torch.arange(2), context, (0.5, 2.0))
    assert context.parts == pytest.approx({"policy": -0.5, "kl/reference": 0.15625, "kl/teacher": 0.5})
    assert float(loss) == pytest.approx(sum(context.parts.values()))


def test_entropy_at_sampling_is_of_the_tokens_that_enter_and_have_a_log_prob():
    """An authored token, a sampled one, and one of an episode that nobody scored."""
    rows = [row("a", turns=(2,), old=[float("nan"), -0.5]), row("b", turns=(1,), old=[-4.0])]
    context = Context()
    objective.prepare(get_recipe("sft"), exact(rows, [episode("a"), episode("b", reward=None)]), context)
    assert (context.sums["entropy/sampled"], context.sums.counts["entropy/sampled"]) == (4.5, 2)
    context = Context()
    objective.prepare(get_recipe("rloo"), exact(rows, [episode("a"), episode("b", reward=None)]), context)
    assert (context.sums["entropy/sampled"], context.sums.counts["entropy/sampled"]) == (0.5, 1)


def test_the_return_of_an_episode_has_the_penalties_of_its_tokens():
    """Two episodes of two tokens, old -1 each; beta 0.5 times (old - ref)."""
    rows, episodes = simple([1.0, 3.0])
    stream = exact(rows, episodes, ref=[-2.0, -1.0, -1.0, -4.0])
    context = Context()
    objective.prepare(get_recipe("reinforce_pp", {"shape": [{"kind": "token_kl", "beta": 0.5}]}), stream, context)
    assert (context.sums.lows["return"], context.sums.highs["return"]) == (0.5, 1.5)


def test_episodes_that_are_not_kept_are_in_no_statistic_of_the_terms():
    rows, episodes = simple([3.0, 2.0, 1.0])
    shape = [{"kind": "overlong", "limit": 2, "buffer": 1, "factor": 1.0}]
    context = Context()
    recipe = get_recipe("rloo", {"select": {"keep": 2}, "shape": shape})
    objective.prepare(recipe, exact(rows, episodes), context)
    assert context.sums.counts["reward/overlong"] == 2


def test_flat_groups_are_those_that_the_baseline_compares():
    """Two fork points in one group, each with equal rewards: flat by fork, not by group."""
    rows, episodes = simple([1.0, 1.0, 0.0, 0.0], forks=["x", "x", "y", "y"])
    entered = [
        objective.prepare(
            get_recipe("rloo", {"select": {"flat": "drop"}, "baseline": {"by": by}}), exact(rows, episodes), Context()
        ).entered.tolist()
        for by in ("fork", "group")
    ]
    assert entered == [[False] * 8, [True] * 8]
