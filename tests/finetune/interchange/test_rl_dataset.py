"""The classic public names over `datasets`: alignment, groups, collation, and one step that equals the trainer's."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tapereel.finetune import (
    OptimiserConfig,
    RLConfig,
    Trainer,
    collate,
    fill_ref_logprobs,
    populate_rl_data,
    prepare_rl_fields,
    rl_step,
    to_dataset,
    update_rewards_and_advantages,
)
from tapereel.finetune.data import BadBatch
from tapereel.finetune.interchange.rl_columns import span_labels
from tapereel.finetune.interchange.rl_dataset import LossNotFinite
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import score
from tapereel.tapes import CauseType, Status
from tapereel.tapes.common import REWARD_LIMIT
from tapereel.tapes.errors import UsageError

from ...oracles import dataset_step as oracle
from ..build import batch, episode, gradient, ledger, row, tiny_model

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
    with pytest.raises(BadBatch, match=r"\b1 old_logprobs\b.*\b2\b"):
        prepare_rl_fields({"labels": [-100, 3, 4]}, 1.0, [-1.0])
    with pytest.raises(BadBatch, match=r"\b3 ref_logprobs\b.*\b2\b"):
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
    for same in (populate_rl_data(data, ["input_ids"], collate, config), populate_rl_data(data, config=config)):
        assert repr(same[:]) == repr(got[:]), "as TapeAgents calls it, and by keyword"
    with pytest.raises(UsageError, match=r"populate_rl_data.*\bNone\b"):
        populate_rl_data(data, ["input_ids"], collate, None)
    order = [2, 0, 3, 1]
    permuted = populate_rl_data(data.select(order), config)
    assert [r["advantages"][1] for r in permuted] == [got[i]["advantages"][1] for i in order]
    assert permuted["input_ids"][0] == data["input_ids"][0]
    assert data["advantages"][0] != got["advantages"][0], "the input isn't touched"


@pytest.mark.ledger("F06", "P14", "T09")
def test_rows_of_one_tape_are_one_episode_and_must_agree():
    got = update_rewards_and_advantages(made([1, 1, 1, 0], tapes=["a", "a", "a", "b"]), RLConfig())
    assert [r["advantages"][1] for r in got] == pytest.approx([math.sqrt(0.5)] * 3 + [-math.sqrt(0.5)], rel=1e-6)
    with pytest.raises(BadBatch, match=r"'a'.*\bstatus\b"):
        update_rewards_and_advantages(made([1, 0], tapes=["a", "a"]), RLConfig())
    with pytest.raises(BadBatch, match=r"'group_id'.*\binput_ids\b"):
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
    trainer = Trainer(model, get_recipe(algo), OptimiserConfig.model_construct(lr=0.0, grad_clip=None))
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
    for name in ("grpp", "", "tapereel.finetune.recipes.grpo:grpp"):
        with pytest.raises(ValidationError, match="grpo"):
            RLConfig(algo=name)
    assert RLConfig(algo="tapereel.finetune.recipes.grpo:dr_grpo").recipe() == get_recipe("dr_grpo")
    data = populate_rl_data(to_dataset([row("a")], [episode("a")]), RLConfig())
    without = {k: v for k, v in collate(list(data)).items() if k != "ref_logprobs"}
    with pytest.raises(BadBatch, match="'ref_logprobs'"):
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


ENDS = [
    (Status.FINISHED, None),
    (Status.CANCELLED, None),
    (Status.TRUNCATED, None),
    (Status.ERROR, CauseType.AGENT),
    (Status.ERROR, CauseType.ENVIRONMENT),
    (Status.LIMIT, CauseType.TOKENS),
    (Status.LIMIT, CauseType.SECONDS),
    (Status.CRASHED, None),
]


def mixed(seed: int, model, temperature: float = 0.7):
    """Rows of two groups of eight episodes: each end once a group, one unscored, some in two rows, turns with rewards,
    two tokens without a log-prob, in any order."""
    rng = np.random.default_rng(seed)
    rows, episodes = [], []
    for i in range(16):
        pieces, turn = int(rng.integers(1, 3)), 0
        for _ in range(pieces):
            turns = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 3)))]
            prompt = int(rng.integers(1, 5))
            one = row(f"t{i}", f"g{i % 2}", turns=turns, first_turn=turn, prompt=prompt, rng=rng)
            rows.append(dataclasses.replace(one, temperature=rng.choice([temperature, 1.5], len(one.own)).astype("f4")))
            turn += len(turns)
        earned = rng.normal(size=turn).round(2).tolist()
        status, cause = ENDS[i // 2]
        scored = {"reward": sum(earned), "turn_rewards": earned} if i not in (4, 11) else {"reward": None}
        episodes.append(episode(f"t{i}", f"g{i % 2}", status=status, cause=cause, **scored))
    rows = [rows[i] for i in rng.permutation(len(rows))]
    lp = score(model, rows).logprob.float().numpy()
    lp = np.minimum(lp + rng.normal(0, 0.15, len(lp)).astype(np.float32), 0)
    lp[[0, 9]] = np.nan
    at = np.cumsum([0, *(len(r.own) for r in rows)])
    return [dataclasses.replace(r, old=lp[a:b]) for r, a, b in zip(rows, at, at[1:], strict=False)], episodes


def stepped(model, data, config, side="right"):
    """(loss, statistics, gradients by name) of one step on the whole dataset."""
    model.zero_grad()
    loss, stats = rl_step(model, collate(list(data), side=side), config)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), stats, grads


SETTINGS = [
    (RLConfig(), oracle.Settings()),
    (RLConfig(epsilon=0.05, kl_coef=0.1), oracle.Settings(clip=0.05, beta=0.1)),
    (RLConfig(weigh="episode", relu_log_p_weights=True), oracle.Settings(weigh="episode", relu=True)),
    (RLConfig(reward_minus_kl_coef=0.2), oracle.Settings(reward_beta=0.2)),
    (
        RLConfig(algo="reinforce", kl_coef=0.3, weigh="episode"),
        oracle.Settings(algo="reinforce", beta=0.3, weigh="episode"),
    ),
    (RLConfig(algo="reinforce", use_advantages=False), oracle.Settings(algo="reinforce", raw=True)),
]


@pytest.mark.ledger("F06", "F50", "F51", "F53", "F54", "T24")
@pytest.mark.parametrize(("config", "how"), SETTINGS, ids=range(len(SETTINGS)))
def test_a_step_at_mixed_temperatures_and_ends_is_the_slow_formula(config, how):
    model, other = tiny_model(), tiny_model(seed=1)
    data = populate_rl_data(fill_ref_logprobs(to_dataset(*mixed(3, model)), other, config), config)
    loss, stats, grads = stepped(model, data, config, side="left")
    want = oracle.step(data.to_list(), lambda ids: model(input_ids=torch.tensor([ids])).logits[0], how)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=2e-6 * largest)
    assert 0 < stats["tokens"] < sum(data["num_labels"])


EQUAL = ["grpo", "reinforce", "reinforce_plain", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "dapo"]
EQUAL += ["cispo", "cpgd", "sapo", "sft"]


@pytest.mark.ledger("F06", "F53", "T24", "P1", "P4")
@pytest.mark.parametrize("algo", EQUAL)
def test_every_recipe_of_a_step_equals_the_trainer_whole_and_in_parts(algo):
    model, other = tiny_model(), tiny_model(seed=1)
    rows, episodes = mixed(5, model)
    config = RLConfig(algo=algo)
    data = populate_rl_data(fill_ref_logprobs(to_dataset(rows, episodes), other, config), config)
    loss, _, grads = stepped(model, data, config)
    want = gradient(model, get_recipe(algo), rows, episodes, reference=other)
    assert loss == pytest.approx(want[0], rel=1e-5)
    largest = max(float(g.abs().max()) for g in want[1].values())
    for name, g in want[1].items():
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-5 * largest)
    if algo == "dr_grpo":  # its divisor counts episodes, and these have rows in both parts
        return
    parts = [stepped(model, data.select(range(a, b)), config) for a, b in ((0, 7), (7, len(data)))]
    weight = sum(stats["weight"] for _, stats, _ in parts)
    assert sum(part[0] * part[1]["weight"] for part in parts) / weight == pytest.approx(want[0], rel=1e-5)
    for name, g in want[1].items():
        got = sum(part[2][name] * part[1]["weight"] for part in parts) / weight
        torch.testing.assert_close(got, g, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("algo", "why"),
    [
        ("ppo", "'ppo'.*critic="),
        ("gspo", "'gspo'.*Trainer"),
        ("decoupled_ppo", "'decoupled_ppo'.*Trainer"),
        ("minor_sft", "'minor_sft'.*Trainer"),
        ("distill", "'distill'.*teacher="),
    ],
)
def test_a_recipe_that_needs_more_than_a_batch_is_refused_before_the_pass(algo, why):
    with pytest.raises(BadBatch, match=why):
        populate_rl_data(made([1, 0]), RLConfig(algo=algo))


@pytest.mark.ledger("F50", "T18")
def test_the_recipe_keeps_its_own_clip_range_and_length_penalty():
    assert RLConfig(algo="dapo").recipe().surrogate == get_recipe("dapo").surrogate
    priced = RLConfig(algo="dapo", reward_minus_kl_coef=0.1).recipe().shape
    assert [term.kind for term in priced] == ["overlong", "episode_kl"]


def broken(column: str, at: int, value: float = math.nan, **config):
    """A dataset of two groups whose pass is done, with one wrong value in row 2, token `at`; and its config."""
    chosen = RLConfig(**config)
    data = populate_rl_data(made([1, 0, 1, 0], groups=["g", "g", "h", "h"], ref=[-1.0, -1.0]), chosen).to_list()
    data[2][column][at] = value
    return data, chosen


@pytest.mark.ledger("F81", "T46")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("column", "value", "config"),
    [
        ("ref_logprobs", math.nan, {"kl_coef": 0.1}),
        ("ref_logprobs", None, {"kl_coef": 0.1}),
        ("ref_logprobs", -math.inf, {"algo": "reinforce", "kl_coef": 0.1}),
        ("old_logprobs", math.nan, {}),
        ("advantages", None, {}),
        ("rewards", math.nan, {"use_advantages": False}),
        ("weights", math.nan, {}),
        ("weights", -1.0, {}),
        ("temperature", math.nan, {}),
    ],
)
def test_an_unknown_number_that_the_loss_reads_is_an_error_with_its_place(column, value, config, side):
    data, chosen = broken(column, 2, value, **config)
    with pytest.raises(BadBatch, match=rf"'{column}'.* -?\w+ .*row 2, token 2"):
        rl_step(tiny_model(), collate(data, side=side), chosen)
    data, chosen = broken(column, 0, value, **config)
    assert math.isfinite(rl_step(tiny_model(), collate(data, side=side), chosen)[0].item()), "not an own token"
    data, chosen = broken(column, 2, value, **config)
    if column != "weights":
        data[2]["weights"][2] = 0.0
        assert math.isfinite(rl_step(tiny_model(), collate(data, side=side), chosen)[0].item()), "it doesn't train"
    with pytest.raises(BadBatch, match=rf"'{column}'.*\binput_ids\b"):
        rl_step(tiny_model(), {k: v for k, v in collate(data).items() if k != column}, chosen)


@pytest.mark.parametrize("reward", [2 * REWARD_LIMIT, -1e200, 1e308, math.inf])
def test_a_reward_beyond_the_limit_is_refused_with_its_row(reward: float):
    with pytest.raises(BadBatch, match=rf"'rewards'.* {re.escape(f'{reward:g}')} .*row 1\b"):
        populate_rl_data(made([1.0, reward, 0.0]), RLConfig())
    populate_rl_data(made([REWARD_LIMIT, -REWARD_LIMIT, 0.0]), RLConfig())


@pytest.mark.ledger("F30", "F81")
def test_a_kl_in_the_reward_without_reference_log_probs_names_column_and_row():
    config = RLConfig(reward_minus_kl_coef=0.1)
    with pytest.raises(BadBatch, match=r"'ref_logprobs'.*\bnan\b.*row 0, token 1\b.*fill_ref_logprobs"):
        populate_rl_data(made([1, 0]), config)
    line = made([1, 0, 1], ref=[-1.0, -1.0]).to_list()
    line[1]["ref_logprobs"][2] = None
    with pytest.raises(BadBatch, match=r"'ref_logprobs'.*\bnan\b.*row 1, token 2\b"):
        populate_rl_data(Dataset.from_list(line), config)
    line[1] |= {"rewards": [None] * 3}
    assert populate_rl_data(Dataset.from_list(line), config)["weights"][1][1:] == [0.0, 0.0], "unscored: doesn't train"


@pytest.mark.ledger("F81")
def test_a_loss_that_is_not_finite_is_an_error_and_nothing_has_a_gradient():
    model = tiny_model()
    config = RLConfig()
    batch_ = collate(list(populate_rl_data(made([1, 0]), config)))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(LossNotFinite, match=r"\bnan\b.*row 0, token 1\b.*\bnan\b"):
        rl_step(model, batch_, config)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.ledger("F06")
def test_a_pass_that_could_train_on_nothing_says_which_column_is_empty():
    with pytest.raises(BadBatch, match=r"'rewards'.*\bNaN\b"):
        populate_rl_data(made([None, None]), RLConfig())
    with pytest.raises(BadBatch, match=r"'old_logprobs'.*\bNaN\b"):
        populate_rl_data(made([1, 0], old=[math.nan] * 2), RLConfig())
    assert populate_rl_data(made([None, None], old=[math.nan] * 2), RLConfig(algo="sft"))["weights"][0][1:] == [1, 1]
    cancelled = made([1, 0]).add_column("status", ["cancelled"] * 2)
    assert populate_rl_data(cancelled, RLConfig())["weights"][0][1:] == [0, 0]


@pytest.mark.ledger("F06", "P14")
def test_the_status_decides_who_trains_and_who_counts_in_the_group():
    data = made([1, 0, 0, 1]).add_column("status", ["cancelled", "finished", "limit", "limit"])
    data = data.add_column("cause", [None, None, "tokens", "context"])
    got = populate_rl_data(data, RLConfig())
    want = [math.nan, -1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)]
    assert [line["advantages"][1] for line in got] == pytest.approx(want, rel=1e-6, nan_ok=True)
    assert [line["weights"][1] for line in got] == [0, 1, 1, 1]
    with pytest.raises(BadBatch, match=r"'status'.*row 1\b.*'done'"):
        populate_rl_data(made([1, 0]).add_column("status", ["finished", "done"]), RLConfig())
    both = made([1, 1], tapes=["a", "a"]).add_column("status", ["finished", "cancelled"])
    with pytest.raises(BadBatch, match=r"'a'.*\bstatus\b"):
        populate_rl_data(both, RLConfig())


def test_what_is_no_whole_dataset_or_has_no_name_is_refused():
    with pytest.raises(UsageError, match="IterableDataset"):
        populate_rl_data(made([1, 0]).to_iterable_dataset(), RLConfig())  # type: ignore[arg-type]
    for name in ("group_id", "tape_id"):
        data = made([1, 0]).to_list()
        data[1][name] = None
        with pytest.raises(BadBatch, match=rf"'{name}'.*\bnull\b.*row 1\b"):
            populate_rl_data(Dataset.from_list(data), RLConfig())


@pytest.mark.ledger("F74")
def test_reference_log_probs_are_those_of_the_model_at_the_recorded_temperature():
    model, other = tiny_model(), tiny_model(seed=1)
    rows, episodes = mixed(7, model)
    other.train()
    data = fill_ref_logprobs(to_dataset(rows, episodes), other, RLConfig(), micro_tokens=32)
    assert other.training
    at = np.cumsum([0, *(len(r.own) for r in rows)])
    want = score(other, rows).logprob.numpy()
    for line, r, a, b in zip(data, rows, at, at[1:], strict=False):
        assert line["ref_logprobs"] == pytest.approx(r.aligned(want[a:b]).tolist(), rel=1e-6, nan_ok=True)
    plain = fill_ref_logprobs(to_dataset(rows, episodes), other, RLConfig(algo="sft"))
    assert plain["ref_logprobs"] != data["ref_logprobs"], "a recipe that scores at temperature 1 reads it so"
    assert plain._fingerprint != data._fingerprint


def test_rewards_that_were_changed_without_those_of_the_turns_are_refused():
    config = RLConfig(algo="reinforce_plain")
    data = to_dataset([row("a", turns=(1, 2))], [episode("a", reward=1.0, turn_rewards=[0.25, 0.75])])
    assert populate_rl_data(data, config)["advantages"][0][2:] == pytest.approx(
        [1.0, math.nan, 0.75, 0.75], nan_ok=True
    )
    changed = data.map(lambda line: {"rewards": [2.0] * len(line["rewards"]), "reward": 2.0})
    with pytest.raises(BadBatch, match=r"`turn_rewards`.*\b1\b.*`rewards`.*\b2\b"):
        populate_rl_data(changed, config)
    assert populate_rl_data(changed.remove_columns("turn_rewards"), config)["advantages"][0][2] == 2.0
    whole = RLConfig(algo="reinforce", use_advantages=False)  # reads the sum alone
    assert populate_rl_data(changed, whole)["advantages"][0][2] == 2.0


def test_rows_without_a_label_are_told_so():
    data = to_dataset([row("a")], [episode("a", reward=1.0)])
    none = data.map(lambda line: {"labels": [-100] * len(line["labels"])})
    with pytest.raises(BadBatch, match=r"'labels' is -100 in every row"):
        populate_rl_data(none, RLConfig())


def test_a_reference_refuses_a_dataset_with_pictures() -> None:
    dataset = Dataset.from_dict({"input_ids": [[1, 2]], "images": [[None]]})
    with pytest.raises(UsageError, match="`images`"):
        fill_ref_logprobs(dataset, tiny_model(), RLConfig())


def test_advantages_of_your_own_need_weights_and_the_error_says_which() -> None:
    data = made([1.0, 0.0])
    own = [
        {**line, "advantages": [math.nan, 0.5, 0.5], "group_tokens": 2.0}
        for line in data.remove_columns([name for name in ("advantages", "weights") if name in data.column_names])
    ]
    config, model = RLConfig(algo="reinforce"), tiny_model()
    with pytest.raises(BadBatch, match=r"weights.*1\.0 at each token that trains"):
        rl_step(model, collate(own), config)
    loss, _ = rl_step(model, collate([{**line, "weights": [math.nan, 1.0, 1.0]} for line in own]), config)
    assert bool(loss.isfinite())
