"""The settings of an engine, as far as they are read from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from tapereel.agents.engines.embedded import char_tokenizer, load_pretrained
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.setup import RendererConfig


def test_end_tokens_also_come_from_the_models_generation_config(tmp_path: Path) -> None:
    """GLM ends an answer with `<|user|>` or `<|observation|>`, which only this file says."""
    words = char_tokenizer("ab")
    tiny_model(words, "micro").save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    alone = RendererConfig().load(tmp_path).end_ids
    about = tmp_path / "generation_config.json"
    settings = json.loads(about.read_bytes())
    user = words.convert_tokens_to_ids("<|user|>")
    about.write_text(json.dumps({**settings, "eos_token_id": [settings["eos_token_id"], user, 10**6]}))
    assert RendererConfig().load(tmp_path).end_ids == (*alone, user)
    found = load_pretrained(tmp_path)
    assert RendererConfig().make(found.tokenizer, found.vision, found.ends).end_ids == (*alone, user)
