"""What the embedded engine keeps between requests: the KV of conversations, and the pixels and features of pictures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ....tapes.places import Place, shared_length
from ...vision.vision import Pixels, Vision
from .kv_cache import SlotDecoder

CACHE_BYTES = 1 << 29
"""Maximum size in bytes of the processed pixels that are kept, and of the features that are kept."""
TOWER_PATCHES = 1 << 14
"""Number of patches after which a call of the vision tower takes no further picture. It bounds the tower's memory."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds values by key whose sizes add up to at most `budget`. The least recently used ones are evicted first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None if the cache has no value for it."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key, (None, 0))[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep `value`, and evict values that exceed the budget."""
        self.forget(key)
        self._entries[key] = value, size
        self.used += size
        while self.used > self.budget:
            self.forget(next(iter(self._entries)))

    def forget(self, key: K) -> None:
        """Drop the value under `key`, if the cache has one."""
        self.used -= self._entries.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Drop all values."""
        self._entries.clear()
        self.used = 0


@dataclass(slots=True)
class Parked:
    """The first tokens of a conversation and their KV."""

    keys: NDArray[np.int64]
    """The result of `tapes.places.keys`. Its elements are equal where the ids and pictures are equal."""
    places: tuple[Place, ...]
    kv: Tensor


class ParkingLot(BoundedCache[str, Parked]):
    """Holds the KV of conversations, with at most `budget` tokens in total."""

    def find(self, key: str, keys: NDArray[np.int64], places: tuple[Place, ...]) -> tuple[Parked | None, int]:
        """Return the entry under `key`, and the length of the exact prefix that a prompt shares with it. The prefix
        never ends inside a picture.

        The last token of the prompt is never included: it must go through a forward pass, since its logits predict the
        next token."""
        entry = self.get(key)
        if entry is None:
            return None, 0
        return entry, shared_length(entry.keys, keys, (*entry.places, *places), most=len(keys) - 1)


class PictureFeatures:
    """Holds the pixels and features of the pictures that an engine was shown, by `Place.key`."""

    def __init__(self, decoder: SlotDecoder, vision: Vision) -> None:
        self.vision = vision
        self.features = BoundedCache[int, Tensor](CACHE_BYTES)
        """Features under the current weights. The cache must be cleared for new weights."""
        self._decoder = decoder
        self._pixels = BoundedCache[int, Pixels](CACHE_BYTES)
        self._processing = Lock()

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        """See `Vision.pixels`. May be called in threads. Several requests that show the same picture process it only
        once."""
        with self._processing:
            found = self._pixels.get(place.key)
            if found is None:
                found = self.vision.pixels(place, file)
                self._pixels.put(place.key, found, sum(tensor.nbytes for tensor in found.tensors.values()))
            return found

    def of(self, shown: Mapping[int, Callable[[], Pixels]]) -> dict[int, Tensor]:
        """Return features of shape (count, levels, D) by key. `shown` returns the pixels of those that must be
        computed."""
        found = {key: features for key in shown if (features := self.features.get(key)) is not None}
        todo = [(key, pixels()) for key, pixels in shown.items() if key not in found]
        ends = accumulate(pixels.patches for _, pixels in todo)
        for _, some in groupby(zip(todo, ends, strict=True), key=lambda one: one[1] // TOWER_PATCHES):
            keys, together = zip(*(one for one, _ in some), strict=True)
            made = self._decoder.features(together).split([pixels.count for pixels in together])
            for key, features in zip(keys, made, strict=True):
                # This is a copy, since a view would keep the features of all pictures in the same call alive.
                found[key] = features.clone()
                self.features.put(key, found[key], features.nbytes)
        return found
