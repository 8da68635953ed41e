"""Models of 4 bits: what they compute, what is quantised, and how their weights are read back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from tapereel.agents.engines.embedded import load_pretrained, weights_digest
from tapereel.agents.engines.embedded.pretrained import Dtype, load_weights
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.finetune import TrainConfig
from tapereel.finetune.api.estimate import estimate
from tapereel.finetune.trainer import fitted, score
from tapereel.tapes.common import load_config
from tapereel.tapes.errors import UsageError

from ..build import batch
from ..loop.lab import WORDS
from .seen import saved

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **{**SIZES, "num_key_value_heads": 4, **changes}))
    model.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return folder


def adapted(folder: Path) -> Any:
    """A model of 4 bits with adapters that change what it says."""
    made: Any = add_adapters(load_pretrained(folder, quantise=True).model, AdapterConfig(rank=2, alpha=4)).eval()
    torch.manual_seed(1)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return made


@pytest.mark.ledger("F91")
def test_its_log_probs_are_those_of_a_plain_model_with_the_weights_that_the_bits_stand_for(tmp_path: Path):
    """W' + (alpha / rank) B A in each linear layer, where W' is what bitsandbytes makes of the bits."""
    made = adapted(saved_model(tmp_path))
    plain: Any = load_pretrained(tmp_path).model
    rows, _ = batch(model=load_pretrained(tmp_path).model)
    full = score(plain, rows).logprob.detach()
    layers = 0
    for name, module in plain.get_decoder().named_modules():
        if isinstance(module, torch.nn.Linear):
            lora = made.get_base_model().get_decoder().get_submodule(name)
            low = lora.base_layer.weight
            assert isinstance(lora.base_layer, Linear4bit)
            whole = dequantize_4bit(low.data, low.quant_state)
            assert (whole - module.weight).norm() < 0.15 * module.weight.norm(), "NF4 is near the weights"
            module.weight.data = whole + 2.0 * lora.lora_B["default"].weight @ lora.lora_A["default"].weight
            layers += 1
    assert layers == 2 * 7
    ours = score(made, rows).logprob.detach()
    torch.testing.assert_close(ours, score(plain, rows).logprob.detach(), rtol=0, atol=1e-5)
    assert (ours - full).abs().max() > 1e-3


@pytest.mark.ledger("F91")
def test_what_it_takes_is_what_the_estimate_says(tmp_path: Path):
    saved_model(tmp_path, hidden_size=512, intermediate_size=1024, tie_word_embeddings=True)
    load: dict[str, Any] = {"rank": 4}
    found = {}
    for quantise in (None, "nf4"):
        model: Any = add_adapters(
            load_pretrained(tmp_path, quantise=quantise is not None).model, AdapterConfig(**load, quantise=quantise)
        )
        state = {t.data_ptr(): t.nbytes for t in model.state_dict().values()}
        lora = f"trainer.lora={{rank: 4, quantise: {quantise or 'null'}}}"
        made = estimate(fitted(load_config(TrainConfig, None, [f"engine.model={tmp_path}", lora])))
        assert made is not None
        found[quantise] = sum(state.values())
        assert made["GiB"]["weights"] * 2**30 == pytest.approx(found[quantise], rel=0.03, abs=2**20)
        assert made["GiB"]["weights of the engine"] == made["GiB"]["weights"]
    assert found["nf4"] < 0.2 * found[None]


@pytest.mark.ledger("F91")
def test_weights_are_read_back_and_those_of_another_model_are_refused(tmp_path: Path):
    one, other = saved_model(tmp_path / "one"), saved_model(tmp_path / "other", seed=1)
    made, fresh = adapted(one), load_pretrained(one, quantise=True).model
    fresh = add_adapters(fresh, AdapterConfig(rank=2, alpha=4), seed=5)
    weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    assert weights_digest(fresh.state_dict()) != weights_digest(weights)
    load_weights(fresh, weights)
    assert weights_digest(fresh.state_dict()) == weights_digest(weights)
    with pytest.raises(UsageError, match=r"quant_state"):  # of another mean of the scales
        load_weights(add_adapters(load_pretrained(other, quantise=True).model, AdapterConfig(rank=2)), weights)
    with pytest.raises(UsageError, match=r"\bfit\b"):
        load_weights(load_pretrained(one).model, weights)


@pytest.mark.ledger("F91")
def test_a_vision_tower_and_the_output_layer_keep_their_bits(tmp_path: Path):
    found = load_pretrained(saved(tmp_path), quantise=True)
    model: Any = found.model
    low = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    body = {name for name, module in model.named_modules() if module in set(model.get_decoder().modules())}
    assert low
    assert low < body
    assert found.vision is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        ("self_attn.q_proj", {"hidden_size": 96}),
        ("mlp.down_proj", {"intermediate_size": 48}),
        ("mlp.down_proj", {"intermediate_size": 160}),
        ("mlp.down_proj", {"intermediate_size": 100}),
        ("mlp.down_proj", {"intermediate_size": 192}),
    ],
)
def test_a_layer_whose_bits_are_read_back_wrong_is_refused(
    tmp_path: Path, layer: str, sizes: dict[str, int], dtype: Dtype
) -> None:
    """As bitsandbytes 0.50 reads widths of 48, 96 and 160 on a CPU. The weights are the judge here, not their bits."""
    name = f"model.layers.0.{layer}"
    weight: Any = load_pretrained(saved_model(tmp_path, **sizes), dtype=dtype).model.get_submodule(name).weight.data
    error = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True)) - weight
    wrong = error.norm() > 0.15 * weight.norm()
    made = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    made.save_pretrained(tmp_path / "stored")  # with bits and scales
    WORDS.save_pretrained(tmp_path / "stored")
    for folder in (tmp_path, tmp_path / "stored"):
        with pytest.raises(UsageError, match=rf"for {name} .* {weight.shape[1]} inputs") if wrong else nullcontext():
            load_pretrained(folder, quantise=folder == tmp_path, dtype=dtype)
