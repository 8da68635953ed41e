"""kl, regularisers, shapes and controllers in closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tapereel.finetune.objective import (
    KL,
    Adaptive,
    Balance,
    Clip,
    Context,
    Demonstrations,
    Entropy,
    EpisodeKL,
    Moments,
    Overlong,
    Running,
    TokenKL,
)
from tapereel.finetune.objective import kl as estimators
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Schedule
from tapereel.tapes.errors import UsageError

from ...oracles import objective as oracle
from ..build import doubles, episode, exact, ledger, row, simple

LEDGER = ledger("regularisers")


@pytest.mark.ledger("F60", "F62", "T20")
def test_the_three_estimators():
    case = LEDGER["F60"]
    d = doubles(case["d"])
    for kind in ("k1", "k2", "k3"):
        got = estimators.estimate(kind, d, torch.zeros_like(d))
        assert got.tolist() == pytest.approx(case[kind], rel=1e-9, abs=1e-15)
        assert got[0].item() == pytest.approx(case["stated"][kind], abs=5e-7)


@pytest.mark.ledger("F60", "T20", "P11")
def test_expected_values_and_gradients_of_the_estimators_by_enumeration():
    """k1 and k3 estimate KL(pi || ref); as losses k1 has gradient 0, k2 that of KL(pi || ref), k3 that of the other."""
    logits = doubles([0.3, -0.7, 1.1, 0.0]).requires_grad_()
    ref = doubles([0.1, 0.5, -0.4, 0.2]).log_softmax(0)
    lp = logits.log_softmax(0)
    p = lp.exp().detach()
    forward = (lp.exp() * (lp - ref)).sum()
    backward = (ref.exp() * (ref - lp)).sum()
    want = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": torch.autograd.grad(forward, logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(backward, logits, retain_graph=True)[0],
    }
    for kind in ("k1", "k2", "k3"):
        expected = (p * estimators.estimate(kind, lp, ref)).sum()
        if kind != "k2":
            assert expected.item() == pytest.approx(forward.item(), rel=1e-9)
        grad = torch.autograd.grad(expected, logits, retain_graph=True)[0]
        assert grad.tolist() == pytest.approx(want[kind].tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.ledger("F60", "T20")
def test_a_log_ratio_that_would_overflow_stays_finite_and_still_pulls():
    lp = doubles([-900.0]).requires_grad_()
    value = estimators.estimate("k3", lp, doubles([0.0]))
    (grad,) = torch.autograd.grad(value.sum(), lp)
    assert torch.isfinite(value).all()
    assert -1e10 < grad.item() < -1e8


@pytest.mark.ledger("T20")
def test_k1_as_a_loss_is_refused_with_its_reason():
    with pytest.raises(ValidationError, match=r"k1.*token_kl"):
        KL(estimator="k1", beta=0.1)


@pytest.mark.ledger("F61", "F62", "F63")
def test_a_kl_loss_adds_beta_times_the_estimate_to_reference_teacher_or_sampler():
    stream = exact([row(turns=(2,))], [episode()], old=[-1.0, -2.0], ref=[-1.5, -1.0], teacher=[-0.5, -3.0])
    lp, index = doubles([-1.2, -1.2]), torch.arange(2)
    for to, other in (("reference", [-1.5, -1.0]), ("sampler", [-1.0, -2.0]), ("teacher", [-0.5, -3.0])):
        context = Context()
        got = KL(to=to, beta=0.3)(lp, None, index, stream, 0.3, context)
        assert got.tolist() == pytest.approx([0.3 * oracle.kl("k3", -1.2, o) for o in other], rel=1e-9)
        assert context.sums[f"kl/{to}/k1"] == pytest.approx(sum(-1.2 - o for o in other))


@pytest.mark.ledger("F61", "F31")
def test_a_kl_in_the_reward_and_one_in_the_loss_must_both_be_meant():
    both = {"shape": [{"kind": "episode_kl", "beta": 0.1}], "regulariser": [{"kind": "kl", "beta": 0.1}]}
    with pytest.raises(UsageError, match="both_kls=True"):
        get_recipe("grpo", both)
    assert get_recipe("grpo", {**both, "both_kls": True}).needs_reference


@pytest.mark.ledger("F30", "T43")
def test_the_kl_price_of_an_episode():
    case = LEDGER["F30"]
    stream = exact([row(turns=(2,))], [episode(reward=case["reward"])], old=case["old"], ref=case["ref"])
    x = EpisodeKL(beta=case["beta"])(stream.episodes.reward, torch.tensor([True]), stream, Context())
    assert x.item() == pytest.approx(case["expected"], rel=1e-9)
    assert x.item() == pytest.approx(case["stated"], abs=5e-7)


@pytest.mark.ledger("F31", "F33", "X6")
def test_the_kl_price_of_each_token_rides_on_top_of_the_reward():
    case = LEDGER["F31"]
    rows = [row(t, t, turns=(len(k),)) for t, k in zip("ab", case["kl"], strict=True)]
    episodes = [episode(t, t, reward=r) for t, r in zip("ab", case["rewards"], strict=True)]
    kl = [x for k in case["kl"] for x in k]
    stream = exact(rows, episodes, old=[-1.0] * len(kl), ref=[-1.0 - x for x in kl])
    recipe = get_recipe(
        "grpo",
        {
            "baseline": {"kind": "none"},
            "credit": {"kind": "returns", "gamma": 0.0},
            "shape": [{"kind": "token_kl", "beta": case["beta"], "estimator": "k1"}],
        },
    )
    context = Context()
    batch = objective.prepare(recipe, stream, context)
    assert batch.advantage.tolist() == pytest.approx([x for r in case["expected"] for x in r], rel=1e-9)
    assert context.sums["reward"] == sum(case["rewards"]), "the raw reward is what is reported"


@pytest.mark.ledger("F27", "T25")
def test_the_price_of_a_long_answer():
    case = LEDGER["F27"]
    rows, _ = simple([0.0] * len(case["lengths"]))
    episodes = [episode(f"t{i}", reward=1.0, length=n) for i, n in enumerate(case["lengths"])]
    stream = exact(rows, episodes)
    term = Overlong(limit=case["limit"], buffer=case["buffer"], factor=case["factor"])
    x = term(stream.episodes.reward, torch.ones(len(rows), dtype=torch.bool), stream, Context())
    assert (x - 1).tolist() == pytest.approx(case["expected"], abs=1e-12)


@pytest.mark.ledger("F27")
def test_a_price_of_the_episode_falls_on_its_last_turn_when_rewards_are_per_turn():
    rows = [row("a", turns=(1, 1)), row("b", turns=(1, 1))]
    episodes = [
        episode("a", reward=3.0, turn_rewards=[1.0, 2.0], length=100),
        episode("b", reward=3.0, turn_rewards=[1.0, 2.0], length=90),
    ]
    stream = exact(rows, episodes)
    term = Overlong(limit=100, buffer=20, factor=2.0)
    x = term(stream.turns.reward, torch.ones(4, dtype=torch.bool), stream, Context())
    assert x.tolist() == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.ledger("F28", "T05")
def test_running_moments_equal_one_pass_over_everything_and_one_value_scales_nothing():
    case = LEDGER["F28"]
    moments = Moments()
    for batch in case["batches"]:
        rows, episodes = simple([float(r) for r in batch])
        stream = exact(rows, episodes)
        scored = torch.ones(len(batch), dtype=torch.bool)
        before = Moments(moments.n, moments.mean, moments.m2)
        scaled = Running()(stream.episodes.reward, scored, stream, Context(moments=moments))
        centred = Running(centre=True)(stream.episodes.reward, scored, stream, Context(moments=before))
    assert moments.mean == pytest.approx(case["mean"])
    assert moments.std == pytest.approx(case["std"])
    assert scaled.tolist() == pytest.approx(case["scaled"])
    assert centred.tolist() == pytest.approx(case["centred"])
    moments = Moments()
    for batch, want in zip(LEDGER["T05"]["batches"], LEDGER["T05"]["expected"], strict=True):
        stream = exact(*simple([float(r) for r in batch]))
        every = torch.ones(len(batch), dtype=torch.bool)
        x = Running()(stream.episodes.reward, every, stream, Context(moments=moments))
        assert x.tolist() == want


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5))
@pytest.mark.ledger("F28")
def test_moments_joined_in_parts_are_those_of_the_whole(batches):
    moments = Moments()
    for batch in batches:
        moments.take(*Context().mean_and_square(doubles(batch)))
    whole = doubles([x for batch in batches for x in batch])
    assert moments.n == len(whole)
    assert moments.mean == pytest.approx(whole.mean().item(), abs=1e-9)
    assert moments.m2 == pytest.approx((whole - whole.mean()).square().sum().item(), rel=1e-9, abs=1e-9)


@pytest.mark.ledger("F29")
def test_rewards_outside_the_bounds_are_counted_before_they_are_clipped():
    case = LEDGER["F29"]
    stream = exact(*simple([float(r) for r in case["rewards"]]))
    context = Context()
    term = Clip(low=case["low"], high=case["high"])
    x = term(stream.episodes.reward, torch.ones(len(case["rewards"]), dtype=torch.bool), stream, context)
    assert x.tolist() == case["expected"]
    assert context.sums.mean("reward/clipped") == case["clipped"]


@pytest.mark.ledger("F64")
def test_the_entropy_bonus_is_minus_its_coefficient_times_the_entropy():
    stream = exact([row(turns=(1,))], [episode()])
    h = doubles([LEDGER["F64"]["expected"]])
    got = Entropy(coefficient=0.5)(doubles([-1.0]), h, torch.arange(1), stream, 0.5, Context())
    assert got.item() == pytest.approx(-0.5 * LEDGER["F64"]["expected"], rel=1e-12)


@pytest.mark.ledger("F67", "F68")
def test_the_adaptive_coefficient():
    case = LEDGER["F68"]
    got = Adaptive(target=case["target"], horizon=case["horizon"]).next(case["beta"], case["kl"], case["episodes"])
    assert got == pytest.approx(case["expected"], rel=1e-12)
    assert got == pytest.approx(case["stated"], abs=1e-9)


@pytest.mark.ledger("F68")
@pytest.mark.parametrize(("kl", "factor"), [(6.6, 1.1), (5.4, 0.9), (60, 1.2), (0, 0.8), (6, 1.0)])
def test_the_adaptive_coefficient_moves_by_the_error_and_by_at_most_a_fifth(kl, factor):
    assert Adaptive(target=6, horizon=100).next(0.5, kl, 100) == pytest.approx(0.5 * factor, rel=1e-9)


@pytest.mark.parametrize(
    ("term", "constants"),
    [
        (KL, {"beta": -0.1}),
        (Adaptive, {"target": 0, "horizon": 1}),
        (Adaptive, {"target": 1, "horizon": 0}),
        (Overlong, {"limit": 0, "buffer": 1}),
        (Overlong, {"limit": 1, "buffer": 0}),
        (EpisodeKL, {"beta": -1}),
        (TokenKL, {"beta": -1}),
        (Demonstrations, {"coefficient": -1}),
        (Balance, {"coefficient": -1}),
    ],
)
def test_a_constant_that_makes_no_sense_is_refused(term, constants):
    with pytest.raises(ValidationError):
        term(**constants)


def test_the_shortest_limit_is_one_token_and_the_price_is_one():
    assert Overlong(limit=1, buffer=1).model_dump() == {"kind": "overlong", "limit": 1, "buffer": 1, "factor": 1.0}


def test_a_controller_may_be_tight_and_quick():
    assert Adaptive(target=0.01, horizon=0.5).next(1.0, 0.01, 10) == 1.0


@pytest.mark.parametrize(
    ("term", "constants"),
    [
        (KL, {"to": "reference", "estimator": "k3", "beta": 0.0, "adaptive": None}),
        (Entropy, {"coefficient": 0.0}),
        (Demonstrations, {"coefficient": 0.0}),
        (Balance, {"coefficient": 0.0}),
    ],
)
def test_a_regulariser_adds_nothing_unless_it_is_told_to(term, constants):
    assert {k: v for k, v in term().model_dump().items() if k != "kind"} == constants
    assert not term().active
    assert not term().needs_reference
    name = "beta" if term is KL else "coefficient"
    assert term(**{name: 0.5}).active
    assert term(**{name: 0.5}).needs_reference == (term is KL)


@pytest.mark.ledger("T21")
def test_the_adaptive_coefficient_never_rewards_divergence():
    case = LEDGER["T21"]
    got = Adaptive(target=case["target"], horizon=case["horizon"]).next(case["beta"], case["kl"], case["episodes"])
    assert got == case["expected"]


@pytest.mark.ledger("F80")
def test_schedules():
    case = LEDGER["F80"]
    cosine = Schedule(**case["schedule"])
    assert [cosine.factor(k) for k in range(8)] == pytest.approx(case["factors"], rel=1e-12)
    linear = Schedule(**case["linear"])
    assert [linear.factor(k) for k in range(6)] == pytest.approx(case["linear_factors"], rel=1e-12)
    assert Schedule().factor(10**6) == 1.0
    with pytest.raises(ValidationError, match="`total`"):
        Schedule(kind="cosine", warmup=5, total=5)
    assert Schedule(kind="linear", total=1).factor(1) == 0.0
    assert Schedule(kind="linear", total=1, floor=1.0).factor(5) == 1.0
    assert Schedule().model_dump() == {"kind": "constant", "warmup": 0, "total": None, "floor": 0.0}
    for wrong in ({"warmup": -1}, {"total": 0}, {"floor": -0.1}, {"floor": 1.1}):
        with pytest.raises(ValidationError):
            Schedule(**wrong)
