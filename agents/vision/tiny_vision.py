"""Vision models small enough for a test, with a byte-level tokenizer, a chat template and an image processor.

The models are untrained, need no download, and are saved in the same format as any other model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from ...tapes.errors import MissingExtra

TinyFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"]

ROLES = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Special tokens with the ids 256 to 261, after the ids of the 256 bytes. `<|end|>` ends every message."""
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{% set f = tool['function'] or tool %}{{ f['name'] }}("
    "{{ f['parameters']['properties'] | join(', ') }}): {{ f['description'] }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] or () %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if 'tool_calls' in m %}{% for call in m['tool_calls'] or () %}{% set f = call['function'] or call %}"
    '<tool_call>{"name": {{ f[\'name\'] | tojson }}, "arguments": '
    "{{ f['arguments'] if f['arguments'] is string else f['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_vision(
    folder: str | Path, family: TinyFamily = "qwen2_vl", *, seed: int = 0, context: int = 2048
) -> None:
    """Save an untrained float32 model of about 0.3 M parameters, its tokenizer and its image processor to `folder`.

    Equal arguments give equal models. For Qwen, a square of 8x8 pixels takes one token, and a picture takes 4 to 256.
    For Idefics3 and SmolVLM, a picture takes about 20 tokens, or 40 if its shorter side is more than half as long as
    the longer one. `context` is the maximum number of tokens in a sequence.
    """
    try:
        import torch
        import transformers
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "the tiny vision model") from None
    tiled = family in ("idefics3", "smolvlm")
    control = (*ROLES, *(("<image>", "<fake_token_around_image>", "<global-img>", *_TILES) if tiled else _QWEN))
    id = {name: i for i, name in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *control])}
    backend = Tokenizer(models.BPE(vocab=id, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    picture = "<image>" if tiled else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", picture)
    if not tiled:
        video = "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text']"
        tokenizer.chat_template = tokenizer.chat_template.replace("{% else %}{{ part['text']", video)
    ends = {"bos_token_id": None, "eos_token_id": id["<|end|>"], "pad_token_id": id["<|pad|>"]}
    # The head size is 32 because vLLM on a CPU supports neither 16 nor 24. With the usual range of 0.02, models this
    # narrow would spend their first hundred updates on growing their weights.
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "initializer_range": 0.1}
    text: dict[str, Any] = {**shape, **ends, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"vocab_size": len(id), "max_position_embeddings": context, "tie_word_embeddings": True}
    vision: dict[str, Any] = {**shape, "patch_size": 4}
    if tiled:
        text["model_type"] = "llama"
        vision |= {"image_size": 16, "num_hidden_layers": 2}
        more = {"image_token_id": id["<image>"], "scale_factor": 2}
        kind = "Idefics3ImageProcessorPil" if family == "idefics3" else "SmolVLMImageProcessorPil"
        settings = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    else:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
        # transformers always interleaves mrope. vLLM does so only if the configuration says so, as real checkpoints do.
        text["rope_parameters"] |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
        vision |= {"depth": 2, "num_heads": 2, "embed_dim": 64, "out_hidden_size": 64, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "window_size": 32}
        more = {f"{name}_token_id": id[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
        more |= {f"{name}_token_id": id[f"<|{name}_pad|>"] for name in ("image", "video")}
        kind = "Qwen2VLImageProcessorPil"
        settings = {"patch_size": 4, "size": {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}}
    parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model(family, **parts, **more)
    # fork_rng restores the global generator, so a new model doesn't change the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.generation_config.update(**ends)
    for part in (model, tokenizer, getattr(transformers, kind)(**settings)):
        part.save_pretrained(str(folder))
    if tiled:
        about = {"processor_class": kind.replace("ImageProcessorPil", "Processor"), "image_seq_len": 4}
        (Path(folder) / "processor_config.json").write_text(json.dumps(about), encoding="utf-8")
    if family == "qwen3_vl":  # as in the originals, other families use the image settings for videos
        about = {"video_processor_type": "Qwen3VLVideoProcessor", **settings}
        (Path(folder) / "video_preprocessor_config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
