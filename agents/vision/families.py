"""The families of vision models that are served and trained, by the model type in a folder's config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .family import UnsupportedVision
from .idefics import TiledVision
from .qwen_vl import QwenVision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QwenVision),
    **dict.fromkeys(("idefics3", "smolvlm"), TiledVision),
}
"""Model type -> its implementation of `Vision`."""
_SENSES = re.compile(r"(vision|image|video|audio|speech|vq).*_config$")


def family_of(config: PreTrainedConfig, folder: Path) -> type[QwenVision | TiledVision] | None:
    """The family of a model's configuration; None for a model of text. UnsupportedVision names the folder.

    transformers has classes of text alone for many models with a tower, and loads them without a word.
    """
    kind = config.model_type
    parts = {key for key in vars(config) if _SENSES.search(key) and getattr(config, key) is not None}
    if config.get_text_config() is not config:  # a nested configuration of text: something else is beside it
        parts |= set(config.sub_configs)
    if parts and kind not in FAMILIES:
        raise UnsupportedVision(
            f"the model in {folder} is of the type {kind!r} and has parts beside the text: {', '.join(sorted(parts))}. "
            f"Models with such parts are loaded of these families: {', '.join(sorted(FAMILIES))}. Name a model of one "
            "of them, or of text alone"
        )
    return FAMILIES.get(kind)
