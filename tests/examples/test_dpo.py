"""The recipe of `examples/dpo.py` against the closed formula of the paper."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tapereel.finetune import Recipe
from tapereel.finetune.data import BadBatch
from tapereel.finetune.objective import read
from tapereel.finetune.recipes import get_recipe

from ..finetune.build import episode, gradient, row, same, tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dpo.py"


@pytest.fixture(scope="module")
def dpo() -> Iterator[Recipe]:
    """The example is imported as a user's module, and its name is free again for other tests."""
    yield get_recipe(f"{EXAMPLE}:dpo")
    sys.modules.pop(EXAMPLE.stem, None)


def pairs(turns: list[tuple[int, ...]], rewards: list[float]):
    """Answers 0 and 1 are a pair, and so are 2 and 3."""
    rng = np.random.default_rng(1)
    rows = [row(f"t{i}", f"g{i // 2}", turns=lengths, rng=rng) for i, lengths in enumerate(turns)]
    # Authored text has no log-prob at sampling.
    rows = [dataclasses.replace(r, old=np.full(len(r.own), np.nan, np.float32)) for r in rows]
    return rows, [episode(r.tape, r.group, reward=x) for r, x in zip(rows, rewards, strict=True)]


@pytest.mark.parametrize("micro_tokens", [2048, 20])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 1.0], [0.25, 0.5, 3.0, -1.0]])
def test_the_loss_and_its_gradient_are_the_formula(dpo: Recipe, micro_tokens: int, rewards: list[float]):
    model, reference = tiny_model(), tiny_model(seed=1)
    rows, episodes = pairs([(3,), (1, 2), (4,), (2,)], rewards)
    recipe = dpo.but(surrogate={"beta": 0.7})
    found = gradient(model, recipe, rows, episodes, micro_tokens=micro_tokens, reference=reference)

    def answer(i: int) -> torch.Tensor:
        """log pi(answer) - log ref(answer)."""
        ids, own = torch.from_numpy(rows[i].input_ids).long(), torch.from_numpy(rows[i].own).long()
        lp, ref = (
            one(input_ids=ids[None]).logits[0].log_softmax(-1)[own - 1].gather(1, ids[own, None]).sum()
            for one in (model, reference)
        )
        return lp - ref.detach()

    by_hand = torch.zeros((), dtype=torch.float64)
    for first in (0, 2):
        chosen, rejected = (first, first + 1) if rewards[first] > rewards[first + 1] else (first + 1, first)
        by_hand = by_hand + torch.log1p(torch.exp(-0.7 * (answer(chosen) - answer(rejected)))) / 2
    by_hand.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same(found, (by_hand.item(), grads), 1e-6)


def test_at_the_reference_the_loss_is_log_2(dpo: Recipe):
    model = tiny_model()
    loss, grads = gradient(model, dpo, *pairs([(3,), (2,)], [1.0, 0.0]), reference=tiny_model())
    assert loss == pytest.approx(math.log(2))
    assert any(bool(g.any()) for g in grads.values())


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [1.0, 0.0, 0.5]], ids=["a tie", "a group of one"])
def test_what_is_no_pair_is_refused(dpo: Recipe, rewards: list[float]):
    with pytest.raises(BadBatch):
        gradient(tiny_model(), dpo, *pairs([(2,)] * len(rewards), rewards), reference=tiny_model())


def test_the_recipe_is_read_from_its_record(dpo: Recipe):
    assert dpo.model_dump()["surrogate"] == {"beta": 0.1, "kind": "dpo:DPO"}
    assert read(dpo.model_dump()) == dpo
