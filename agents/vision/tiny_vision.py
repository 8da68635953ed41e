"""Vision models small enough for a test: byte-level tokenizer, chat template, image processor, untrained transformer.

Made without a download, and saved as any other model's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ...tapes.errors import MissingExtra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TinyFamily = Literal["qwen2_vl"]

ROLES = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Ids 256 to 261, behind the 256 bytes. `<|end|>` ends every message."""
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{% set f = tool['function'] or tool %}{{ f['name'] }}("
    "{{ f['parameters']['properties'] | join(', ') }}): {{ f['description'] }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] or () %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if 'tool_calls' in m %}{% for call in m['tool_calls'] or () %}{% set f = call['function'] or call %}"
    "{{ f['name'] }} {{ f['arguments'] if f['arguments'] is string else f['arguments'] | tojson }}"
    "{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(control: tuple[str, ...], picture: str) -> PreTrainedTokenizerFast:
    """A token per byte, then the roles, then `control`. picture: what the chat template writes for a picture."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "train", "the byte-level tokenizer") from None
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *ROLES, *control]
    backend = Tokenizer(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*ROLES, *control)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.replace("IMAGE", picture),
    )


def save_tiny_vision(
    folder: str | Path, family: TinyFamily = "qwen2_vl", *, seed: int = 0, context: int = 2048
) -> None:
    """Save an untrained float32 model of about 0.3 M parameters, its tokenizer and its image processor to `folder`.

    Equal arguments give equal models. A picture of 16x16 pixels or less takes 4 tokens, and 8x8 pixels one; 128x128 and
    more takes 256. `context`: the longest sequence, in tokens.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "the tiny vision model") from None
    tokenizer = byte_tokenizer(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
    id = cast("dict[str, int]", tokenizer.get_vocab())
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # head size 32: vLLM's attention on a CPU knows neither 16 nor 24
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": id["<|end|>"],
        "pad_token_id": id["<|pad|>"],
        # With the usual 0.02, models of this width spend their first hundred updates on larger weights.
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.1,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=id["<|image_pad|>"],
        video_token_id=id["<|video_pad|>"],
        vision_start_token_id=id["<|vision_start|>"],
        vision_end_token_id=id["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    )
    # fork_rng restores the global generator, so a new model doesn't change the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = id["<|end|>"], id["<|pad|>"]
    for part in (model, tokenizer, processor):
        part.save_pretrained(str(folder))
