"""What families of vision models share: the image processor, places checked against its output, and the proof at load.

The image processor has its PIL form, which needs no torchvision. The other form resizes differently.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...tapes.errors import UsageError
from ...tapes.places import Place
from .vision import Expansion, Pixels, Vision, body_inputs, whole_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class UnsupportedVision(UsageError, ValueError):
    """A model reads more than text, and its family, its image processor or its forward is not one that is known."""


class Family:
    """One model's settings. A subclass implements the rest of `Vision`."""

    processors: ClassVar[tuple[str, ...]]
    """Classes of image processors that the family is proven with."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """config: the model's; folder: the one with the image processor. Raises UnsupportedVision."""
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
        about = [kind, "pil", json.loads(found.to_json_string()), __version__, PIL.__version__]
        self.hash = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.processor, self._config, self._tokenizer = found, cast(Any, config), tokenizer
        self._id: int = self._config.image_token_id
        self.marker = cast(str, tokenizer.convert_ids_to_tokens(self._id))

    def expand(self, width: int, height: int) -> Expansion:
        grid = self._grid(width, height)
        return Expansion(self._ids(grid), grid)

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        return np.array(self._ids(place.grid)) == self._id

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        name = place.media[0]
        try:
            grid, tensors = self._processed(_image(file(name)))
        except Exception as error:  # Pillow and transformers raise many types
            raise ValueError(f"the picture {name} can't be processed: {type(error).__name__}: {error}") from error
        ids = np.array(self._ids(grid))
        if (grid, len(ids)) != (place.grid, place.length):
            raise ValueError(
                f"the picture {name} has the grid {grid} and takes {len(ids)} tokens; its place has the grid "
                f"{place.grid} and {place.length} tokens: the prompt was made with another image processor or picture"
            )
        return Pixels(tensors, int((ids == self._id).sum()), self.patches(grid))

    def patches(self, grid: tuple[int, ...]) -> int:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        self.processor.save_pretrained(str(folder))

    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        raise NotImplementedError

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """(grid, tensors) as the image processor makes them."""
        raise NotImplementedError


def prove_vision(model: nn.Module, vision: Vision) -> None:
    """Compare the body with features at places against the model's public forward, on two small pictures between text
    of several lengths. UnsupportedVision has the difference of the logits."""
    import torch
    from PIL import Image

    whole, processor = cast(Any, whole_model(model)), cast(Any, vision).processor
    random, files, places, ids = np.random.default_rng(0), dict[str, bytes](), list[Place](), [*range(40, 47)]
    cause = "its image processor or configuration is of another model, or this version of transformers has changed it"
    try:
        for width, height in ((60, 15), (30, 90)):
            written, name = io.BytesIO(), f"{width}x{height}"
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype="uint8")).save(written, "PNG")
            found, files[name] = vision.expand(width, height), written.getvalue()
            places.append(Place((name,), "image", len(ids), len(found.ids), found.grid))
            ids += [*found.ids, *range(50, 50 + width // 10)]
        mask = np.zeros((1, len(ids)), dtype=np.bool_)
        for place in places:
            mask[0, place.offset : place.end] = vision.feature_mask(place)
        tokens, seen = torch.tensor([ids], device=whole.device), torch.from_numpy(mask).to(whole.device)
        positions = vision.positions(places, len(ids))
        axes = None if positions is None else torch.from_numpy(positions)[:, None].to(whole.device)
        kinds = {} if axes is None else {"mm_token_type_ids": seen.int()}
        own = processor(images=[_image(data) for data in files.values()], return_tensors="pt").to(whole.device)
        with torch.no_grad():
            expected = whole(input_ids=tokens, **own, **kinds, use_cache=False).logits
            features = vision.features(model, [vision.pixels(place, files.__getitem__) for place in places])
            where = torch.where(seen, seen.cumsum(1) - 1, -1)
            inputs = body_inputs(whole.get_input_embeddings(), tokens, where, features, axes)
            made = whole.get_output_embeddings()(whole.get_decoder()(**inputs, use_cache=False).last_hidden_state)
    except Exception as error:  # a processor's settings or a model's shapes that don't fit raise any type
        raise UnsupportedVision(f"{type(whole).__name__} can't read a picture: {error!r}; {cause}") from error
    off = float((made - expected).abs().max())
    # Relative to the range of the logits, which an untrained model has small.
    tolerance = (1e-3 if whole.dtype == torch.float32 else 0.1) * float(expected.max() - expected.min()) + 1e-6
    if not off <= tolerance:  # NaN must fail too
        raise UnsupportedVision(
            f"{type(whole).__name__}: logits behind pictures differ from those of the model's own forward by {off:.3g} "
            f"(tolerance {tolerance:.3g}); {cause}"
        )


def _image(data: bytes) -> object:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")
