"""What the dataset functions refuse of rewards and log-probs that a user changed: a row has one reward."""

from __future__ import annotations

import math

import numpy as np
import pytest
from datasets import Dataset

from tapereel.finetune import RLConfig, Trainer, collate, populate_rl_data, rl_step
from tapereel.finetune.data import BadBatch
from tapereel.finetune.interchange.rl_columns import row_rewards
from tapereel.finetune.recipes import get_recipe

from ..build import episode, row, tiny_model
from .test_rl_dataset import made

OWN = {"use_advantages": False, "algo": "reinforce"}


@pytest.mark.parametrize("config", [{}, OWN])
def test_a_row_has_one_reward_which_both_functions_read(config):
    chosen = RLConfig(**config)
    data = populate_rl_data(made([3.0, 1.0]), chosen).to_list()
    want = 3.0 if config else math.sqrt(0.5)

    def changed(**columns):
        return [{**data[0], **columns}, data[1]]

    for first in (3.0, math.nan, None):  # the prompt's tokens may lack it
        rows = changed(rewards=[first, 3.0, 3.0])
        assert populate_rl_data(Dataset.from_list(rows), chosen)["advantages"][0][1] == pytest.approx(want)
        assert rl_step(tiny_model(), collate(rows), chosen)[1]["weights/max"] == pytest.approx(want)
    for bad in ([5.0, 3.0, 3.0], [3.0, 3.0, 5.0], [3.0, math.nan, 3.0], [3.0, math.inf, 3.0], [3.0, None, None]):
        for side in ("right", "left") if config else ():
            with pytest.raises(BadBatch, match=r"'rewards'.*\b(5|nan|inf|3)\b.*row 0, token [012]"):
                rl_step(tiny_model(), collate(changed(rewards=bad), side=side), chosen)
        with pytest.raises(BadBatch, match=r"'rewards'.*\b(5|nan|inf|3)\b.*row 0, token [012]"):
            populate_rl_data(Dataset.from_list(changed(rewards=bad)), chosen)


def test_the_reward_of_a_row_is_that_of_its_tokens():
    config, data = RLConfig(), made([3.0, 1.0, None]).add_column("reward", [3.0, 1.0, None])
    assert populate_rl_data(data, config)["advantages"][0][1] == pytest.approx(math.sqrt(0.5))
    for row_of, value in ((0, 2.0), (1, math.nan), (1, None), (2, 0.0)):
        lines = data.to_list()
        lines[row_of]["reward"] = value
        with pytest.raises(BadBatch, match=rf"'reward'.*\b(2|nan|0)\b.*row {row_of}\b"):
            populate_rl_data(Dataset.from_list(lines), config)
    priced = RLConfig(reward_minus_kl_coef=0.5)
    scored = made([3.0, 1.0], ref=[-1.5, -1.0]).add_column("reward", [3.0, 1.0])
    once = populate_rl_data(scored, priced)
    with pytest.raises(BadBatch, match=r"'reward'.*\b3\b.*row 0\b"):
        populate_rl_data(once, priced)  # it would be priced twice


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.5])
def test_a_log_prob_that_no_engine_can_have_is_refused(value):
    data = made([1, 0]).to_list()
    data[1]["old_logprobs"][2] = value
    with pytest.raises(BadBatch, match=rf"'old_logprobs'.* {value:g} .*row 1, token 2"):
        populate_rl_data(Dataset.from_list(data), RLConfig())
    stopped = Dataset.from_list([line | {"status": "finished" if k == 0 else "crashed"} for k, line in enumerate(data)])
    assert populate_rl_data(stopped, RLConfig())["weights"][1][1:] == [0.0, 0.0], "it doesn't train"
    data[1]["old_logprobs"][0] = value
    data[1]["old_logprobs"][2] = -1.0
    assert populate_rl_data(Dataset.from_list(data), RLConfig())["weights"][1][1:] == [1.0, 1.0], "not an own token"
    rows = [row("a", old=[-1.0, value, -1.0])]
    with pytest.raises(BadBatch, match=f"'a'.* {value:g}"):
        Trainer(tiny_model(), get_recipe("grpo")).update(rows, [episode("a")])


def test_only_rewards_that_differ_are_compared_within_a_tolerance(monkeypatch: pytest.MonkeyPatch):
    """`isclose` made a pass over 100,000 rows 1.45 times as expensive."""
    sizes, close = list[int](), np.isclose
    monkeypatch.setattr(np, "isclose", lambda a, b, **named: sizes.append(np.size(a)) or close(a, b, **named))
    starts, own = np.array([0, 3, 3, 6]), np.ones(6, dtype=bool)
    rewards = np.array([0.1, 0.1, 0.1 + 1e-12, math.nan, math.nan, math.nan])
    found = row_rewards(rewards, own, starts)
    np.testing.assert_array_equal(found, [0.1, math.nan, math.nan])
    assert sizes == [4]
    with pytest.raises(BadBatch, match=r"'rewards' is 2 in row 2, token 1, and 1 before"):
        row_rewards(np.array([1, 1, 1, 1, 2, 3.0]), own, starts)
