"""The shape of a model, read from its `config.json` and the headers of its weights. Doesn't import torch."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

from ..engines.embedded.pretrained import ADAPTERS

OTHERS = ("__metadata__", "lm_head.", "model.embed_tokens.")
"""Beginnings of the names in a file of weights that aren't of the body."""


class Shape(NamedTuple):
    """A decoder with gated feed-forward layers, as Llama and Qwen. `body`: weights besides embeddings and output layer;
    `parameters`: all weights, tied ones once; `queries`, `keys`: heads x head size; `feed`: feed-forward width of one
    token; `context`: positions, None: unknown."""

    body: int
    parameters: int
    layers: int
    width: int
    heads: int
    queries: int
    keys: int
    feed: int
    vocabulary: int
    context: int | None


def shape_of(folder: Path) -> Shape | None:
    """The shape of the model in `folder`, or of the model below its adapters; None where its files don't say it."""
    try:
        if (folder / ADAPTERS).is_file():
            folder = Path(json.loads((folder / ADAPTERS).read_text(encoding="utf-8"))["base_model_name_or_path"])
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width, layers, heads = about["hidden_size"], about["num_hidden_layers"], about["num_attention_heads"]
        size, experts = about.get("head_dim") or width // heads, about.get("num_experts_per_tok")
        queries, keys = size * heads, size * (about.get("num_key_value_heads") or heads)
        feed = about["moe_intermediate_size"] * experts if experts else about["intermediate_size"]
        tables = about["vocab_size"] * width * (1 if about.get("tie_word_embeddings", True) else 2)
        body = layers * (2 * width * (queries + keys) + 3 * width * feed + 2 * width) + width
        tensors = {}
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                tensors |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
        if tensors:
            others = (one["shape"] for name, one in tensors.items() if not name.startswith(OTHERS))
            body = sum(map(prod, others))
        context = about.get("max_position_embeddings")
        return Shape(body, body + tables, layers, width, heads, queries, keys, feed, about["vocab_size"], context)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None  # the load of the model says what is wrong with it
