"""Places: which tokens of a prompt stand for which picture or video, and the keys that compare token sequences.

A vision model reads a picture as a run of tokens, all with the same few ids whatever the picture shows. So equal ids
don't mean equal contents, and a model can sample these ids itself. Every comparison of prefixes therefore compares
keys: token ids, with a picture's tokens replaced by a negative number that is made of the picture's hash. A video that
is shown by the model's own video tokens has one place; a video that is shown as frames has one for each frame.
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
    """Names of the files that the tokens stand for: a picture's, or the frames of a video in order."""
    kind: Literal["image", "video"]
    offset: int
    """Index of the first token in all prompt ids of the call."""
    length: int
    grid: tuple[int, ...]
    """Data that the model's family needs with the file to compute pixels and positions, such as (1, height, width) in
    patches."""
    times: tuple[float, ...] = ()
    """Seconds of each frame of a video. A picture has none."""

    @property
    def end(self) -> int:
        """Index behind the last token."""
        return self.offset + self.length

    @property
    def key(self) -> int:
        """A negative number (63 bits), equal for equal content."""
        return -1 - int.from_bytes(sha256(repr(self._replace(offset=0)).encode()).digest()[:7])

    def moved(self, by: int) -> Place:
        """The place `by` tokens later."""
        return self._replace(offset=self.offset + by)


def _plain(place: Place) -> tuple[Any, ...]:
    """The form on a tape. A picture's place leaves out `times`, so its bytes are the same as in earlier versions."""
    return tuple(place) if place.times else tuple(place)[:-1]


Places = tuple[Annotated[Place, PlainSerializer(_plain)], ...]
"""The places of a record."""


def keys(ids: Sequence[int] | NDArray[np.integer], places: Iterable[Place]) -> NDArray[np.int64]:
    """(L,) the ids, with the tokens of each place replaced by its key."""
    import numpy as np

    found = np.array(ids, dtype=np.int64)
    for place in places:
        found[place.offset : place.end] = place.key
    return found


def shared_length(a: NDArray[np.int64], b: NDArray[np.int64], places: Iterable[Place], most: int | None = None) -> int:
    """Length of the prefix that two key sequences share, at most `most` tokens, and never ending inside one of the
    `places` of either."""
    n = min(len(a), len(b)) if most is None else min(len(a), len(b), most)
    differ = a[:n] != b[:n]
    n = int(differ.argmax()) if differ.any() else n
    return min((place.offset for place in places if place.offset < n < place.end), default=n)
