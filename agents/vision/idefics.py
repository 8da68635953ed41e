"""Idefics3 and SmolVLM: a picture is cut into tiles, each behind a token of its row and column, then shown whole."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.places import Place
from .family import Family
from .vision import Pixels, whole_model

if TYPE_CHECKING:
    from torch import Tensor, nn


class TiledVision(Family):
    """The grid of a place is (rows, columns) of tiles; (0, 0) for a picture that is shown whole alone."""

    processors = ("Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil")

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        return None

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        import torch

        # Not `get_image_features`: it takes tiles whose values are all 0 for padding, and leaves them out.
        whole: Any = whole_model(model)
        tiles = torch.cat([one.tensors["pixel_values"][0] for one in pixels]).to(whole.device, whole.dtype)
        real = torch.ones(len(tiles), self._side, self._side, dtype=torch.bool, device=tiles.device)
        states = whole.model.vision_model(pixel_values=tiles, patch_attention_mask=real).last_hidden_state
        return whole.model.connector(states).flatten(0, 1)[:, None]

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        whole: Any = whole_model(model)
        return [whole.model.vision_model, whole.model.connector]

    @property
    def _side(self) -> int:
        """Patches along one side of a tile."""
        return self.processor.max_image_size["longest_edge"] // self._config.vision_config.patch_size

    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        if not self.processor.do_image_splitting:
            return 0, 0
        # Takes the shape alone: no pixel is touched. `get_number_of_image_patches` of transformers 5.23 rounds
        # otherwise than the processor itself where the longest edge is no multiple of a tile.
        blank = np.broadcast_to(np.uint8(0), (3, height, width))
        tall, wide = get_resize_output_image_size(blank, self.processor.size["longest_edge"])
        tile = self.processor.max_image_size["longest_edge"]
        if wide >= tall:
            columns = ceil(wide / tile)
            rows = ceil(int(columns * tile / (wide / tall)) / tile)
        else:
            rows = ceil(tall / tile)
            columns = ceil(int(rows * tile * (wide / tall)) / tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        edge, picture = "<fake_token_around_image>", self.marker * (self._side // self._config.scale_factor) ** 2
        rows, columns = grid
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{edge}<row_{row}_col_{column}>{picture}" for column in range(1, columns + 1)) + "\n"
        text += "\n" * bool(rows) + f"{edge}<global-img>{picture}{edge}"
        return array("i", cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def patches(self, grid: tuple[int, ...]) -> int:
        return (grid[0] * grid[1] + 1) * self._side**2

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        made = self.processor(images=[image], return_row_col_info=True, return_tensors="pt")
        if not made["pixel_attention_mask"].all():
            raise ValueError("the image processor pads its tiles, which the vision tower would need to know")
        return (made["rows"][0][0], made["cols"][0][0]), {"pixel_values": made["pixel_values"]}
