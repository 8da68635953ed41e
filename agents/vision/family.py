"""What families of vision models share: the image processor in its PIL form, and places checked against its output.

The PIL form needs no torchvision. The two forms of a processor resize differently, so the form is part of its identity.
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
from .vision import Expansion, Pixels

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class BadProcessor(UsageError):
    """A folder's image processor is missing, or is not one that its model's family is proven with."""


class Family:
    """One model's settings. A subclass implements the rest of `Vision`."""

    processors: ClassVar[tuple[str, ...]]
    """Classes of image processors that the family is proven with."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """config: the model's; folder: the one with the image processor. Raises BadProcessor."""
        import PIL
        from transformers import AutoImageProcessor, __version__

        source, found = f"the image processor in {folder}", cast(Any, None)
        try:
            found = AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
            reason = f"is {type(found).__name__}, do_resize={found.do_resize}, do_convert_rgb={found.do_convert_rgb}"
        except Exception as error:  # transformers raises many types for a broken folder
            reason = f"can't be loaded ({type(error).__name__}: {error!s:.300})"
        if type(found).__name__ not in self.processors or not (found.do_resize and found.do_convert_rgb):
            raise BadProcessor(
                f"{source} {reason}; {config.model_type} needs {' or '.join(self.processors)}, and both settings true: "
                "copy preprocessor_config.json from the model's original folder"
            )
        about = [type(found).__name__, "pil", json.loads(found.to_json_string()), __version__, PIL.__version__]
        self.hash = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.processor: Any = found
        self._config: Any = config
        self._tokenizer = tokenizer
        self._id: int = self._config.image_token_id
        self.marker = cast(str, tokenizer.convert_ids_to_tokens(self._id))

    def expand(self, width: int, height: int) -> Expansion:
        grid = self._grid(width, height)
        return Expansion(self._ids(grid), grid)

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        return np.array(self._ids(place.grid)) == self._id

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        from PIL import Image

        name = place.media[0]
        try:
            image = Image.open(io.BytesIO(file(name)), formats=["PNG"]).convert("RGB")
            grid, tensors = self._processed(image)
        except Exception as error:  # Pillow and transformers raise many types
            raise ValueError(f"the picture {name} can't be processed: {type(error).__name__}: {error}") from error
        ids = np.array(self._ids(grid))
        if (grid, len(ids)) != (place.grid, place.length):
            raise ValueError(
                f"the picture {name} has the grid {grid} and takes {len(ids)} tokens; its place has the grid "
                f"{place.grid} and {place.length} tokens: the prompt was made with another image processor or picture"
            )
        return Pixels(tensors, int((ids == self._id).sum()), self.patches(grid))

    def save(self, folder: Path) -> None:
        self.processor.save_pretrained(str(folder))

    def _grid(self, width: int, height: int) -> tuple[int, ...]:
        """As `Expansion.grid`, for a picture of this size."""
        raise NotImplementedError

    def _ids(self, grid: tuple[int, ...]) -> array[int]:
        raise NotImplementedError

    def patches(self, grid: tuple[int, ...]) -> int:
        raise NotImplementedError

    def _processed(self, image: object) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """(grid, tensors) as the image processor makes them."""
        raise NotImplementedError
