"""The stream: slices, turns and the ids of every token."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tapereel.finetune import Stream, Trainer
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe

from ..build import episode, exact, ledger, row, tiny_model


@pytest.mark.ledger("F04")
def test_the_rows_of_a_stream_are_slices_of_it():
    case = ledger("rows")["F04"]
    rows = [row(f"t{i}", turns=(n,)) for i, n in enumerate(case["lens"])]
    stream = exact(rows, [episode(r.tape) for r in rows])
    values = torch.tensor(case["values"])
    assert [values[a:b].tolist() for a, b in itertools.pairwise(stream.rows.tolist())] == case["expected"]


def test_an_episode_without_tokens_has_its_turn_and_one_without_turn_rewards_earned_at_its_last():
    episodes = [episode("a", reward=2.0), episode("b", reward=3.0), episode("c", reward=4.0, turn_rewards=[])]
    stream = Stream.of([row("b", turns=(1, 1))], episodes)
    assert stream.turns.reward.tolist() == pytest.approx([2.0, float("nan"), 3.0, 4.0], nan_ok=True)
    assert stream.turns.episode.tolist() == [0, 1, 1, 2]
    empty = Stream.of([], episodes)
    assert len(empty) == 0
    recipe = get_recipe("ppo", {"credit": {"kind": "returns"}})
    assert objective.prepare(recipe, empty, Context()).advantage.shape == (0,)
    assert Trainer(tiny_model(), get_recipe("grpo")).update([], episodes).skipped == "nothing to train on"


@pytest.mark.ledger("X7", "F01")
def test_every_token_knows_its_policy_version_call_and_agent():
    rows = [
        dataclasses.replace(
            row("a", turns=(2, 1), calls=["c1", "c2"]),
            versions=("run:3", "run:4"),
            version=np.array([0, 1, 1], np.int32),
            agents=("planner", "planner/searcher"),
        ),
        dataclasses.replace(row("b", turns=(1,), calls=["c1"]), version=np.array([-1], np.int32)),
    ]
    stream = Stream.of(rows, [episode("a"), episode("b", reward=None)])
    assert [stream.versions[v] if v >= 0 else None for v in stream.version] == ["run:3", "run:4", "run:4", None]
    assert [stream.calls[c] for c in stream.call] == [("a", "c1"), ("a", "c1"), ("a", "c2"), ("b", "c1")]
    assert [stream.agents[a] for a in stream.agent] == ["planner", "planner", "planner/searcher", "player"]
    assert stream.token.tolist() == [int(t) for r in rows for t in r.input_ids[r.own]]
    assert stream.episodes.reward.isnan().tolist() == [False, True]


def test_an_answer_that_the_first_token_of_the_batch_follows_is_not_the_last():
    late, early = row("a", turns=(1,), first_turn=1), row("a", turns=(1,))
    stream = Stream.of([late, early], [episode("a")])
    assert stream.following.tolist() == [-1, 0]
    assert stream.ends.tolist() == [False, True]
