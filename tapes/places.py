"""Places state which tokens in a prompt stand for which picture or video. Keys make the tokens of two prompts
comparable.

A vision model reads a picture as a run of tokens with the same few ids, whatever the picture shows, and a model can
sample these ids itself. So equal ids don't mean equal content. Before two prompts are compared, their ids are turned
into keys: each token of a picture becomes a negative number that is computed from the picture's hash, and every other
token keeps its id.

A video that is shown with the model's own video tokens has one place. A video that is shown as frames has one place for
each frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Place(NamedTuple):
    """The tokens of one picture or video in a prompt: [offset, offset + length)."""

    media: tuple[str, ...]
    """Names of the files that the tokens stand for: one file for a picture, or the frames of a video in order."""
    kind: Literal["image", "video"]
    offset: int
    """Index of the first token in the call's whole prompt."""
    length: int
    grid: tuple[int, ...]
    """Numbers that describe the picture's tokens, such as (1, height, width) in patches. The code for the model's
    family computes pixel values and positions from these numbers and the file."""
    times: tuple[float, ...] = ()
    """The time of each frame of a video in seconds. It is empty for a picture."""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.offset + self.length

    @property
    def key(self) -> int:
        """A negative number, at least -2**56. Places with the same content have the same key, whatever their offset."""
        return -1 - int.from_bytes(sha256(repr(self._replace(offset=0)).encode()).digest()[:7])

    def moved(self, by: int) -> Place:
        """Return the place shifted by `by` tokens."""
        return self._replace(offset=self.offset + by)


def _plain(place: Place) -> tuple[Any, ...]:
    """Return the values of a place that are written to a tape. For a picture, `times` is left out, so that the bytes
    are the same as in earlier versions."""
    return tuple(place) if place.times else tuple(place)[:-1]


Places = tuple[Annotated[Place, PlainSerializer(_plain)], ...]
"""Type of the fields of records that hold places."""


def keys(ids: Sequence[int] | NDArray[np.integer], places: Iterable[Place]) -> NDArray[np.int64]:
    """Return the ids, with the tokens of each place replaced by its key. Shape (L,)."""
    import numpy as np

    found = np.array(ids, dtype=np.int64)
    for place in places:
        found[place.offset : place.end] = place.key
    return found


def shared_length(a: NDArray[np.int64], b: NDArray[np.int64], places: Iterable[Place], most: int | None = None) -> int:
    """Return the length of the prefix that two key sequences share. It is at most `most`, and never ends inside a
    place. `places` are the places of both sequences."""
    n = min(len(a), len(b)) if most is None else min(len(a), len(b), most)
    differ = a[:n] != b[:n]
    n = int(differ.argmax()) if differ.any() else n
    return min((place.offset for place in places if place.offset < n < place.end), default=n)
