"""Tokenizers and templates of vision models without their weights: one picture is one marker, or many tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tapereel.agents.engines.embedded.tiny_model import ALPHABET
from tapereel.agents.vision.vision import Expansion
from tapereel.tapes import Message

TEMPLATES = Path(__file__).parents[1] / "templates"
QWEN = (TEMPLATES / "qwen2_vl.jinja").read_text()
SMOL = (TEMPLATES / "smolvlm.jinja").read_text()
SPECIAL = (
    "<|pad|>",
    "<|unk|>",
    "<|im_start|>",
    "<|im_end|>",
    "<end_of_utterance>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<image>",
    "<row_1_col_1>",
    "<|video_pad|>",
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token a character, and the control tokens of both families."""
    vocab = {token: id for id, token in enumerate([*SPECIAL, *dict.fromkeys(ALPHABET + "\n")])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    end = "<|im_end|>" if template is QWEN else "<end_of_utterance>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token=end,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


class Pads:
    """As Qwen2-VL: one token for 28x28 pixels, all with the marker's id."""

    marker = "<|image_pad|>"
    video_marker = None
    hash = "pads"

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        w, h = math.ceil(width / 28), math.ceil(height / 28)
        return Expansion(array("i", [SPECIAL.index(self.marker)] * (w * h)), (1, 2 * h, 2 * w))


class Films(Pads):
    """As Qwen2.5-VL: a video is one run of tokens, of pairs of frames."""

    video_marker = "<|video_pad|>"
    hash = "films"

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        found = super().expand(width, height)
        pairs = math.ceil(len(times) / 2)
        ids = array("i", [SPECIAL.index(self.video_marker)]) * (pairs * len(found.ids))
        return Expansion(ids, (pairs, *found.grid[1:])) if times else found


class Tiles:
    """As SmolVLM: tokens of rows and columns stand around those that take features."""

    marker = "<image>"
    video_marker = None
    hash = "tiles"

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        tiles = math.ceil(width / 28) * math.ceil(height / 28)
        tile = [SPECIAL.index("<row_1_col_1>"), *[SPECIAL.index(self.marker)] * 3]
        return Expansion(array("i", tile * tiles), (tiles,))


def image(letter: str, width: int = 40, height: int = 30) -> Message:
    return {"type": "image", "media": f"{letter * 64}.png", "width": width, "height": height}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def say(role: str, *parts: str | Message) -> Message:
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": role, "content": parts[0]}
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}
