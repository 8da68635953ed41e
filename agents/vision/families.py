"""The families of vision models that are served and trained, by the model type in a folder's config.json."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.places import Place
from .family import Family, UnsupportedVision
from .vision import Pixels, whole_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig


class QwenVision(Family):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: positions on three axes (time, height, width).

    The grid of a place counts patches: (1, height, width). `merge_size` squared of them make a feature.
    """

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

    def patches(self, grid: tuple[int, ...]) -> int:
        return prod(grid)

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

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        made = self.processor(images=[image], return_tensors="pt")
        return tuple(made["image_grid_thw"][0].tolist()), dict(made)


class TiledVision(Family):
    """Idefics3 and SmolVLM: a picture is cut into tiles, each behind a token of its row and column, then shown whole.

    The grid of a place is (rows, columns) of tiles; (0, 0) for a picture that is shown whole alone.
    """

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

    def patches(self, grid: tuple[int, ...]) -> int:
        return (grid[0] * grid[1] + 1) * self._side**2

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
        tile, ratio = self.processor.max_image_size["longest_edge"], wide / tall
        rows, columns = ceil(tall / tile), ceil(wide / tile)
        if wide >= tall:
            rows = ceil(int(columns * tile / ratio) / tile)
        else:
            columns = ceil(int(rows * tile * ratio) / tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        edge, picture = "<fake_token_around_image>", self.marker * (self._side // self._config.scale_factor) ** 2
        rows, columns = grid
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{edge}<row_{row}_col_{column}>{picture}" for column in range(1, columns + 1)) + "\n"
        text += "\n" * bool(rows) + f"{edge}<global-img>{picture}{edge}"
        return array("i", cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        made = self.processor(images=[image], return_row_col_info=True, return_tensors="pt")
        if not made["pixel_attention_mask"].all():
            raise ValueError("the image processor pads its tiles, which the vision tower would need to know")
        return (made["rows"][0][0], made["cols"][0][0]), {"pixel_values": made["pixel_values"]}


FAMILIES: dict[str, type[QwenVision | TiledVision]] = {
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
