"""The interfaces through which the renderer, the engine and the trainer use a family of vision models.

The renderer asks how many tokens a picture takes, which needs no pixels (`PictureTokens`). The engine and the trainer
ask for positions and for the features computed from pixels (`Vision`). They put the features at the picture's places by
index, and run the language model's body on the embeddings. The model's own public forward finds pictures by token id.
It is never used, because a model can sample this id itself.
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
"""How a model reads a video: as its frames, each a picture after its time, or as the family's own video tokens."""


class UnsupportedVision(UsageError, ValueError):
    """A model reads more than text, but its family, its processors or its forward isn't supported."""


class BadPlace(TapereelError, ValueError):
    """The pixels of a place can't be read, or don't fit its length or grid. The message names the file."""

    def __init__(self, message: str, name: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.name, self.missing = name, missing
        """The file, and whether it is missing. If it isn't missing, the file or its place was changed."""


class Expansion(NamedTuple):
    """The tokens that a model reads for one picture or video."""

    ids: array[int]
    grid: tuple[int, ...]
    """See `Place.grid`."""


class PictureTokens(Protocol):
    """What the renderer needs to know about pictures. It imports no torch, except for native video."""

    @property
    def marker(self) -> str:
        """The control token that the chat template writes once for each picture. It is the picture's only placeholder
        in the text."""
        ...

    @property
    def video_marker(self) -> str | None:
        """The control token that the chat template writes once for each video, or None if the model reads videos as
        their frames."""
        ...

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that determines the pixels: the processor's class, backend and settings, and the
        versions of transformers and Pillow. With native video, it also covers the video processor and torchvision."""
        ...

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        """Return the tokens that replace the marker for a picture of this size, or for a video with frames of this size
        at these times in seconds. No pixels are needed. Raises ValueError if the model can't place the video."""
        ...

    def save(self, folder: Path) -> None:
        """Write the processors' settings next to the tokenizer's."""
        ...

    def fitted(self, place: Place, png: bytes) -> bytes:
        """Return the PNG to send to a server, which processes it again. If the processor only resizes a picture once,
        the PNG already has the final size, because a server's own resize may give other pixels. The call blocks. Raises
        UnsupportedVision if a server would compute something else than the local model in any case."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """The processed pixels of one picture or video."""

    tensors: Mapping[str, Tensor]
    """Arguments of the vision tower, by name."""
    count: int
    """Number of features that the tower computes, which is the number of tokens in the place that take one."""
    patches: int
    """Number of patches that the tower processes, which determines its cost and memory."""


@runtime_checkable
class Vision(PictureTokens, Protocol):
    """One family of models, with the settings of one model."""

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        """Return a (length,) mask of the place's tokens that take a feature. The others, which name rows and columns of
        tiles, are ordinary tokens."""
        ...

    def patches(self, grid: tuple[int, ...]) -> int:
        """Return `Pixels.patches` for a place with this grid."""
        ...

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        """Return the (axes, length) rotary positions of a prompt with these places, from 0. After the last place,
        positions are equal on all axes and grow by 1 per token. Return None if positions are indices (0, 1, 2 ...)."""
        ...

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        """Decode and process the place's files. `file` returns the bytes of a file by its name. The call blocks. Raises
        BadPlace if a file is missing or damaged, or if its pixels don't fit the place's length or grid."""
        ...

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        """Return the output of the tower and projector for several pictures, in order, with shape (sum of counts,
        levels, D). Level 0 goes into the embeddings. Further levels are added to the hidden states of the first layers
        (deepstack)."""
        ...

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that compute features: the vision tower, then the projector's, which may be parts of
        it."""
        ...


def whole_model(model: nn.Module) -> nn.Module:
    """Return the transformers model itself, also if `model` wraps it with adapters (peft)."""
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

    `where` is a (B, L) int64 index into `features` (N, levels, D), with -1 for a token that takes none. `positions` has
    shape (axes, B, L) and comes from `Vision.positions`, or is None for the body's own positions. If several rows are
    packed into one, `packed` is the (B, L) index of each token in its own row, by which transformers finds the
    boundaries between the rows.
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
