"""Which models the slot cache takes, and that it computes what the plain forward computes."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tapereel.agents import EmbeddedEngine
from tapereel.agents.engines.embedded import SlotDecoder
from tapereel.agents.engines.embedded.kv_cache import UnsupportedModel

from ...embedded_lab import FAMILIES, SHAPE, VOCABULARY, decoder, plain_logits, prompt_of

torch.set_num_threads(1)


def build(name: str, **config: Any) -> Any:
    """An untrained model of a family of transformers."""
    return hf.AutoModelForCausalLM.from_config(getattr(hf, f"{name}Config")(**{**SHAPE, **config}))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", {"attn_implementation": "eager"}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("Mistral", {"sliding_window": None}),
        ("Gemma", {"head_dim": 8}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Qwen3Moe", {"head_dim": 8}),
    ],
)
def test_full_attention_decoders_are_taken(name: str, config: dict[str, Any]) -> None:
    model = build(name, **config)
    prompt = prompt_of(0, 11)
    slots = SlotDecoder(model, slots=2, capacity=16)
    logits = slots.extend(1, np.array([list(prompt)]), np.array([0]), np.array([11]))
    exact = plain_logits(model, prompt, [2])
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("Mistral", {"sliding_window": 8}, r"window.*\b8\b"),
        ("Gemma2", {"head_dim": 8}, "sliding_attention"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
        ("Qwen3Next", {"head_dim": 8}, "recurrent"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary"),
    ],
)
def test_other_attention_is_refused(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        SlotDecoder(build(name, **config), slots=2, capacity=16)


def test_a_model_that_sees_pictures_is_refused() -> None:
    config = hf.Qwen2VLConfig(
        text_config={
            **SHAPE,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    )
    for special in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, special, 3)
    with pytest.raises(UnsupportedModel, match="vision_config"):
        SlotDecoder(hf.Qwen2VLForConditionalGeneration(config), slots=2, capacity=16)


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(vocab_size=VOCABULARY, d_model=32, num_layers=1, num_heads=2, d_kv=8, d_ff=32)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        SlotDecoder(hf.T5ForConditionalGeneration(config), slots=2, capacity=16)


class Maskless(hf.LlamaForCausalLM):
    """Ignores the mask it is given: what a new attention implementation may do without saying so."""

    def forward(self, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Everybody sees everything that the cache shows."""
        seen = None if attention_mask is None else torch.zeros_like(attention_mask)
        return super().forward(attention_mask=seen, **kwargs)


class Fussy(hf.LlamaForCausalLM):
    """Takes 2-D masks only."""

    def forward(self, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As a Llama, for some."""
        if attention_mask is not None:
            _rows, _columns = attention_mask.shape
        return super().forward(attention_mask=attention_mask, **kwargs)


def test_what_the_configuration_doesn_t_say_is_tried() -> None:
    with pytest.raises(UnsupportedModel, match="tolerance"):
        SlotDecoder(Maskless(decoder().config), slots=2, capacity=16)
    with pytest.raises(UnsupportedModel, match="ValueError"):
        SlotDecoder(Fussy(decoder().config), slots=2, capacity=16)


@pytest.mark.parametrize(("slots", "capacity"), [(0, 16), (2, 1), (2, 193)])
def test_sizes_that_make_no_sense_are_refused(slots: int, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"slots={slots}, capacity={capacity}"):
        SlotDecoder(decoder(), slots, capacity)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_extension_moving_and_parking_keep_the_logits(family: str) -> None:
    model = decoder(family)
    slots = SlotDecoder(model, slots=4, capacity=24)
    texts = [prompt_of(n, length) for n, length in enumerate((24, 9, 16))]
    pieces = [(7, 20), (3, 8), (12, 13)]  # what is fed first, and up to where then; one token more at last

    def feed(order: list[int], spans: list[tuple[int, int]]) -> torch.Tensor:
        new = np.array([b - a for a, b in spans])
        ids = np.full((len(order), int(new.max())), 3)
        for row, (text, (a, b)) in enumerate(zip(order, spans, strict=True)):
            ids[row, ids.shape[1] - (b - a) :] = texts[text][a:b]
        return slots.extend(1, ids, np.array([a for a, _ in spans]), new)

    def check(logits: torch.Tensor, order: list[int], ends: list[int]) -> None:
        for row, (text, end) in enumerate(zip(order, ends, strict=True)):
            exact = plain_logits(model, texts[text][:end], [2])
            torch.testing.assert_close(logits[row : row + 1], exact, rtol=1e-4, atol=1e-5)

    check(feed([0, 1, 2], [(0, a) for a, _ in pieces]), [0, 1, 2], [a for a, _ in pieces])
    check(feed([0, 1, 2], pieces), [0, 1, 2], [b for _, b in pieces])
    parked = slots.park(1, 20)
    slots.move(3, 1, 13)
    check(feed([2, 1], [(13, 14), (8, 9)]), [2, 1], [14, 9])
    slots.wipe(2)
    slots.restore(2, parked, 20)
    check(feed([2, 0], [(9, 16), (20, 24)]), [2, 0], [16, 24])  # full to the last position, beside padding


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from Linux")
def test_slots_take_memory_as_they_are_filled() -> None:
    model = build("Llama", max_position_embeddings=1 << 17)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    slots = SlotDecoder(model, slots=16, capacity=(1 << 17) - 1)
    assert slots._cache.kv.nbytes > 1 << 27
    assert resident() - before < slots._cache.kv.nbytes / 8
    slots._cache.kv[:, 0] = 1.0
    assert resident() - before > slots._cache.kv.nbytes / 20, "which this test can see"


def test_a_closed_engine_keeps_no_weights() -> None:
    """Even if it is part of a cycle of references, and no collection comes."""
    engine = EmbeddedEngine(build("Llama"), None, version="r:0", slots=2, capacity=16)
    weight = weakref.ref(engine._decoder.model.get_input_embeddings().weight)
    gc.disable()
    try:
        asyncio.run(engine.close())
        assert weight() is None
    finally:
        gc.enable()
