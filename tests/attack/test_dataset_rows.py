"""Rows of a dataset that were changed by hand, by a format or by mistake: each is an error that names its place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import tapereel as tr
from tapereel.finetune import RLConfig, collate, fill_ref_logprobs, populate_rl_data, prepare_rl_fields, rl_step
from tapereel.finetune.data import BadBatch

from ..finetune.build import tiny_model
from ..front.making import run_of, sampled_tape

CONFIG = RLConfig()


def rows(**wrong: Any) -> Dataset:
    """Two rows of one group, the second with some columns replaced."""
    made = []
    for k, reward in enumerate((1.0, 0.0)):
        fields = prepare_rl_fields({"input_ids": [0, 1, 2], "labels": [-100, 1, 2]}, reward, [-1.0, -2.0])
        made.append({**fields, "group_id": "g", "tape_id": f"t{k}"})
    made[1] |= wrong
    return Dataset.from_list(made)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"labels": [None, 1, 2]}, "'labels'.*null"),
        ({"labels": None}, "`input_ids`"),
        ({"rewards": None}, r"'rewards'.*\b3\b.*`labels`.*\b6\b"),
        ({"rewards": [math.inf] * 3}, r"'rewards'.*\binf\b.*row 1, token 1"),
        ({"old_logprobs": [-1.0, -1.0]}, r"'old_logprobs'.*\b5\b"),
        ({"group_id": None}, r"'group_id'.*null.*row 1"),
    ],
)
def test_a_wrong_row_is_refused_by_the_pass(wrong: dict[str, Any], why: str):
    with pytest.raises(BadBatch, match=why):
        populate_rl_data(rows(**wrong), CONFIG)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"input_ids": [0, 1, 2, 3]}, r"'labels'.*row 1\b.*\(3,\).*`input_ids`.*\b4\b"),
        ({"temperature": None}, r"'temperature'.*row 1\b.*\(\)"),
        ({"temperature": [math.nan, 0.0, 1.0]}, r"'temperature'.* 0 .*row 1, token 1"),
        ({"temperature": [math.nan, 1.0, -1.0]}, r"'temperature'.* -1 .*row 1, token 2"),
        ({"labels": [-100, 2, 1]}, "shifted"),
        ({"old_logprobs": [math.nan, 3.0, -1.0]}, r"'old_logprobs'.* 3 .*row 1, token 1"),
    ],
)
def test_a_wrong_row_is_refused_by_the_step(wrong: dict[str, Any], why: str):
    with pytest.raises(BadBatch, match=why):
        rl_step(tiny_model(), collate(list(populate_rl_data(rows(**wrong), CONFIG))), CONFIG)


def test_a_reference_is_not_asked_at_an_unknown_temperature():
    with pytest.raises(BadBatch, match=r"'temperature'.*\bnan\b.*row 1, token 1"):
        fill_ref_logprobs(rows(temperature=[math.nan, math.nan, 1.0]), tiny_model(), CONFIG)


def test_no_row_an_empty_row_and_a_row_that_begins_with_a_target():
    assert len(populate_rl_data(rows().select([]), CONFIG)) == 0
    for features, side in (([], "right"), (list(rows()), "middle")):
        with pytest.raises(BadBatch, match=r"'right'.*'left'"):
            collate(features, side=side)
    got = populate_rl_data(rows(labels=[0, 1, 2], old_logprobs=[-1.0, -1.0, -2.0]), CONFIG)
    assert math.isnan(got["weights"][1][0]), "the first token of a row has no logits before it"
    loss, stats = rl_step(tiny_model(), collate(list(got)), CONFIG)
    assert stats["tokens"] == 4
    assert math.isfinite(loss.item())


def test_datasets_in_other_formats_and_after_filter_and_map_step_alike():
    data = populate_rl_data(rows(), CONFIG)
    want = rl_step(tiny_model(), collate(list(data)), CONFIG)[0].item()
    for name in ("torch", "numpy"):
        assert rl_step(tiny_model(), collate(list(data.with_format(name))), CONFIG)[0].item() == want
    doubled = rows().map(lambda row: {"rewards": [2 * x for x in row["rewards"]]})
    assert populate_rl_data(doubled, CONFIG)["advantages"][0][1:] == data["advantages"][0][1:]
    alone = populate_rl_data(rows().filter(lambda row: row["tape_id"] == "t0"), CONFIG)
    assert alone["advantages"][0][1:] == [0.0, 0.0]


def test_a_stream_is_read_once_by_the_workers_of_a_loader(tmp_path: Path):
    run_of(tmp_path / "run", [])
    with tr.tapes.store.store.Store.open(tmp_path / "run", write=True) as store:
        for k in range(20):
            for body in sampled_tape(f"{k:02d}", logprobs=[-0.5] * 3).bodies:
                store.writer.append(body)
    run = tr.open(tmp_path / "run")
    loader = torch.utils.data.DataLoader(run.dataset(streaming=True), batch_size=4, num_workers=1, collate_fn=list)
    seen = [row["tape_id"] for batch in loader for row in batch]
    assert sorted(seen) == sorted(tape.id for tape in run.tapes())
