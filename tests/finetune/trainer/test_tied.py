"""A weight with two names is copied once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
from tapereel.finetune.trainer.checkpoint import ModelWeights, copied_weights


def test_a_tied_weight_is_copied_and_stored_once(tmp_path: Path):
    model: Any = tiny_model(char_tokenizer(), "micro")
    copied = copied_weights(model)
    assert copied["lm_head.weight"] is copied["model.embed_tokens.weight"]
    assert copied["lm_head.weight"].data_ptr() != model.lm_head.weight.data_ptr()
    ModelWeights(model).save(tmp_path)
    size = sum(p.nbytes for p in model.parameters())
    assert size < (tmp_path / "policy.pt").stat().st_size < size + model.lm_head.weight.nbytes
