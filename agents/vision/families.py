"""The families of vision models that can be served and trained. The model type in config.json determines the family.

Image processors use the PIL backend, because it doesn't need torchvision. The other backend resizes differently.
"""

from __future__ import annotations

import io
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.decoding import decoded
from ...tapes.errors import Corrupt, NotATape
from ...tapes.places import Place
from .video import NativeVideo, check_native, native_video
from .vision import BadPlace, Expansion, Pixels, UnsupportedVision, VideoTokens, Vision, body_inputs, whole_model

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


_VIDEO_SETTINGS = "video_preprocessor_config.json"


class Family(ABC):
    """Holds one model's settings. Subclasses implement the rest of `Vision`."""

    processors: ClassVar[tuple[str, ...]]
    """Names of the image processor classes with which the family was tested."""

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        video: VideoTokens = "frames",
    ) -> None:
        """`config` is the model's configuration, and `folder` contains the model's processors. Raises UnsupportedVision
        if they can't be used, and MissingExtra if native video is used without torchvision."""
        import PIL
        from transformers import AutoImageProcessor, __version__

        try:
            found: Any = AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
            kind, flags = type(found).__name__, (found.do_resize, found.do_convert_rgb)
            if kind not in self.processors or flags != (True, True):
                raise ValueError(f"it is {kind} with do_resize, do_convert_rgb = {flags}")
        except Exception as error:  # transformers raises many types for a broken folder
            raise UnsupportedVision(
                f"the image processor in {folder} can't be used: {error!s:.300}; the type {config.model_type} "
                f"needs {' or '.join(self.processors)}: copy preprocessor_config.json from the model's original folder"
            ) from error
        self.video = native_video(config, tokenizer, folder) if video == "native" else None
        settings = folder / _VIDEO_SETTINGS
        self._unread = settings.read_bytes() if video == "frames" and settings.is_file() else None
        about = [kind, "pil", json.loads(found.to_json_string()), __version__, PIL.__version__]
        about += [] if self.video is None else self.video.about
        self.hash = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.processor, self._config, self._tokenizer = found, cast(Any, config), tokenizer
        self._id: int = self._config.image_token_id
        self.marker = cast(str, tokenizer.convert_ids_to_tokens(self._id))

    @property
    def video_marker(self) -> str | None:
        return None if self.video is None else self.video.marker

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        if times:
            return self._native.expand(width, height, times)
        grid = self._grid(width, height)
        return Expansion(self._ids(grid), grid)

    def fitted(self, place: Place, png: bytes) -> bytes:
        return png

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        if place.times:
            return np.array(self._native.ids(place.grid, place.times)) == self._native.id
        return np.array(self._ids(place.grid)) == self._id

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        name, images = place.media[0], list[Any]()
        try:
            for name in place.media:
                images.append(decoded(file(name)))
            grid, tensors = self._native.processed(_frames(images)) if place.times else self._processed(images[0])
        except Exception as error:  # Pillow and transformers raise many types
            said = f"the picture {name} can't be processed: {type(error).__name__}: {error}"
            missing = isinstance(error, NotATape) and not isinstance(error, Corrupt)
            raise BadPlace(said, name, missing=missing) from error
        mask = self.feature_mask(place._replace(grid=grid))
        if (grid, len(mask)) != (place.grid, place.length):
            raise BadPlace(
                f"the {place.kind} {name} has the grid {grid} and takes {len(mask)} tokens; its place has the grid "
                f"{place.grid} and {place.length} tokens: the prompt was made with another processor or file",
                name,
            )
        return Pixels(tensors, int(mask.sum()), self.patches(grid))

    @property
    def _native(self) -> NativeVideo:
        if self.video is None:
            raise ValueError("the tokens belong to a video, and this model was loaded to read videos as frames")
        return self.video

    @abstractmethod
    def patches(self, grid: tuple[int, ...]) -> int: ...

    def save(self, folder: Path) -> None:
        self.processor.save_pretrained(str(folder))
        if self.video is not None:
            self.video.processor.save_pretrained(str(folder))
        elif self._unread is not None:
            (folder / _VIDEO_SETTINGS).write_bytes(self._unread)

    @abstractmethod
    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        """Return the grid (`Place.grid`) of a picture with this size in pixels."""

    @abstractmethod
    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        """Return the token ids that the model reads for a picture with this grid."""

    @abstractmethod
    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Return the grid and the tensors that the image processor computes for an image."""


class QwenVision(Family):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which have positions on three axes (time, height, width).

    The grid of a picture is (1, height, width) in patches. A square of `merge_size` by `merge_size` patches gives one
    feature.
    """

    processors = ("Qwen2VLImageProcessorPil",)

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        found = np.empty((3, length), dtype=np.int64)
        index = following = 0
        for place in places:
            found[:, index : place.offset] = following + np.arange(place.offset - index)
            following += place.offset - index
            if place.times:
                own, behind = self._native.positions(place.grid, place.times)
            else:
                grid = self._merged(place.grid)
                own, behind = np.indices(grid).reshape(3, -1), max(grid)
            found[:, place.offset : place.end] = following + own
            index, following = place.end, following + behind
        found[:, index:] = following + np.arange(length - index)
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

    def fitted(self, place: Place, png: bytes) -> bytes:
        rope = self._config.get_text_config().rope_parameters
        if self._config.model_type == "qwen3_vl" and not rope.get("mrope_interleaved"):
            raise UnsupportedVision(
                f"rope_parameters of this qwen3_vl are {rope}: without mrope_interleaved=true in config.json vLLM "
                "computes other positions than transformers, which always interleaves: add it, and restart vLLM"
            )
        height, width = (side * self.processor.patch_size for side in place.grid[1:])
        decoded(png).resize((width, height), self.processor.resample).save(found := io.BytesIO(), "PNG")
        return found.getvalue()

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
    """Idefics3 and SmolVLM, which read a picture as tiles, followed by the whole picture.

    Before each tile there is a token that names its row and column. The grid of a picture is (rows, columns) of tiles,
    or (0, 0) if it isn't cut into tiles.
    """

    processors = ("Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil")

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        return None

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        import torch

        # `get_image_features` isn't used, because it regards tiles in which all values are 0 as padding and drops them.
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

    def save(self, folder: Path) -> None:
        super().save(folder)
        # Servers get the number of tokens per tile only from this file. Without it, they assume 169.
        about = {"processor_class": type(self.processor).__name__.replace("ImageProcessorPil", "Processor")}
        (folder / "processor_config.json").write_text(json.dumps({**about, "image_seq_len": self._tokens}))

    @property
    def _tokens(self) -> int:
        """Number of picture tokens for each tile."""
        return (self._side // self._config.scale_factor) ** 2

    @property
    def _side(self) -> int:
        """Number of patches along one side of a tile."""
        return self.processor.max_image_size["longest_edge"] // self._config.vision_config.patch_size

    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        if not self.processor.do_image_splitting:
            return 0, 0
        # Only the shape of this array is used. `get_number_of_image_patches` isn't used, because in transformers 5.23
        # it rounds differently from the processor if the longest edge isn't a multiple of a tile.
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
        edge, picture = "<fake_token_around_image>", self.marker * self._tokens
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
"""The implementation of `Vision` for each model type."""
_SENSES = re.compile(r"(vision|image|video|audio|speech|vq).*_config$")


def family_of(
    config: PreTrainedConfig, folder: Path, video: VideoTokens = "frames"
) -> type[QwenVision | TiledVision] | None:
    """Return the family of the model with this configuration, or None for a text model.

    Raises UnsupportedVision if the model has an encoder, or if it reads more than text and its family is unknown. The
    message names `folder`. With native video, this also raises the errors of `check_native`. Without this check,
    transformers would load many vision models as text-only models, and would give no warning.
    """
    kind = config.model_type
    parts = {key for key in vars(config) if _SENSES.search(key) and getattr(config, key) is not None}
    if config.get_text_config() is not config:  # a nested configuration: the model reads more
        parts |= set(config.sub_configs)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedVision(
            f"the model in {folder} is of the type {kind!r}, which has an encoder, and transformers would load its "
            "decoder alone: name a model that only decodes"
        )
    if parts and kind not in FAMILIES:
        raise UnsupportedVision(
            f"the model in {folder} is of the type {kind!r} and has further parts: {', '.join(sorted(parts))}. "
            f"Models with such parts are loaded of these families: {', '.join(sorted(FAMILIES))}. Name a model of one "
            "of them, or of text alone"
        )
    if video == "native":
        check_native(kind, folder)
    return FAMILIES.get(kind)


def prove_vision(model: nn.Module, vision: Vision) -> None:
    """Check that the language model's body, with picture features in its embeddings, gives the same logits as the
    model's public forward.

    The input consists of texts of several lengths with two small pictures between them, and also a video if the model
    reads videos natively. Raises UnsupportedVision with the difference if the logits differ."""
    import torch
    from PIL import Image

    whole, processor, native = cast(Any, whole_model(model)), cast(Any, vision).processor, cast(Any, vision).video
    random, files, places, ids = np.random.default_rng(0), dict[str, bytes](), list[Place](), [*range(40, 47)]
    cause = "its processors or its configuration are of another model, or this version of transformers has changed it"
    # The number of frames is odd, and their times differ from their indices.
    videos = [] if native is None else [(40, 30, (0.5, 2.0, 3.5))]
    try:
        for width, height, times in [(60, 15, ()), (30, 90, ()), *videos]:
            names = [f"{width}x{height}-{k}" for k in range(len(times) or 1)]
            for name in names:
                written = io.BytesIO()
                Image.fromarray(random.integers(0, 256, (height, width, 3), dtype="uint8")).save(written, "PNG")
                files[name] = written.getvalue()
            kind, found = ("video" if times else "image"), vision.expand(width, height, times)
            places.append(Place(tuple(names), kind, len(ids), len(found.ids), found.grid, times))
            ids += [*found.ids, *range(50, 50 + width // 10)]
        tokens = torch.tensor([ids], device=whole.device)
        kinds = torch.zeros_like(tokens, dtype=torch.int)
        for place in places:
            kinds[0, place.offset : place.end] = torch.from_numpy(vision.feature_mask(place) * (1 + bool(place.times)))
        positions = vision.positions(places, len(ids))
        axes = None if positions is None else torch.from_numpy(positions)[:, None].to(whole.device)
        images = [[decoded(files[name]) for name in place.media] for place in places]
        own = dict(processor(images=[one for one, *more in images if not more], return_tensors="pt"))
        own |= {} if axes is None else {"mm_token_type_ids": kinds}
        if native is not None:
            own |= native.asked(_frames(images[-1]), places[-1].times)
        with torch.no_grad():
            moved = {name: tensor.to(whole.device) for name, tensor in own.items()}
            expected = whole(input_ids=tokens, **moved, use_cache=False).logits
            features = vision.features(model, [vision.pixels(place, files.__getitem__) for place in places])
            where = torch.where(kinds > 0, (kinds > 0).cumsum(1) - 1, -1)
            inputs = body_inputs(whole.get_input_embeddings(), tokens, where, features, axes)
            made = whole.get_output_embeddings()(whole.get_decoder()(**inputs, use_cache=False).last_hidden_state)
    except Exception as error:  # if processor and model don't fit, any type can be raised
        raise UnsupportedVision(f"{type(whole).__name__} can't read a picture: {error!r}; {cause}") from error
    off = float((made - expected).abs().max())
    # The tolerance is relative to the range of the logits, because this range is small in an untrained model.
    tolerance = (1e-3 if whole.dtype == torch.float32 else 0.1) * float(expected.max() - expected.min()) + 1e-6
    if not off <= tolerance:  # NaN must fail too
        raise UnsupportedVision(
            f"{type(whole).__name__}: logits after pictures differ from the model's own forward by {off:.3g} "
            f"(tolerance {tolerance:.3g}); {cause}"
        )


def _frames(images: Sequence[Image]) -> Tensor:
    """Return the images as a uint8 tensor of shape (frames, 3, height, width)."""
    import torch

    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2).contiguous()
