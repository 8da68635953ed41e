"""A tiny GGUF file with random weights of 4 bits and a chat template, in the layout of SmolLM2's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, FEED, LAYERS = 64, 2, 96, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny_gguf(file: Path, seed: int = 0, lacking: str = "") -> None:
    """Write the file, without the tensor named `lacking`."""
    made, draw = gguf.GGUFWriter(file, "llama"), np.random.default_rng(seed)
    # GPT-2 spells a byte that can't be printed as a character above 255.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    spelled = [*map(chr, plain), *(chr(256 + k) for k in range(len(others)))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *spelled, "he"]
    made.add_name("tiny")
    made.add_vocab_size(len(tokens))
    made.add_context_length(256)
    made.add_embedding_length(WIDTH)
    made.add_block_count(LAYERS)
    made.add_feed_forward_length(FEED)
    made.add_head_count(HEADS)
    made.add_head_count_kv(HEADS)
    made.add_rope_dimension_count(WIDTH // HEADS)
    made.add_rope_freq_base(10_000.0)
    made.add_layer_norm_rms_eps(1e-5)
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("default")
    made.add_token_list(tokens)
    made.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    made.add_token_merges(["h e"])
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_pad_token_id(2)
    made.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = draw.normal(1.0 if len(shape) == 1 else 0.0, 0.1, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        if name != lacking:
            made.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), WIDTH)
    for k in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{k}.{part}.weight", WIDTH, WIDTH)
        for part in ("ffn_gate", "ffn_up"):
            add(f"blk.{k}.{part}.weight", FEED, WIDTH)
        add(f"blk.{k}.ffn_down.weight", WIDTH, FEED)
        for part in ("attn_norm", "ffn_norm"):
            add(f"blk.{k}.{part}.weight", WIDTH)
    add("output_norm.weight", WIDTH)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
