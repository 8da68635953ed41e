"""The output layer: what it keeps in memory over a whole update, measured; and its product in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tapereel.finetune import OptimiserConfig, Trainer
from tapereel.finetune.objective import Score
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import forward, plan, score
from tapereel.finetune.trainer import lm_head as head

from ..build import batch, episode, gradient, row, same, tiny_model

VOCABULARY = 6_000
TOKENS = 240
LOGITS = TOKENS * VOCABULARY * 4
"""Bytes of one (tokens x vocabulary) tensor in float32."""


def peak(work: Any) -> int:
    """Bytes alive at once, at most, of those allocated by torch while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    alive = most = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@pytest.mark.ledger("F19", "T51")
@pytest.mark.parametrize("bonus", [0.0, 0.1])
def test_an_update_never_holds_the_logits_of_its_tokens(bonus, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 8 * VOCABULARY)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    model = tiny_model(torch.float32, vocab_size=VOCABULARY, max_position_embeddings=512)
    rows = [row(f"t{i}", turns=(TOKENS // 4,)) for i in range(4)]
    episodes = [episode(r.tape, r.group, reward=float(i)) for i, r in enumerate(rows)]
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "entropy", "coefficient": bonus}]})
    trainer = Trainer(model, recipe, OptimiserConfig(lr=1e-3))
    trainer.update(rows, episodes)
    ours = peak(lambda: trainer.update(rows, episodes))

    def plain():
        (micro,) = plan(rows)
        logits = model(input_ids=micro.ids, use_cache=False).logits.flatten(0, 1)[micro.at]
        torch.nn.functional.cross_entropy(logits, micro.token).backward()

    assert peak(plain) > 2 * LOGITS, "the measurement sees what is there to be seen"
    assert ours < LOGITS / 2


def test_a_product_in_float32_is_exact_where_the_weights_are_narrow():
    model = tiny_model(torch.bfloat16)
    rows, episodes = batch()
    (micro,) = plan(rows)
    with torch.no_grad():
        hidden = model.model(input_ids=micro.ids).last_hidden_state.flatten(0, 1)[micro.at].double()
        lsm = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)
        want = lsm.gather(1, micro.token[:, None])[:, 0]
        narrow, wide = (forward(model, micro, Score(head=head)).logprob for head in ("weights", "float32"))
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), want, rtol=0, atol=2e-6)
    assert (narrow - want).abs().max() > 1e-3
    torch.testing.assert_close(score(model, rows, Score(head="float32")).logprob[micro.index], wide)
    recipe = get_recipe("sft", {"score": {"head": "float32"}})
    loss, grads = gradient(model, recipe, rows, episodes)
    assert loss == pytest.approx(-float(want.mean()), abs=2e-6)
    assert grads["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert loss != gradient(model, get_recipe("sft"), rows, episodes)[0]


def test_where_the_weights_are_wide_already_the_option_changes_nothing():
    model = tiny_model()
    rows, episodes = batch(model=model)
    wide = get_recipe("grpo", {"score": {"head": "float32"}})
    same(gradient(model, wide, rows, episodes), gradient(model, get_recipe("grpo"), rows, episodes), rtol=0)
