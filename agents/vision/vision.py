"""The interfaces through which renderer, engine and trainer use a family of vision models.

The renderer uses `PictureTokens` to ask how many tokens a picture takes. This needs no pixels. Engine and trainer use
`Vision` to ask for positions, and for features that are computed from pixels. They put the features into the embeddings
at the picture's places, by index, and run the language model's body on the embeddings. They don't use the model's own
public forward, because it finds pictures by a token id that the model can also sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from ...tapes.errors import TapereelError, UsageError
from ...tapes.places import Place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn


VideoTokens = Literal["frames", "native"]
"""How a model reads videos. `frames`: as pictures, each after its time. `native`: as the family's own video tokens."""


class UnsupportedVision(UsageError, ValueError):
    """The model reads more than text, but its family, its processors or its forward isn't supported."""


class BadPlace(TapereelError, ValueError):
    """The pixels of a picture or video can't be read, or don't fit its recorded place (length or grid). The message
    names the file."""

    def __init__(self, message: str, name: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.name, self.missing = name, missing
        """The file's name, and whether the file is missing. If the file exists, the file or its place was changed."""


class Expansion(NamedTuple):
    """The tokens that a model reads for one picture or video."""

    ids: array[int]
    grid: tuple[int, ...]
    """The grid that is recorded in `Place.grid`, such as (1, height, width) in patches."""


class PictureTokens(Protocol):
    """What the renderer needs to know about pictures. No torch is needed for this, except for native video."""

    @property
    def marker(self) -> str:
        """The control token that the chat template writes once for each picture, as the only placeholder for it."""
        ...

    @property
    def video_marker(self) -> str | None:
        """The control token that the chat template writes once for each video, or None if the model reads videos as
        frames."""
        ...

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that determines the pixels: the processor's class, backend and settings, and the
        versions of transformers and Pillow. With native video, it also covers the video processor and torchvision."""
        ...

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        """Return the tokens that replace the marker of a picture of this size. With `times` in seconds, return the
        tokens of a video that has frames of this size at these times. No pixels are needed. Raises ValueError if the
        model can't place the video."""
        ...

    def save(self, folder: Path) -> None:
        """Write the processors' settings to the folder in which the tokenizer is saved."""
        ...

    def fitted(self, place: Place, png: bytes) -> bytes:
        """Return the PNG to send to a server, which will process it again. Resizing on the server may give other
        pixels. So if the processor resizes a picture only once, the PNG already has the final size. The call blocks.
        Raises UnsupportedVision if no PNG can make a server compute the same as the local model."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """The processed pixels of one picture or video."""

    tensors: Mapping[str, Tensor]
    """Arguments of the vision tower, by name."""
    count: int
    """Number of features that the tower computes. Each of them goes to one token."""
    patches: int
    """Number of patches that the tower processes. It determines the tower's time and memory."""


@runtime_checkable
class Vision(PictureTokens, Protocol):
    """A family of vision models, with the settings of one model."""

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        """Return a mask (length,) over the tokens of a picture or video. It is true for the tokens that take a feature.
        The others are ordinary tokens, which for example name a tile's row and column."""
        ...

    def patches(self, grid: tuple[int, ...]) -> int:
        """Return the number of patches that the tower processes for a picture or video with this grid."""
        ...

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        """Return rotary positions (axes, length), from 0 on, for a prompt of `length` tokens. `places` shows where its
        pictures are. After the last picture, the positions are equal on all axes and grow by 1 per token. Returns None
        if a token's position is its index."""
        ...

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        """Decode and process the files of the picture or video at `place`. `file` returns a file's bytes by its name.
        The call blocks. Raises BadPlace if a file is missing or damaged, or if its pixels don't fit the place's length
        or grid."""
        ...

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        """Return the features that tower and projector compute for several pictures, in order. The shape is (sum of
        counts, levels, D). Level 0 goes into the embeddings. Each further level is added to the hidden states of one
        of the first layers (deepstack)."""
        ...

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that compute features: first the vision tower, then the projector's modules, which may be
        parts of the tower."""
        ...


def whole_model(model: nn.Module) -> nn.Module:
    """Return the transformers model, without peft's wrapper if `model` has adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def body_inputs(
    embed: nn.Module,
    ids: Tensor,
    where: Tensor | None,
    features: Tensor | None,
    positions: Tensor | None,
    packed: Tensor | None = None,
) -> dict[str, Tensor | list[Tensor]]:
    """Return the keyword arguments of the language model's body for (B, L) token ids.

    `where` has shape (B, L) and holds an int64 index into `features` (N, levels, D) for each token, with -1 for tokens
    that take no feature. `positions` comes from `Vision.positions` and has shape (axes, B, L). If it is None, the body
    uses its own positions. If several rows are packed into one, `packed` holds each token's index in its own row, with
    shape (B, L). From it, transformers finds the boundaries between the rows.
    """
    import torch

    inputs: dict[str, Tensor | list[Tensor]] = {}
    if where is None or features is None:
        inputs["input_ids"] = ids
    else:
        at = where >= 0
        chosen = features.index_select(0, where[at])
        embeds = embed(ids)
        inputs["inputs_embeds"] = embeds.masked_scatter(at[..., None], chosen[:, 0].to(embeds.dtype))
        if features.shape[1] > 1:
            inputs["visual_pos_masks"] = at
            inputs["deepstack_visual_embeds"] = [chosen[:, level] for level in range(1, features.shape[1])]
    if positions is None and packed is not None:
        inputs["position_ids"] = packed
    elif positions is not None:
        inputs["position_ids"] = positions if packed is None else torch.cat([packed[None], positions])
    return inputs
