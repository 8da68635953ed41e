"""baseline: closed forms of the ledger, flat groups, and that only ids decide who is compared with whom."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tapereel.finetune.data.stream import Stream
from tapereel.finetune.objective import Context, GroupBaseline, GroupWeights, Reward, Select
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.objective.recipe import Recipe
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Status

from ...oracles import objective as oracle
from ..build import episode, exact, ledger, row, simple

BASE = ledger("baselines")
CLOSED = [
    pytest.param(case, id=f"{name}-{i}")
    for name in ("F34", "F35", "F36", "F37", "F38", "F40")
    for i, case in enumerate(BASE[name])
]


def advantages(
    word: dict[str, Any], rewards: list[float], groups: list[str] | None = None, forks: list[str] | None = None
) -> list[float]:
    stream = exact(*simple(rewards, groups, forks=forks))
    x = stream.episodes.reward
    return GroupBaseline(**word)(x, ~x.isnan(), stream, Context()).tolist()


@pytest.mark.ledger("F34", "F35", "F36", "F37", "F38", "F40")
@pytest.mark.parametrize("case", CLOSED)
def test_the_closed_forms(case):
    got = advantages(case["word"], case["rewards"], case.get("groups"))
    assert got == pytest.approx(case["expected"], rel=1e-9, abs=1e-15)
    if "stated" in case:
        assert got == pytest.approx(case["stated"], abs=6e-5)


@pytest.mark.parametrize("case", BASE["two_groups"], ids=lambda case: case["why"])
def test_who_is_compared_with_whom(case):
    got = advantages(case["word"], case["rewards"], case.get("groups"), case.get("forks"))
    assert got == pytest.approx(case["expected"], rel=1e-9, abs=1e-15)


@pytest.mark.ledger("F39", "T09", "T11")
@pytest.mark.parametrize("case", BASE["F39"], ids=["turns", "episodes"])
def test_statistics_over_turns_or_over_episodes_are_both_sayable_and_episodes_are_the_default(case):
    rows = [row(t, turns=(1,) * len(r)) for t, r in zip("ab", case["turn_rewards"], strict=True)]
    episodes = [episode(t, reward=sum(r), turn_rewards=r) for t, r in zip("ab", case["turn_rewards"], strict=True)]
    recipe = get_recipe("grpo", {"reward": {"per": case["per"]}, "baseline": case["word"]})
    batch = objective.prepare(recipe, exact(rows, episodes), Context())
    want = [x for turns in case["expected"] for x in turns]
    assert batch.advantage.tolist() == pytest.approx(want, rel=1e-9)
    assert want == pytest.approx([x for turns in case["stated"] for x in turns], abs=6e-3)
    assert Reward().per == "episode"


@pytest.mark.ledger("T02", "P6")
@pytest.mark.parametrize("word", BASE["T02"]["words"], ids=lambda w: "-".join(map(str, w.values())))
def test_a_flat_group_gives_exactly_zero_whatever_its_value(word):
    for value in BASE["T02"]["values"]:
        for n in BASE["T02"]["sizes"]:
            assert advantages(word, [value] * n) == [0.0] * n, (value, n)


@pytest.mark.ledger("T02")
def test_the_trap_of_the_flat_group_is_real():
    """In float32 the deviation of eight equal rewards of 0.1 is rounding, and dividing by it gives -0.83."""
    x = torch.full((8,), 0.1)
    naive = (x - x.mean()) / (x.std() + 1e-9)
    assert naive.abs().max() > 1e-3


@pytest.mark.ledger("T09", "P14")
def test_a_tape_with_more_rows_counts_once_in_its_group():
    case = BASE["T09"]
    rows = [row(t, turns=(2,), first_turn=i, calls=[f"{t}{i}"]) for t, k in case["rows"].items() for i in range(k)]
    episodes = [episode(t, reward=r) for t, r in case["rewards"].items()]
    stream = exact(rows, episodes)
    batch = objective.prepare(get_recipe("grpo", {"baseline": case["word"]}), stream, Context())
    for i, tape in enumerate(case["rewards"]):
        assert batch.advantage[stream.episode == i].tolist() == pytest.approx(
            [case["expected"][tape]] * int((stream.episode == i).sum()), rel=1e-9
        )


@pytest.mark.ledger("F41")
@pytest.mark.parametrize("case", BASE["F41"])
def test_groups_that_teach_make_up_for_those_that_do_not(case):
    rewards = [r for group in case["rewards"] for r in group]
    groups = [str(i) for i, group in enumerate(case["rewards"]) for _ in group]
    stream = exact(*simple(rewards, groups))
    got = GroupWeights(flat=case["flat"], cap=case["cap"]).weights(stream, Context())
    assert got.tolist() == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.ledger("F41")
def test_group_weights_multiply_advantages_and_see_only_what_is_trained():
    rows, _ = simple([0] * 8, list("aabbccdd"))
    values = [1.0, 0.0, 3.0, 3.0, 5.0, None, 7.0, 1.0]
    episodes = [episode(r.tape, r.group, reward=v) for r, v in zip(rows, values, strict=True)]
    episodes[7] = dataclasses.replace(episodes[7], status=Status.CRASHED)
    weigh = [{"kind": "groups", "flat": 0.5, "cap": 9.0}]
    recipe = get_recipe("grpo", {"baseline": {"kind": "none"}, "adjust": weigh})
    batch = objective.prepare(recipe, exact(rows, episodes), Context())
    assert batch.advantage[::2].tolist() == [4.0, 0.0, 1.5, 1.5, 2.5, 0.0, 3.5, 0.0]
    assert GroupWeights().model_dump() == {"kind": "groups", "flat": 1.0, "cap": 3.0}
    assert GroupWeights(flat=0.0, cap=0.5).cap == 0.5
    for wrong in ({"flat": -0.1}, {"cap": 0.0}):
        with pytest.raises(ValidationError):
            GroupWeights(**wrong)


@pytest.mark.ledger("F42", "T17", "X5")
def test_dynamic_sampling_drops_flat_groups_of_any_value_and_leaves_the_others_alone():
    case = BASE["F42"]
    rewards = [r for group in case["rewards"] for r in group]
    groups = [str(i) for i, group in enumerate(case["rewards"]) for _ in group]
    stream = exact(*simple(rewards, groups))
    context = Context()
    kept = objective.prepare(get_recipe("grpo"), stream, Context())
    dropped = objective.prepare(get_recipe("grpo", {"select": {"flat": "drop"}}), stream, context)
    gone = torch.tensor([int(g) in case["dropped"] for g in groups])[stream.episode]
    assert dropped.entered.tolist() == (~gone).tolist()
    assert torch.equal(dropped.advantage, kept.advantage)
    assert context.sums["episode/flat"] == 2 * len(case["dropped"])
    assert float(dropped.part().weight.sum()) == pytest.approx(1.0)


@pytest.mark.ledger("T02")
def test_flat_groups_and_groups_of_one_are_counted():
    context = Context()
    objective.prepare(get_recipe("grpo"), exact(*simple([1, 0, 2, 2, 2, 5], list("aabbbc"))), context)
    assert (context.sums["group/flat"], context.sums["group/single"]) == (2, 1)
    assert context.sums.mean("group/size") == 2
    assert (context.sums.lows["reward"], context.sums.highs["reward"]) == (0, 5)


@pytest.mark.ledger("X5", "X12")
def test_bounds_and_best_of_a_group_are_kept_and_the_rest_is_counted():
    stream = exact(*simple([1, 5, 3, 4, 2, 9]))
    context = Context()
    select = Select(bounds=(1, 5), keep=2)
    scored = select.scored(stream, True, context)
    assert select.episodes(scored, stream, context)[0].tolist() == [False, True, False, True, False, False]
    assert context.sums["episode/outside"] == 1
    assert context.sums["episode/surplus"] == 3
    four = Select(keep=4, keep_how="spread")
    assert four.episodes(scored, stream, Context())[0].tolist() == [True, True, False, False, True, True]
    with pytest.raises(ValidationError):
        Select(keep=0)
    spread = Select(keep=3, keep_how="spread")
    assert spread.episodes(scored, stream, Context())[0].tolist() == [True, True, False, False, False, True]


@pytest.mark.ledger("X5")
def test_a_group_enters_by_the_mean_of_the_rewards_that_are_known():
    """a: 1 (one unscored, one cancelled), b: 3, c: -2, d: unscored."""
    rewards = [2.0, 0.0, None, 9.0, 3.0, 3.0, -2.0, None]
    rows, episodes = simple(rewards, list("aaaabbcd"))
    episodes[3] = dataclasses.replace(episodes[3], status=Status.CANCELLED)
    stream, context = exact(rows, episodes), Context()
    scored = Select().scored(stream, False, context)
    entered, compared = Select(mean_bounds=(0.0, 2.0)).episodes(scored, stream, context)
    assert entered.tolist() == compared.tolist() == [True, True, True, False, False, False, False, False]
    assert context.sums["episode/mean_outside"] == 4
    for bounds, groups in (((None, 2.0), "ac"), ((0.0, None), "ab"), ((None, -1.0), "c"), ((1.0, 1.0), "a")):
        entered, compared = Select(mean_bounds=bounds).episodes(scored, stream, Context())
        assert {"aaaabbcd"[k] for k in entered.nonzero()[:, 0].tolist()} == set(groups)
        assert torch.equal(entered, compared)


@pytest.mark.ledger("X5")
@pytest.mark.parametrize("when", ["before_baseline", "after_baseline"])
def test_what_is_kept_is_compared_alone_unless_the_baseline_comes_first(when):
    stream = exact(*simple([1.0, 1.0, 0.0, 1.0]))
    select = Select(keep=2, keep_how="spread", keep_when=when)
    entered, compared = select.episodes(select.scored(stream, True, Context()), stream, Context())
    assert entered.tolist() == [True, False, True, False]
    assert compared.tolist() == (entered.tolist() if when == "before_baseline" else [True] * 4)


@pytest.mark.ledger("X5", "X12")
def test_what_nobody_scored_is_never_the_best_and_makes_no_group_uneven():
    """Imitation lets unscored episodes enter, whose reward is NaN."""
    stream = exact(*simple([2.0, None, -5.0, 1.0, None, 1.0, None, 0.0, 1.0], list("aaabbbcdd")))
    entered = Select().scored(stream, False, Context())
    assert entered.all()
    best, _ = Select(keep=1).episodes(entered, stream, Context())
    assert best.nonzero()[:, 0].tolist() == [0, 3, 6, 8]
    two, _ = Select(keep=2).episodes(entered, stream, Context())
    assert two.nonzero()[:, 0].tolist() == [0, 2, 3, 5, 6, 7, 8]
    uneven, _ = Select(flat="drop").episodes(entered, stream, Context())
    assert uneven.nonzero()[:, 0].tolist() == [0, 1, 2, 7, 8]


rewards = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5, 7.0]), min_size=1, max_size=12)


@settings(max_examples=60)
@given(rewards, st.data())
def test_the_oracle_agrees_on_random_groups(values, data):
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values)))
    for kind in get_args(GroupBaseline.model_fields["kind"].annotation):
        for by in ("group", "batch"):
            word = {"kind": kind, "by": by, "eps": 1e-4, "ddof": 1}
            want = oracle.baseline(values, groups, **word)
            assert advantages(word, values, groups) == pytest.approx(want, rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(rewards, st.randoms(use_true_random=False))
@pytest.mark.ledger("P2", "F06")
def test_the_order_of_episodes_changes_nothing(values, random):
    groups = [random.choice("ab") for _ in values]
    order = list(range(len(values)))
    random.shuffle(order)
    straight = advantages({"kind": "std"}, values, groups)
    shuffled = advantages({"kind": "std"}, [values[i] for i in order], [groups[i] for i in order])
    assert [straight[i] for i in order] == pytest.approx(shuffled, rel=1e-9, abs=1e-12)


def test_what_its_status_or_its_bounds_keep_out_is_counted():
    rows, _ = simple([0, 0, 0, 0])
    episodes = [episode(r.tape, r.group, reward=x) for r, x in zip(rows, (1.0, 0.5, None, 1.0), strict=True)]
    episodes[3] = dataclasses.replace(episodes[3], status=Status.CANCELLED)
    context = Context()
    batch = objective.prepare(get_recipe("rft"), exact(rows, episodes), context)
    assert batch.entered[::2].tolist() == [True, False, False, False]
    assert (context.sums["episode/status"], context.sums["episode/outside"]) == (1, 2)
    both = objective.prepare(get_recipe("rft", {"select": {"bounds": (0.4, 0.9)}}), exact(rows, episodes), Context())
    assert both.entered[::2].tolist() == [False, True, False, False]


def test_an_unscored_episode_is_in_no_group_and_never_counts_as_zero():
    rows, episodes = simple([1.0, None, 0.0])
    context = Context()
    batch = objective.prepare(get_recipe("grpo"), exact(rows, episodes), context)
    assert batch.advantage.tolist() == pytest.approx([math.sqrt(0.5)] * 2 + [0] * 2 + [-math.sqrt(0.5)] * 2, rel=1e-8)
    assert batch.entered.tolist() == [True, True, False, False, True, True]
    assert context.sums["episode/unscored"] == 1
    assert context.sums.mean("reward") == 0.5


@pytest.mark.ledger("X5")
def test_the_return_of_an_episode_is_the_sum_mean_or_largest_of_its_turns():
    rows = [row("a", turns=(1, 1, 1)), row("b", turns=(2, 1))]
    episodes = [
        episode("a", reward=3.0, turn_rewards=[-1.0, 5.0, -1.0]),
        episode("b", reward=-5.0, turn_rewards=[-2.0, -3.0]),
    ]
    stream = exact(rows, episodes)
    for how, want in (("sum", [3.0, -5.0]), ("mean", [1.0, -2.5]), ("max", [5.0, -2.0])):
        assert Reward(reduce=how)(stream, Context()).tolist() == pytest.approx(want)
    assert Reward(per="turn")(stream, Context()).tolist() == [-1.0, 5.0, -1.0, -2.0, -3.0]


def test_components_are_weighed_anew_and_a_missing_one_leaves_the_episode_unscored():
    case = ledger("regularisers")["F26"]
    rows, _ = simple([0, 0, 0])
    parts = [{"model": m, "rule": r} for m, r in zip(case["model"], case["rule"], strict=True)] + [{"model": 1.0}]
    episodes = [episode(f"t{i}", reward=9.0, components=p) for i, p in enumerate(parts)]
    context = Context()
    x = Reward(components=case["weights"])(exact(rows, episodes), context)
    assert x[:2].tolist() == pytest.approx(case["expected"], rel=1e-12)
    assert np.isnan(x[2].item())
    assert context.sums["reward/missing/rule"] == 1
    recipe = get_recipe("grpo", {"reward": {"components": case["weights"]}})
    advantage = objective.prepare(recipe, exact(rows, episodes), Context()).advantage
    assert advantage[::2].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0], rel=1e-8)


def decoupled(
    parts: list[dict[str, float]], weights: dict[str, float], groups: list[str], **changes: Any
) -> list[float]:
    """The advantage of each episode, of one token, by the recipe gdpo with these changes."""
    rewards = [sum(weights[name] * value for name, value in part.items()) for part in parts]
    rows, episodes = simple(rewards, groups)
    episodes = [
        dataclasses.replace(one, components=part, weights=weights) for one, part in zip(episodes, parts, strict=True)
    ]
    return of_episodes(exact(rows, episodes), get_recipe("gdpo", changes))


def of_episodes(stream: Stream, recipe: Recipe) -> list[float]:
    """The advantage of the first token of each episode."""
    return objective.prepare(recipe, stream, Context()).advantage[stream.rows[:-1]].tolist()


GDPO = [{"right": r, "format": f} for r, f in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 1), (0, 1)]]
PAIRS = ["g", "g", "g", "g", "h", "h"]


def test_decoupled_components_count_alike_whatever_their_scale() -> None:
    plain = decoupled(GDPO, {"right": 1.0, "format": 1.0}, PAIRS)
    wide = [{**part, "format": 1000 * part["format"] + 7} for part in GDPO]
    assert decoupled(wide, {"right": 1.0, "format": 1.0}, PAIRS) == pytest.approx(plain, abs=1e-3)
    assert plain[0] == -plain[3]
    assert plain[1] == plain[2] == pytest.approx(0, abs=1e-12)
    assert plain[4:] == [0.0, 0.0]
    assert decoupled(GDPO, {"right": 1.0, "format": -1.0}, PAIRS)[0] == pytest.approx(0, abs=1e-12)


def test_decoupled_takes_the_recipes_weights_before_the_recorded_ones() -> None:
    recorded = decoupled(GDPO, {"right": 1.0, "format": 0.25}, PAIRS)
    given = decoupled(GDPO, {"right": 1.0, "format": 9.0}, PAIRS, reward={"components": {"right": 1.0, "format": 0.25}})
    assert given == pytest.approx(recorded, rel=1e-12)


def test_decoupled_with_one_component_or_unknown_ones_is_std_over_the_deviation_of_the_batch() -> None:
    rewards = [0.1 + 0.2, 0.3, 1.0, 0.0, 2.0, 2.0]  # 0.1 + 0.2 isn't 0.3: no component of rounding errors
    std = advantages({"kind": "std", "eps": 1e-4}, rewards, PAIRS)
    expected = [y / (statistics.stdev(std) + 1e-4) for y in std]
    assert decoupled([{"r": r} for r in rewards], {"r": 1.0}, PAIRS) == pytest.approx(expected, rel=1e-9)
    recipe = get_recipe("gdpo")
    assert of_episodes(exact(*simple(rewards, PAIRS)), recipe) == pytest.approx(expected)


def test_decoupled_has_a_shape_as_one_more_component_and_compares_none_that_is_missing() -> None:
    weights = {"right": 1.0, "format": 1.0}
    clip = {"shape": [{"kind": "clip", "low": 0.0, "high": 1.0}]}
    four = PAIRS[:4]
    single = [
        advantages({"kind": "std", "eps": 1e-4}, list(x), four) for x in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, -1))
    ]
    y = [sum(parts) for parts in zip(*single, strict=True)]
    shaped = decoupled(GDPO[:4], weights, four, **clip)
    assert shaped == pytest.approx([one / (statistics.stdev(y) + 1e-4) for one in y])
    some = [{"right": 0.0}, {"right": 1.0}, {"right": 0.0, "format": 1.0}, {"right": 1.0, "format": 0.0}]
    right = advantages({"kind": "std", "eps": 1e-4}, [0, 1, 0, 1], four)
    form = advantages({"kind": "std", "eps": 1e-4}, [1, 0], ["g", "g"])
    y = [right[0], right[1], right[2] + form[0], right[3] + form[1]]
    assert decoupled(some, weights, four) == pytest.approx([one / (statistics.stdev(y) + 1e-4) for one in y])


def test_decoupled_refuses_turns_and_batches() -> None:
    with pytest.raises(UsageError, match="by to one of these"):
        get_recipe("gdpo", {"baseline": {"by": "batch"}})
    recipe = get_recipe("gdpo", {"reward": {"per": "turn"}})
    rows = [row(t, turns=(1, 1)) for t in "ab"]
    episodes = [episode(t, reward=1.0, turn_rewards=[0.5, 0.5]) for t in "ab"]
    with pytest.raises(ValueError, match="per turn: set"):
        objective.prepare(recipe, exact(rows, episodes), Context())
