"""What renderer, engine and trainer ask of a family of vision models.

The renderer asks how many tokens a picture takes (`PictureTokens`; no pixels). Engine and trainer ask
for positions and for the features of pixels (`Vision`), put the features at the picture's places by index, and forward
the language model's body with embeddings. The model's own public forward finds pictures by token id and is never used:
a model can sample this id itself.
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
"""What a model reads of a video: its frames, each as a picture behind its time, or the family's own video tokens."""


class UnsupportedVision(UsageError, ValueError):
    """A model reads more than text, and its family, its processors or its forward is not one that is known."""


class BadPlace(TapereelError, ValueError):
    """The pixels of a place can't be had, or don't fit its length or grid; the message names the file."""

    def __init__(self, message: str, name: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.name, self.missing = name, missing
        """The file, and whether it is gone. Otherwise it was changed, or its place was."""


class Expansion(NamedTuple):
    """The tokens that a model reads for one picture or video."""

    ids: array[int]
    grid: tuple[int, ...]
    """As `Place.grid`."""


class PictureTokens(Protocol):
    """What the renderer asks. Imports no torch, except for native video."""

    @property
    def marker(self) -> str:
        """The control token that the chat template writes once for each picture; all that stands for a picture."""
        ...

    @property
    def video_marker(self) -> str | None:
        """As `marker`, for each video. None: the model reads videos as their frames."""
        ...

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that determines the pixels: the processor's class, backend and settings, and the
        versions of transformers and Pillow. With native video, also of the video processor and torchvision."""
        ...

    def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Expansion:
        """The tokens in place of the marker, for a picture of this size, or for a video of such frames at these times
        in seconds. Computed without pixels. ValueError for a video that the model can't place."""
        ...

    def save(self, folder: Path) -> None:
        """Write the processors' settings next to the tokenizer's."""
        ...

    def fitted(self, place: Place, png: bytes) -> bytes:
        """The PNG for a server that processes it again: in the size that the processor would resize it to, where one
        resize is all that it does. A server's own resize may differ, and with it the pixels. Blocks. UnsupportedVision
        where a server computes otherwise than the local model in any case."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """The processed pixels of one picture or video."""

    tensors: Mapping[str, Tensor]
    """Arguments of the vision tower, by name."""
    count: int
    """Features that the tower makes of it: tokens of its place that take one."""
    patches: int
    """Patches that the tower computes: its cost and memory."""


@runtime_checkable
class Vision(PictureTokens, Protocol):
    """One family of models, with the settings of one model."""

    def feature_mask(self, place: Place) -> NDArray[np.bool_]:
        """(length,) which tokens of the place take a feature. The others (those that name rows and columns of tiles)
        are ordinary tokens."""
        ...

    def patches(self, grid: tuple[int, ...]) -> int:
        """`Pixels.patches` of a place with this grid."""
        ...

    def positions(self, places: Sequence[Place], length: int) -> NDArray[np.int64] | None:
        """(axes, length) rotary positions of a prompt with these places, from 0. The token behind it, and every later
        one, has the largest position + 1 + its distance on all axes. None: positions are indices (0, 1, 2 ...)."""
        ...

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        """Decode and process the place's files; `file` gives the bytes of a file by its name. Blocks. BadPlace if
        a file is gone or damaged, or if its pixels don't fit the place's length or grid."""
        ...

    def features(self, model: nn.Module, pixels: Sequence[Pixels]) -> Tensor:
        """(sum of counts, levels, D) the tower's and projector's output for several pictures, in order. Level 0 goes
        into the embeddings; further levels are added to the hidden states of the first layers (deepstack)."""
        ...

    def tower(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that compute features: the vision tower first, then the projector's, which may be parts of it."""
        ...


def whole_model(model: nn.Module) -> nn.Module:
    """The transformers model itself, where `model` is one with adapters around it (peft)."""
    return getattr(model, "get_base_model", lambda: model)()


def body_inputs(
    embed: nn.Module,
    ids: Tensor,
    where: Tensor | None,
    features: Tensor | None,
    positions: Tensor | None,
    packed: Tensor | None = None,
) -> dict[str, Tensor | list[Tensor]]:
    """Keyword arguments of the language model's body for (B, L) token ids.

    where: (B, L) int64 index into `features` (N, levels, D), -1 if the token takes none. positions: (axes, B, L) of
    `Vision.positions`, or None for the body's own. packed: (B, L) index of each token in its own row, if rows are
    packed into one. transformers finds the rows' boundaries by it.
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
