"""The character-level tokenizer and the tiny model: sizes, determinism, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import ALPHABET, SPECIAL, tiny_model


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = char_tokenizer()
    assert len(tokenizer) == len(SPECIAL) + len(ALPHABET) == 104
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False)
    assert ids == list(range(len(SPECIAL), 104))
    assert tokenizer.decode(ids) == ALPHABET
    assert tokenizer.decode(tokenizer.encode("a .  ,b n't")) == "a .  ,b n't"
    assert tokenizer.encode("é🙂") == [1, 1]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 6)
    assert char_tokenizer("0123456789+0").encode("10+") == [8, 7, 17]


def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "1 + 2 . <|end|>?"}, {"role": "assistant", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"properties": {}}}}]
    for kwargs in ({}, {"tools": tools}, {"add_generation_prompt": True}):
        assert loaded.apply_chat_template(
            messages, tokenize=True, return_dict=False, **kwargs
        ) == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
    assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("size", "parameters"), [("micro", 23_968), ("tiny", 101_184), ("small", 342_432), ("base", 768_128)]
)
def test_models_have_the_promised_size(size: str, parameters: int) -> None:
    model = tiny_model(char_tokenizer(), size)  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) == parameters < 1_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert not model.training


def test_a_seed_decides_the_weights_and_leaves_the_callers_randomness_alone() -> None:
    tokenizer = char_tokenizer()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (tiny_model(tokenizer, "micro", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_model_loads_and_gives_the_same_logits(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    model = tiny_model(tokenizer, "micro", seed=3, context=64)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer.encode("<|user|>1+2<|end|><|assistant|>")])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert loaded.config.max_position_embeddings == 64
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (6, 0)


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"size='huge'.*micro, tiny, small, base"):
        tiny_model(char_tokenizer(), "huge")  # type: ignore[arg-type]
