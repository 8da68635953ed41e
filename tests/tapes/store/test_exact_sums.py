"""Components of a reward that add up to 1 give a reward of 1, wherever it is summed or compared."""

from __future__ import annotations

from functools import reduce
from operator import add
from pathlib import Path

import pytest

from tapereel.agents.runs.pass_at_k import evaluate_rewards
from tapereel.envs.curriculum import pass_rates
from tapereel.tapes.store import Store

from .lab import Lab

lab = Lab()
PARTS = {"three": (0.6, 0.3, 0.1), "other": (0.7, 0.2, 0.1), "ten": (0.1,) * 10}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_index_and_the_tape_sum_exactly_even_if_they_were_read_in_pieces(
    tmp_path: Path, parts: tuple[float, ...]
) -> None:
    assert reduce(add, parts) != 1.0  # from Python 3.12 on, `sum` rounds once
    with Store.create(tmp_path / "run") as store:
        store.writer.append(lab.begin("a"))
        for k, value in enumerate(parts):
            store.writer.append(lab.reward("a", value, name=f"r{k}"))
            store.writer.sync()
            assert store.summaries()[0].reward is not None  # the index is refreshed while the tape is open
        store.writer.append(lab.end("a"))
        store.writer.sync()
        assert store.tape("a").reward == store.summaries()[0].reward == 1.0
        assert [one.id for one in store.summaries(min_reward=1.0, max_reward=1.0)] == ["a"]


def test_rounded_products_reach_the_limit_and_other_rewards_do_not(tmp_path: Path) -> None:
    almost = 1.0 - 1e-12
    assert evaluate_rewards({"t": [almost, 1.0 - 1e-6]}, k=[1]).pass_at[1].value == 0.5
    with Store.create(tmp_path / "run") as store:
        for name, value in (("a", almost), ("b", 1.0 - 1e-6)):
            for record in (lab.begin(name), lab.reward(name, value), lab.end(name)):
                store.writer.append(record)
        store.writer.sync()
        assert [one.id for one in store.summaries(min_reward=1.0)] == ["a"]
        assert [rate.passed for rate in pass_rates(store.tapes()).values()] == [1, 0]
