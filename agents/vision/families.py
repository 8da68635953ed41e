"""The families of vision models that are served and trained, by the model type in a folder's config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.errors import UsageError
from .idefics import TiledVision
from .qwen_vl import QwenVision
from .vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

FAMILIES: dict[str, type[QwenVision | TiledVision]] = {
    "idefics3": TiledVision,
    "qwen2_5_vl": QwenVision,
    "qwen2_vl": QwenVision,
    "qwen3_vl": QwenVision,
    "smolvlm": TiledVision,
}
"""Model type -> its implementation of `Vision`."""


_SENSES = re.compile(r"(vision|image|video|audio|speech|vq).*_config$")


class UnknownFamily(UsageError):
    """A model reads more than text, and its family is not one of `FAMILIES`."""


def family_of(config: PreTrainedConfig, folder: Path) -> str | None:
    """The family of a transformers configuration; None for a model of text. UnknownFamily names the folder.

    transformers has classes of text alone for many models with a tower, and loads them without a word.
    """
    kind = config.model_type
    if kind in FAMILIES:
        return kind
    parts = {key for key in vars(config) if _SENSES.search(key) and getattr(config, key) is not None}
    if config.get_text_config() is not config:  # a nested configuration of text: something else is beside it
        parts |= set(config.sub_configs)
    if parts:
        raise UnknownFamily(
            f"the model in {folder} is of the type {kind!r} and has parts beside the text: {', '.join(sorted(parts))}. "
            f"Models with such parts are loaded of these families: {', '.join(sorted(FAMILIES))}. Name a model of one "
            "of them, or of text alone"
        )
    return None


def load_vision(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Vision:
    """The `Vision` of a model of a known family. folder: the one with its image processor. Raises BadProcessor."""
    return FAMILIES[config.model_type](config, tokenizer, folder)
