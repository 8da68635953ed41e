"""How Qwen2.5-VL and Qwen3-VL read videos with their own video tokens. The models see pairs of frames with their times.

Pixels and grids come from the model's own video processor, which needs torchvision. Tokens and positions don't.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from ...tapes.errors import MissingExtra
from .vision import Expansion, UnsupportedVision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

Grid = tuple[int, ...]
"""(pairs of frames, height, width), with height and width in patches. A last frame without a partner is repeated."""


class NativeVideo(ABC):
    """Knows how one model reads videos. `processor` is the model's video processor."""

    made_by: ClassVar[str]
    """Name of the video processor class with which the family was tested."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, processor: object) -> None:
        self._config, self._tokenizer, self.processor = cast(Any, config), tokenizer, cast(Any, processor)
        self.id: int = self._config.video_token_id

    @property
    def marker(self) -> str:
        """The control token that the chat template writes once for each video."""
        return cast(str, self._tokenizer.convert_ids_to_tokens(self.id))

    @property
    def about(self) -> list[JsonValue]:
        """Everything that determines the pixels of a video's frames."""
        import torchvision  # pyright: ignore[reportMissingImports]

        settings = json.loads(self.processor.to_json_string())
        return [type(self.processor).__name__, settings, str(torchvision.__version__)]

    def expand(self, width: int, height: int, times: Sequence[float]) -> Expansion:
        """Return the tokens that replace a video's marker (see `PictureTokens.expand`). Raises ValueError if the family
        can't place the frames."""
        import torch

        # Each family limits the frame size by its own rule, so the processor itself runs, on frames without data.
        grid, _ = self.processed(torch.empty((len(times), 3, height, width), dtype=torch.uint8, device="meta"))
        return Expansion(self.ids(grid, times), grid)

    @abstractmethod
    def ids(self, grid: Grid, times: Sequence[float]) -> array[int]:
        """Return the token ids that the model reads for a video with this grid and these frame times (in seconds)."""

    @abstractmethod
    def positions(self, grid: Grid, times: Sequence[float]) -> tuple[NDArray[np.int64], int]:
        """Return the positions (3, tokens) of a video's tokens, from 0 on, and the position of the token after them."""

    def processed(self, frames: Tensor) -> tuple[Grid, dict[str, Tensor]]:
        """Return the grid and the tower's arguments for frames, which are uint8 of shape (frames, 3, height, width)."""
        made = self.processor(
            videos=[frames],
            # The processor uses this argument only to select frames. The frames on a tape have been selected already.
            video_metadata=[{"total_num_frames": len(frames)}],
            do_sample_frames=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )
        # The tower treats frames as pictures with several steps in time, so one call can compute pictures and videos.
        grid = made["video_grid_thw"]
        return tuple(grid[0].tolist()), {"pixel_values": made["pixel_values_videos"], "image_grid_thw": grid}

    def asked(self, frames: Tensor, times: Sequence[float]) -> dict[str, Tensor]:
        """Return the arguments that the model's own forward needs for one video."""
        _, found = self.processed(frames)
        return {"pixel_values_videos": found["pixel_values"], "video_grid_thw": found["image_grid_thw"]}

    def _merged(self, grid: Grid) -> Grid:
        return grid[0], grid[1] // self.processor.merge_size, grid[2] // self.processor.merge_size


class SpacedVideo(NativeVideo):
    """Qwen2.5-VL, which reads all video tokens in one run. On the first axis, positions depend on seconds."""

    made_by = "Qwen2VLVideoProcessor"

    def expand(self, width: int, height: int, times: Sequence[float]) -> Expansion:
        steps = np.diff(times)
        if len(steps) and not np.allclose(steps, steps.mean(), rtol=1e-6, atol=0):
            raise ValueError(
                "its frames are not evenly spaced, and this model reads one distance in seconds for all frames: take "
                "evenly spaced frames, or set engine.renderer.video=frames"
            )
        return super().expand(width, height, times)

    def ids(self, grid: Grid, times: Sequence[float]) -> array[int]:
        return array("i", [self.id]) * prod(self._merged(grid))

    def positions(self, grid: Grid, times: Sequence[float]) -> tuple[NDArray[np.int64], int]:
        pairs, height, width = self._merged(grid)
        found = np.indices((pairs, height, width)).reshape(3, -1)
        # The positions are computed in float32 and rounded down, as in transformers.
        step = np.float32(self._config.vision_config.tokens_per_second) * np.float32(self.seconds(times))
        found[0] = (np.arange(pairs, dtype=np.float32) * step).astype(np.int64)[found[0]]
        # In transformers, the position after a video depends on the video's height and width, but not on its duration.
        # In other implementations, it follows the last position in time.
        return found, max(height, width)

    def seconds(self, times: Sequence[float]) -> float:
        """Return the number of seconds from one pair of frames to the next, or 0 for a single frame."""
        return self.processor.temporal_patch_size * (times[-1] - times[0]) / max(len(times) - 1, 1)

    def asked(self, frames: Tensor, times: Sequence[float]) -> dict[str, Tensor]:
        import torch

        return {**super().asked(frames, times), "second_per_grid_ts": torch.tensor([self.seconds(times)])}


class TimedVideo(NativeVideo):
    """Qwen3-VL, which reads each pair of frames as its time in text, followed by a picture.

    The template writes a start token before the whole video and an end token after it, as in vLLM and in transformers
    5.10 and later. Earlier processors omitted these two tokens.
    """

    made_by = "Qwen3VLVideoProcessor"

    def expand(self, width: int, height: int, times: Sequence[float]) -> Expansion:
        if len(times) < 2:
            raise ValueError("it has one frame, and this model reads pairs: show a picture instead")
        return super().expand(width, height, times)

    def ids(self, grid: Grid, times: Sequence[float]) -> array[int]:
        pads = [self.id] * prod(self._merged(grid)[1:])
        ids = [id for head in self._heads(times) for id in (*head, *pads, self._config.vision_end_token_id)]
        return array("i", ids)

    def positions(self, grid: Grid, times: Sequence[float]) -> tuple[NDArray[np.int64], int]:
        _, height, width = self._merged(grid)
        parts, at = list[NDArray[np.int64]](), 0
        for head in self._heads(times):
            frame = at + len(head)
            end = frame + max(height, width)
            pads = frame + np.indices((1, height, width)).reshape(3, -1)
            parts += [np.tile(np.arange(at, frame), (3, 1)), pads, np.full((3, 1), end)]
            at = end + 1
        return np.concatenate(parts, axis=1), at

    def _heads(self, times: Sequence[float]) -> list[list[int]]:
        """Return the tokens before each pair of frames: the pair's mean time as text, and the start of a picture."""
        size = self.processor.temporal_patch_size
        padded = [*times, *[times[-1]] * (-len(times) % size)]
        written = [f"<{(padded[i] + padded[i + size - 1]) / 2:.1f} seconds>" for i in range(0, len(padded), size)]
        encoded = cast("list[list[int]]", self._tokenizer(written, add_special_tokens=False)["input_ids"])
        return [[*ids, self._config.vision_start_token_id] for ids in encoded]


READERS: dict[str, type[NativeVideo]] = {"qwen2_5_vl": SpacedVideo, "qwen3_vl": TimedVideo}
"""The class that reads videos for each model type."""


def check_native(kind: str, folder: Path) -> None:
    """Raise UnsupportedVision if models of type `kind` have no video tokens. Also calls `need_torchvision`."""
    if kind not in READERS:
        raise UnsupportedVision(
            f"engine.renderer.video=native, and the model in {folder} is of the type {kind!r}: models of the types "
            f"{', '.join(READERS)} have video tokens; set engine.renderer.video=frames for any other"
        )
    need_torchvision()


def need_torchvision() -> None:
    """Raise MissingExtra if torchvision is missing, and UnsupportedVision if it doesn't fit the installed torch."""
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra(error.name or "torchvision", "video", "engine.renderer.video=native") from error
    except RuntimeError as error:  # torchvision's operators were built for another device
        raise UnsupportedVision(
            f"engine.renderer.video=native needs torchvision, and it can't be imported: {error!s:.200}; install the "
            "build of torchvision that fits this torch (CPU or CUDA)"
        ) from error


def native_video(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> NativeVideo:
    """Return the reader for this model's videos, with the video processor in `folder`. Raises the same errors as
    `check_native`, and UnsupportedVision if the processor can't be loaded or isn't the family's own."""
    check_native(config.model_type, folder)
    from transformers import AutoVideoProcessor

    reader = READERS[config.model_type]
    try:
        found: Any = AutoVideoProcessor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if type(found).__name__ != reader.made_by:
            raise ValueError(f"it is {type(found).__name__}")
    except Exception as error:  # transformers raises many types for a broken folder
        raise UnsupportedVision(
            f"the video processor in {folder} can't be used: {error!s:.300}; the type {config.model_type} needs "
            f"{reader.made_by}: copy video_preprocessor_config.json from the model's original folder"
        ) from error
    # If this isn't set, transformers warns and uses a default that depends on its version.
    found.cap_pixels_per_frame = bool(found.cap_pixels_per_frame)
    return reader(config, tokenizer, found)
