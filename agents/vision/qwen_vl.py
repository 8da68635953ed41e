"""Qwen2-VL: a picture is a grid of features, with rotary positions on three axes (time, height, width)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.places import Place
from .image_processor import load_processor, processed, processor_hash
from .vision import Expansion, Pixels, whole_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

PROCESSORS = ("Qwen2VLImageProcessorPil",)


class QwenVision:
    """Qwen2-VL with the settings of one model. Implements `Vision`."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """config: the model's; folder: the one with the image processor. Raises BadProcessor."""
        model, self.processor = cast(Any, config), load_processor(folder, PROCESSORS)
        self.hash = processor_hash(self.processor)
        self._id: int = model.image_token_id
        self.marker = cast(str, tokenizer.convert_ids_to_tokens(self._id))
        settings: Any = self.processor
        self._patch: int = settings.patch_size
        self._merge: int = settings.merge_size
        self._pixels: tuple[int, int] = (settings.size["shortest_edge"], settings.size["longest_edge"])

    def expand(self, width: int, height: int) -> Expansion:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        resized = smart_resize(height, width, self._patch * self._merge, *self._pixels)
        grid = (1, resized[0] // self._patch, resized[1] // self._patch)
        return Expansion(array("i", [self._id]) * self._count(grid), grid)

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        return np.ones(place.length, dtype=np.bool_)

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        found = np.empty((3, length), dtype=np.int64)
        index = following = 0
        for place in places:
            self._write_text(found, index, place.offset, following)
            following += place.offset - index
            time, height, width = self._merged(place.grid)
            axes = np.indices((time, height, width)).reshape(3, -1)
            found[:, place.offset : place.end] = following + axes
            index, following = place.end, following + max(time, height, width)
        self._write_text(found, index, length, following)
        return found

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        made = processed(self.processor, place, [file(place.media[0])])
        grid = tuple(made["image_grid_thw"][0].tolist())
        if grid != place.grid or self._count(grid) != place.length:
            raise ValueError(
                f"the picture {place.media[0]} has the grid {grid} and takes {self._count(grid)} tokens; the prompt "
                f"has the grid {place.grid} and {place.length} tokens: it was made with another image processor"
            )
        return Pixels(made, place.length, int(made["pixel_values"].shape[0]))

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        import torch

        base: Any = whole_model(model)
        arguments = {
            name: torch.cat([one.tensors[name] for one in pixels]).to(base.device)
            for name in ("pixel_values", "image_grid_thw")
        }
        made = base.get_image_features(**arguments, return_dict=True)
        return torch.cat(list(made.pooler_output))[:, None]

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        return [cast(Any, whole_model(model)).model.visual]

    def _merged(self, grid: tuple[int, ...]) -> tuple[int, int, int]:
        time, height, width = grid
        return time, height // self._merge, width // self._merge

    def _count(self, grid: tuple[int, ...]) -> int:
        return int(np.prod(self._merged(grid)))

    @staticmethod
    def _write_text(found: NDArray[np.int64], first: int, end: int, following: int) -> None:
        found[:, first:end] = following + np.arange(end - first)
