"""The classic public names over `datasets`: alignment, groups, collation, and one step that equals the trainer's."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tapereel.finetune.data.stream import BadBatch
from tapereel.finetune.interchange.rl_columns import prepare_rl_fields, span_labels, to_dataset
from tapereel.finetune.interchange.rl_dataset import (
    RLConfig,
    collate,
    populate_rl_data,
    rl_step,
    update_rewards_and_advantages,
)
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer.logprobs import score
from tapereel.finetune.trainer.trainer import Trainer

from ..build import batch, episode, ledger, row, tiny_model

ROWS = ledger("rows")


def nan(values):
    return [math.nan if x is None else x for x in values]


def made(rewards, groups=None, tapes=None, tokens=2, old=None, ref=None):
    """A dataset of one row per reward: one context token, then `tokens` targets."""
    rows = []
    for i, r in enumerate(rewards):
        encoding = {"input_ids": list(range(tokens + 1)), "labels": [-100, *range(1, tokens + 1)]}
        fields = prepare_rl_fields(encoding, r, old or [-1.0] * tokens, ref)
        rows.append({**fields, "group_id": groups[i] if groups else "g", "tape_id": tapes[i] if tapes else str(i)})
    return Dataset.from_list(rows)


@pytest.mark.ledger("F05", "T08")
@pytest.mark.parametrize("name", ["F05", "T08"])
def test_log_probs_stand_where_their_tokens_stand(name):
    case = ROWS[name]
    got = prepare_rl_fields({"labels": case["labels"], "input_ids": case["labels"]}, 0.5, case["old"], case["old"])
    for column in ("old_logprobs", "ref_logprobs"):
        assert got[column] == pytest.approx(nan(case["expected"]), nan_ok=True)
    assert got["rewards"] == [0.5] * len(case["labels"])
    if "wrong" in case:
        assert got["old_logprobs"] != pytest.approx(nan(case["wrong"]), nan_ok=True)


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
@pytest.mark.ledger("F05")
def test_old_is_finite_exactly_on_the_targets_and_in_their_order(pattern):
    labels = [i if own else -100 for i, own in enumerate(pattern)]
    values = [-0.5 * k for k in range(sum(pattern))]
    got = prepare_rl_fields({"labels": labels}, 1.0, values)
    assert [not math.isnan(x) for x in got["old_logprobs"]] == pattern
    assert [x for x in got["old_logprobs"] if not math.isnan(x)] == values
    assert all(math.isnan(x) for x in got["ref_logprobs"] + got["advantages"])


@pytest.mark.ledger("F05")
def test_a_log_prob_too_many_or_too_few_is_refused():
    with pytest.raises(BadBatch, match="1 old_logprobs for 2 targets"):
        prepare_rl_fields({"labels": [-100, 3, 4]}, 1.0, [-1.0])
    with pytest.raises(BadBatch, match="3 ref_logprobs for 2 targets"):
        prepare_rl_fields({"labels": [-100, 3, 4]}, 1.0, [-1.0, -1.0], [-1.0] * 3)


@pytest.mark.ledger("F06", "F38", "F32")
def test_the_dataset_pass_gives_group_advantages_and_keeps_rows_in_their_order():
    case = ROWS["F06"]
    config = RLConfig(algo=case["algo"])
    data = made(case["rewards"])
    got = populate_rl_data(data, config)
    for line, want, stated in zip(got, case["expected"], case["stated"], strict=True):
        assert math.isnan(line["advantages"][0])
        assert line["advantages"][1:] == pytest.approx([want] * 2, rel=1e-6)
        assert line["advantages"][1] == pytest.approx(stated, abs=6e-5)
    order = [2, 0, 3, 1]
    permuted = populate_rl_data(data.select(order), config)
    assert [r["advantages"][1] for r in permuted] == [got[i]["advantages"][1] for i in order]
    assert permuted["input_ids"][0] == data["input_ids"][0]
    assert data["advantages"][0] != got["advantages"][0], "the input isn't touched"


@pytest.mark.ledger("F06", "P14", "T09")
def test_rows_of_one_tape_are_one_episode_and_must_agree():
    got = update_rewards_and_advantages(made([1, 1, 1, 0], tapes=["a", "a", "a", "b"]), RLConfig())
    assert [r["advantages"][1] for r in got] == pytest.approx([math.sqrt(0.5)] * 3 + [-math.sqrt(0.5)], rel=1e-6)
    with pytest.raises(BadBatch, match="disagree on its reward"):
        update_rewards_and_advantages(made([1, 0], tapes=["a", "a"]), RLConfig())
    with pytest.raises(BadBatch, match="no column 'group_id'"):
        update_rewards_and_advantages(made([1, 0]).remove_columns("group_id"), RLConfig())


@pytest.mark.ledger("F06", "P6", "T02")
def test_groups_of_one_and_flat_groups_get_exactly_zero():
    got = update_rewards_and_advantages(made([0.1] * 8 + [5], groups=["flat"] * 8 + ["one"]), RLConfig())
    assert all(r["advantages"][1:] == [0.0, 0.0] for r in got)


def test_an_unscored_row_has_no_advantage_and_is_in_no_group():
    got = update_rewards_and_advantages(made([1, None, 0]), RLConfig())
    want = [math.sqrt(0.5), math.nan, -math.sqrt(0.5)]
    assert [r["advantages"][1] for r in got] == pytest.approx(want, rel=1e-6, nan_ok=True)


def test_a_dataset_that_was_cut_or_shuffled_keeps_its_rows_together():
    data = made([1, 0, 5, 7, 1], groups=["x", "x", "y", "y", "x"])
    whole = update_rewards_and_advantages(data, RLConfig())
    cut = update_rewards_and_advantages(data.select(range(2, 4)), RLConfig())
    assert cut["advantages"][0][1:] == whole["advantages"][2][1:]
    assert cut["rewards"][0] == [5.0] * 3
    assert whole._fingerprint != data._fingerprint
    assert whole._fingerprint == update_rewards_and_advantages(data, RLConfig())._fingerprint


@pytest.mark.ledger("F30", "T43")
def test_the_kl_price_reaches_rewards_and_advantages_alike():
    case = ROWS["F30"]
    config = RLConfig(reward_minus_kl_coef=case["coefficient"], use_advantages=False)
    got = update_rewards_and_advantages(made([case["reward"]], old=case["old"], ref=case["ref"]), config)
    assert got["rewards"][0] == pytest.approx([case["expected"]] * 3, rel=1e-9)
    assert got["rewards"][0][0] == pytest.approx(case["stated"], abs=5e-7)
    assert got["advantages"][0][1:] == pytest.approx([case["expected"]] * 2, rel=1e-6)


@pytest.mark.ledger("F45", "F06")
def test_a_recipe_that_whitens_over_tokens_sees_the_tokens_of_the_whole_dataset():
    data = made([1, 0, 3], tokens=2)
    for algo in ("reinforce_pp", "reinforce_pp_baseline"):
        got = update_rewards_and_advantages(data, RLConfig(algo=algo))
        a = np.array([line["advantages"][1:] for line in got])
        want = np.array([1.0, 0.0, 3.0]) - 4 / 3
        assert a == pytest.approx(np.repeat(want / want.std(), 2).reshape(3, 2), rel=1e-6)
        assert got["rewards"] == data["rewards"]


@pytest.mark.ledger("F07", "X10")
def test_a_token_is_a_target_iff_its_characters_overlap_a_span():
    case = ROWS["F07"]
    assert span_labels(case["ids"], case["offsets"], case["spans"]) == case["expected"]


@pytest.mark.ledger("F07", "T07")
@pytest.mark.parametrize("side", ["right", "left"])
def test_no_padding_value_is_ever_a_log_prob(side):
    data = made([1, 0], tokens=2)
    long = made([1], tokens=19)
    got = collate([data[0], long[0]], side=side, pad_id=7)
    assert got["input_ids"].shape == (2, 32)
    padding = got["attention_mask"] == 0
    assert padding.sum() == 32 - 3 + 32 - 20
    assert (got["labels"][padding] == -100).all()
    assert (got["input_ids"][padding] == 7).all()
    for name in ("old_logprobs", "ref_logprobs", "rewards", "advantages"):
        assert got[name][padding].isnan().all()
    assert got["old_logprobs"][~padding & (got["labels"] != -100)].isfinite().all()


@pytest.mark.ledger("F10", "F01")
@pytest.mark.parametrize("side", ["right", "left"])
def test_what_was_padded_can_be_stripped_to_what_it_was(side, tmp_path):
    rows, episodes = batch()
    data = to_dataset(rows, episodes)
    data.save_to_disk(str(tmp_path / "data"))
    kept = Dataset.load_from_disk(str(tmp_path / "data"))
    padded = collate(list(kept), side=side)
    for i, line in enumerate(data):
        there = padded["attention_mask"][i] == 1
        for name in ("input_ids", "labels", "old_logprobs", "rewards"):
            assert padded[name][i, there].tolist() == pytest.approx(line[name], nan_ok=True)
        assert (line["tape_id"], line["group_id"]) == (rows[i].tape, rows[i].group)


@pytest.mark.ledger("F53", "F54", "F55", "F08", "P1")
@pytest.mark.parametrize("algo", ["grpo", "reinforce"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_one_step_on_a_collated_batch_equals_the_trainers(algo, side):
    model = tiny_model()
    rows, episodes = batch(model=model)
    config = RLConfig(algo=algo)
    data = populate_rl_data(to_dataset(rows, episodes), config)
    loss, stats = rl_step(model, collate(list(data), side=side), config)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    trainer = Trainer(model, get_recipe(algo), lr=0.0, grad_clip=None)
    prepared = trainer.prepare(rows, episodes)
    trainer.optimizer.zero_grad()
    done = trainer._accumulate(rows, prepared.batch.part())
    assert loss.item() == pytest.approx(done.loss, rel=1e-6)
    assert stats["tokens"] == sum(len(r.own) for r in rows)
    for n, p in model.named_parameters():
        torch.testing.assert_close(grads[n], p.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.ledger("F50", "F51")
def test_raw_rewards_as_weights_and_only_the_positive_ones():
    case = ROWS["F50"]
    model = tiny_model()
    rows = [row("a", old=[-1.0] * 2, turns=(2,))]
    data = to_dataset(rows, [episode("a", reward=case["rewards"][0])])
    config = RLConfig(algo="reinforce", use_advantages=False)
    loss, _ = rl_step(model, collate(list(populate_rl_data(data, config))), config)
    lp = score(model, rows).logprob
    assert loss.item() == pytest.approx(float((lp * torch.tensor(case["lp_gradient"])).sum()), rel=1e-6)
    data = to_dataset(rows, [episode("a", reward=-1.0)])
    config = RLConfig(algo="reinforce", use_advantages=False, relu_log_p_weights=True)
    loss, stats = rl_step(model, collate(list(populate_rl_data(data, config))), config)
    assert loss.item() == 0.0
    assert stats["weights"] == 0.0


@pytest.mark.ledger("F74")
def test_statistics_are_those_of_own_tokens_only():
    model = tiny_model()
    rows, episodes = batch(model=model)
    config = RLConfig()
    data = populate_rl_data(to_dataset(rows, episodes), config)
    _, stats = rl_step(model, collate(list(data), multiple=64), config)
    lp = score(model, rows).logprob
    assert stats["new_logprobs"] == pytest.approx(lp.mean().item(), rel=1e-6)
    assert stats["new_logprobs/min"] == pytest.approx(lp.min().item(), rel=1e-6)
    old = np.concatenate([r.old for r in rows])
    assert stats["old_logprobs/max"] == pytest.approx(old.max(), rel=1e-6)
    assert "ref_logprobs" not in stats


@pytest.mark.ledger("F74", "T06")
def test_every_statistic_is_its_formula_over_own_tokens_with_its_extremes():
    model = tiny_model()
    rows, episodes = batch(model=model)
    config = RLConfig(kl_coef=0.1, epsilon=0.05)
    data = populate_rl_data(to_dataset(rows, episodes), config).to_list()
    ref = score(tiny_model(seed=1), rows).logprob.numpy()
    at = np.cumsum([0, *(len(r.own) for r in rows)])
    for k, (line, r) in enumerate(zip(data, rows, strict=True)):
        line["ref_logprobs"] = r.aligned(ref[at[k] : at[k + 1]]).tolist()
    _, stats = rl_step(model, collate(data, multiple=64), config)
    new, old = score(model, rows).logprob.numpy(), np.concatenate([r.old for r in rows]).astype(np.float64)
    a = np.concatenate([np.array(line["advantages"])[r.own] for line, r in zip(data, rows, strict=True)])
    reward = np.concatenate([[e.reward] * len(r.own) for e, r in zip(episodes, rows, strict=True)])
    ratio = np.exp(new - old)
    want = {
        "new_logprobs": new,
        "old_logprobs": old,
        "ref_logprobs": ref,
        "ratio_new_old": ratio,
        "ratio_ref_new": np.exp(ref - new),
        "ratio_ref_old": np.exp(ref - old),
        "rewards": reward,
        "advantages": a,
        "weights": a,
        "kl": np.exp(ref - new) - (ref - new) - 1,
        "surrogate": ratio * a,
        "surrogate/clipped": ratio.clip(0.95, 1.05) * a,
    }
    for name, values in want.items():
        got = [stats[name], stats[f"{name}/min"], stats[f"{name}/max"]]
        assert got == pytest.approx([values.mean(), values.min(), values.max()], rel=1e-5, abs=1e-7), name
    assert stats["logprob_where_weight_positive"] == pytest.approx(new[a > 0].mean(), rel=1e-5)
    assert stats["logprob_where_weight_negative"] == pytest.approx(new[a < 0].mean(), rel=1e-5)
    assert stats["clip"] == pytest.approx(np.mean(ratio * a > ratio.clip(0.95, 1.05) * a))


def test_a_recipe_that_needs_whole_episodes_is_refused_and_so_is_an_unknown_key():
    with pytest.raises(ValidationError, match="reward_minus_kl"):
        RLConfig(reward_minus_kl=0.1)  # type: ignore[call-arg]
    data = populate_rl_data(to_dataset([row("a")], [episode("a")]), RLConfig())
    without = {k: v for k, v in collate(list(data)).items() if k != "ref_logprobs"}
    with pytest.raises(BadBatch, match="reference model"):
        rl_step(tiny_model(), without, RLConfig(kl_coef=0.1))


@pytest.mark.ledger("F08", "F05")
def test_rows_become_the_classic_columns():
    a_row = dataclasses.replace(row("a", turns=(2, 1), between=2), old=np.array([-1, 0, -2], np.float32))
    line = to_dataset([a_row], [episode("a", reward=None)])[0]
    assert line["labels"] == [-100, -100, *a_row.input_ids[2:4].tolist(), -100, -100, int(a_row.input_ids[6])]
    assert line["old_logprobs"] == pytest.approx(nan([None, None, -1, 0, None, None, -2]), nan_ok=True)
    assert all(math.isnan(r) for r in line["rewards"])
    assert line["turn"] == [-1, -1, 0, 0, -1, -1, 1]
    assert line["version"][2] == "run:0"
