"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a picture is a grid with positions on three axes (time, height, width)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.places import Place
from .family import Family
from .vision import Pixels, whole_model

if TYPE_CHECKING:
    from torch import Tensor, nn


class QwenVision(Family):
    """The grid of a place counts patches: (1, height, width). `merge_size` squared of them make a feature."""

    processors = ("Qwen2VLImageProcessorPil",)

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        found = np.empty((3, length), dtype=np.int64)
        index = following = 0
        for start, end, grid in [*((p.offset, p.end, self._merged(p.grid)) for p in places), (length, length, (0,))]:
            found[:, index:start] = following + np.arange(start - index)
            following += start - index
            if end > start:
                found[:, start:end] = following + np.indices(grid).reshape(3, -1)
            index, following = end, following + max(grid)
        return found

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        import torch

        base: Any = whole_model(model)
        joined = {name: torch.cat([one.tensors[name] for one in pixels]).to(base.device) for name in pixels[0].tensors}
        made = base.get_image_features(**joined, return_dict=True)
        levels = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return torch.stack([torch.cat(list(level)) for level in levels], dim=1)

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        visual = cast(Any, whole_model(model)).model.visual
        return [visual, visual.merger, *getattr(visual, "deepstack_merger_list", ())]

    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        patch, size = self.processor.patch_size, self.processor.size
        factor = patch * self.processor.merge_size
        sides = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return 1, sides[0] // patch, sides[1] // patch

    def _merged(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return grid[0], grid[1] // self.processor.merge_size, grid[2] // self.processor.merge_size

    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        return array("i", [self._id]) * prod(self._merged(grid))

    def patches(self, grid: tuple[int, ...]) -> int:
        return prod(grid)

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        made = self.processor(images=[image], return_tensors="pt")
        return tuple(made["image_grid_thw"][0].tolist()), dict(made)
