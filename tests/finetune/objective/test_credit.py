"""credit and adjust: closed forms, both clocks, turns without own tokens, and the environment's tokens in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.finetune.data import segments
from tapereel.finetune.objective import ClipAdvantage, Context, Relu, TimeCredit, Whiten
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes.errors import UsageError

from ...oracles import objective as oracle
from ..build import doubles, episode, exact, ledger, row, simple

CREDIT = ledger("credit")
LOSSES = ledger("losses")
CASES = [
    pytest.param(case, id=f"{name}-{case.get('why', i)}")
    for name in ("F32", "F43", "F44")
    for i, case in enumerate(CREDIT[name])
]


def spread(case, between=1):
    """(advantages, targets) of one episode."""
    turns = case.get("turn_tokens") or [case.get("tokens") or len(case["values"])]
    rewards = case.get("turn_rewards") or [case["reward"]]
    cut, beyond = case.get("cut", False), case.get("bootstrap")
    one = episode(reward=sum(rewards), turn_rewards=rewards, cut=cut, bootstrap=beyond)
    values = {"value": case["values"]} if "values" in case else {}
    stream = exact([row(turns=turns, between=between)], [one], **values)
    y = stream.turns.reward if "turn_rewards" in case else stream.episodes.reward
    return TimeCredit(**case["word"])(y, None, stream, Context())


@pytest.mark.ledger("F32", "F43", "F44")
@pytest.mark.parametrize("case", CASES)
def test_the_closed_forms(case):
    got, targets = spread(case)
    assert got.tolist() == pytest.approx(case["expected"], rel=1e-9, abs=1e-15)
    if "targets" in case:
        assert targets.tolist() == pytest.approx(case["targets"], rel=1e-9, abs=1e-15)


@pytest.mark.ledger("F43")
@pytest.mark.parametrize("case", CREDIT["early"], ids=["no leak to the episode before", "late turns too", "by turns"])
def test_what_is_earned_before_an_episodes_first_own_token_moves_nothing(case):
    rows = [row(str(i), turns=e["turn_tokens"]) for i, e in enumerate(case["episodes"])]
    episodes = [
        episode(str(i), reward=sum(e["turn_rewards"]), turn_rewards=e["turn_rewards"])
        for i, e in enumerate(case["episodes"])
    ]
    stream = exact(rows, episodes)
    assert TimeCredit(**case["word"])(stream.turns.reward, None, stream, Context())[0].tolist() == pytest.approx(
        case["expected"]
    )


def test_time_does_not_discount_unless_it_is_told_to():
    assert (TimeCredit().kind, TimeCredit().clock, TimeCredit().gamma, TimeCredit().lam) == (
        "broadcast",
        "token",
        1.0,
        1.0,
    )


@pytest.mark.ledger("T13", "P7")
@pytest.mark.parametrize("case", CREDIT["T13"])
def test_what_the_environment_says_between_two_turns_is_no_step_of_time(case):
    for between in case["environment_tokens_between"]:
        got, _ = spread(case, between)
        assert got.tolist() == pytest.approx(case["expected"], rel=1e-9)


@pytest.mark.ledger("P7")
@pytest.mark.parametrize(
    "word",
    [
        {"kind": "broadcast"},
        {"kind": "returns", "gamma": 0.9},
        {"kind": "returns", "gamma": 0.9, "clock": "turn"},
        {"kind": "gae", "gamma": 0.9, "lam": 0.9},
    ],
    ids=str,
)
def test_another_environment_token_changes_nothing(word):
    case = {
        "word": word,
        "turn_rewards": [0.5, 1.0, -0.25],
        "turn_tokens": [2, 1, 3],
        "values": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    }
    assert torch.equal(spread(case, between=1)[0], spread(case, between=5)[0])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=9), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_recurrence_agrees_with_the_loop_for_any_batch(rewards, gamma, lam, cut, random):
    rows = [row(f"t{i}", turns=[1] * len(r)) for i, r in enumerate(rewards)]
    episodes = [episode(f"t{i}", reward=sum(r), turn_rewards=r, cut=cut, bootstrap=0.3) for i, r in enumerate(rewards)]
    values = [[random.uniform(-1, 1) for _ in r] for r in rewards]
    stream = exact(rows, episodes, value=[v for row in values for v in row])
    y = stream.turns.reward
    want = [x for r in rewards for x in oracle.returns(r, gamma)]
    assert TimeCredit(kind="returns", gamma=gamma)(y, None, stream, Context())[0].tolist() == pytest.approx(
        want, rel=1e-9, abs=1e-12
    )
    got, targets = TimeCredit(kind="gae", gamma=gamma, lam=lam)(y, None, stream, Context())
    both = [oracle.gae(r, v, gamma, lam, 0.3 if cut else 0.0) for r, v in zip(rewards, values, strict=True)]
    assert got.tolist() == pytest.approx([x for a, _ in both for x in a], rel=1e-9, abs=1e-12)
    assert targets is not None
    assert targets.tolist() == pytest.approx([x for _, t in both for x in t], rel=1e-9, abs=1e-12)


def test_beyond_a_cut_whose_value_is_unknown_there_is_nothing():
    stream = exact([row("a", turns=(2,))], [episode("a", reward=1.0, cut=True)], value=[0.2, 0.4])
    assert stream.beyond.isnan().all()
    got, _ = TimeCredit(kind="gae", gamma=1.0, lam=1.0)(stream.episodes.reward, None, stream, Context())
    assert got.tolist() == pytest.approx([1.0 - 0.2, 1.0 - 0.4])


@pytest.mark.ledger("P2")
def test_rows_of_an_episode_in_any_order_give_the_same_credit():
    first, second = row("a", turns=(2, 1)), row("a", turns=(2,), first_turn=2)
    other = row("b", turns=(2,))
    episodes = [episode("a", reward=1.0), episode("b", reward=2.0)]
    word = TimeCredit(kind="returns", gamma=0.5)
    straight = exact([first, second, other], episodes)
    swapped = exact([other, second, first], episodes)
    a, _ = word(straight.episodes.reward, None, straight, Context())
    b, _ = word(swapped.episodes.reward, None, swapped, Context())
    assert a.tolist() == [0.0625, 0.125, 0.25, 0.5, 1.0, 1.0, 2.0]
    assert b.tolist() == [1.0, 2.0, 0.5, 1.0, 0.0625, 0.125, 0.25]


def test_a_price_per_token_needs_a_credit_that_knows_time():
    with pytest.raises(UsageError, match=r"token_kl.*'broadcast'"):
        get_recipe("grpo", {"shape": [{"kind": "token_kl", "beta": 0.1}]})


@pytest.mark.ledger("F45", "T16", "F36")
def test_whitening_sees_own_tokens_only():
    case = LOSSES["F45"]
    stream = exact([row("a", turns=(4,))], [episode()])
    inside = torch.tensor([True, True, False, True])
    a = doubles([*case["advantages"][:2], case["outside"], case["advantages"][2]])
    white = Whiten()(a, inside, stream, Context())[inside]
    assert white.tolist() == pytest.approx(case["expected"], rel=1e-9)
    assert float(white.mean()) == pytest.approx(0, abs=1e-12)
    assert float(white.var(correction=0)) == pytest.approx(1, rel=1e-9)
    assert Whiten(centre_only=True)(a, inside, stream, Context())[inside].tolist() == pytest.approx(case["centred"])
    assert Whiten()(torch.full((4,), 0.1), inside, stream, Context()).tolist() == [0.0] * 4
    floor, both = LOSSES["F45_floor"], torch.tensor([True, True, False, False])
    bounded = Whiten()(doubles([*floor["advantages"], 7, 7]), both, stream, Context())
    assert bounded.tolist() == pytest.approx([*floor["expected"], 0, 0], rel=1e-9)


@pytest.mark.ledger("F46", "F47")
def test_whitening_with_an_unbiased_deviation_plus_eps():
    case = LOSSES["F47"]
    stream = exact([row("a", turns=(3,))], [episode()])
    inside = torch.ones(3, dtype=torch.bool)
    got = Whiten(**case["word"])(doubles(case["advantages"]), inside, stream, Context())
    assert got.tolist() == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.ledger("F48", "F49", "T15")
def test_clipping_counts_what_it_clips_before_it_clips():
    case = LOSSES["F48"]
    stream = exact([row("a", turns=(3,))], [episode()])
    context = Context()
    every = torch.ones(3, dtype=torch.bool)
    got = ClipAdvantage(limit=case["limit"])(doubles(case["advantages"]), every, stream, context)
    assert got.tolist() == pytest.approx(case["expected"])
    assert context.sums.mean("advantage/clipped") == pytest.approx(case["clipped"])


@pytest.mark.ledger("F51")
def test_relu_learns_from_what_went_better_only():
    case = LOSSES["F51"]
    stream = exact([row("a", turns=(2,))], [episode()])
    got = Relu()(doubles(case["advantages"]), torch.ones(2, dtype=torch.bool), stream, Context())
    assert got.tolist() == case["expected"]


@pytest.mark.ledger("F36")
def test_terms_of_adjust_apply_in_the_order_given():
    recipe = get_recipe("grpo", {"adjust": [{"kind": "relu"}, {"kind": "clip", "limit": 1.0}]})
    batch = objective.prepare(recipe, exact(*simple([1, 0, 0, 0])), Context())
    assert batch.advantage.tolist() == [1.0, 1.0] + [0.0] * 6


def test_an_empty_segment_has_mean_zero_and_no_extremes():
    x, segment = doubles([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert segments.mean(x, segment, 4).tolist() == [2.0, 0.0, 5.0, 0.0]
    low, high = segments.extremes(x, segment, 3)
    assert (low.tolist(), high.tolist()) == ([1.0, float("inf"), 5.0], [3.0, float("-inf"), 5.0])


def test_the_recurrence_is_exact_at_its_edges():
    assert segments.recur(doubles([]), doubles([])).tolist() == []
    assert segments.recur(doubles([2.0]), doubles([0.5])).tolist() == [2.0]
    assert segments.recur(doubles([1.0, 1.0]), doubles([1.0, 1.0])).tolist() == [2.0, 1.0]
    x, decay = doubles(np.ones(7)), doubles([1, 1, 0, 1, 1, 1, 1])
    assert segments.recur(x, decay).tolist() == [3, 2, 1, 4, 3, 2, 1]
