"""A weight with two names is copied and stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import char_tokenizer, weights_digest
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.finetune.trainer import copied_weights, save_checkpoint
from tapereel.finetune.trainer.checkpoint import BadCheckpoint, read_checkpoint


def test_a_tied_weight_is_copied_once():
    model: Any = tiny_model(char_tokenizer(), "micro")
    copied = copied_weights(model)
    assert copied["lm_head.weight"] is copied["model.embed_tokens.weight"]
    assert copied["lm_head.weight"].data_ptr() != model.lm_head.weight.data_ptr()


def test_a_checkpoint_has_each_weight_once(tmp_path: Path):
    """In Hugging Face format. The name that this format leaves out comes back."""
    model: Any = tiny_model(char_tokenizer(), "micro")
    made = save_checkpoint(tmp_path, model, {}, {}, update=1)
    assert not (made.path / "policy.pt").exists()
    assert made.state["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    size = sum(p.nbytes for p in model.parameters())
    assert size < sum(file.stat().st_size for file in made.path.rglob("*") if file.suffix != ".json") < 1.1 * size
    found = read_checkpoint(made.path).weights()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    file = made.path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"1234")
    with pytest.raises(BadCheckpoint, match=weights_digest(model.state_dict())):
        read_checkpoint(made.path).weights()
    file.unlink()
    with pytest.raises(BadCheckpoint, match="lacks a weight"):
        read_checkpoint(made.path).weights()


def test_weights_that_the_format_lacks_are_beside_it(tmp_path: Path):
    """As the frozen ones below adapters. A checkpoint of an earlier version has all of them there."""
    model: Any = add_adapters(tiny_model(char_tokenizer(), "micro"), AdapterConfig(rank=2))
    made = save_checkpoint(tmp_path, model, {}, {}, update=1)
    assert "tied" not in made.state
    found = made.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    plain: Any = tiny_model(char_tokenizer(), "micro")
    earlier = save_checkpoint(tmp_path, plain, {}, {}, update=2)
    torch.save(plain.state_dict(), earlier.path / "policy.pt")
    (earlier.path / "hf" / "model.safetensors").unlink()
    assert weights_digest(earlier.weights()) == earlier.state["digest"]
