"""The embedded engine's caches between requests: KV of conversations, and pixels and features of pictures."""

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
"""Maximum size in bytes of each of the two caches for pictures (pixels and features)."""
TOWER_PATCHES = 1 << 14
"""After this many patches, the next picture goes to a new call of the vision tower. This bounds the tower's memory."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds values by key. Their sizes add up to at most `budget`. The least recently used value is evicted first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None if the key is missing."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key, (None, 0))[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Store `value`, and evict values until all sizes fit the budget."""
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
    """One key for each token, from `tapes.places.keys`. Two tokens have equal keys if their ids and pictures are
    equal."""
    places: tuple[Place, ...]
    kv: Tensor


class ParkingLot(BoundedCache[str, Parked]):
    """Holds the KV of conversations, with at most `budget` tokens in total."""

    def find(
        self, key: str, keys: NDArray[np.int64], places: tuple[Place, ...], most: int
    ) -> tuple[Parked | None, int]:
        """Return the entry under `key`, and the number of its first tokens that a prompt can reuse, which is at most
        `most`. `keys` and `places` describe the prompt. The reused tokens are equal in both, and never end inside a
        picture."""
        entry = self.get(key)
        if entry is None:
            return None, 0
        return entry, shared_length(entry.keys, keys, (*entry.places, *places), most)


class PictureFeatures:
    """Holds pixels and features of the pictures in an engine's requests, by `Place.key`."""

    def __init__(self, decoder: SlotDecoder, vision: Vision) -> None:
        self.vision = vision
        self.features = BoundedCache[int, Tensor](CACHE_BYTES)
        """Features computed by the current weights. This cache must be cleared when the weights change."""
        self._decoder = decoder
        self._pixels = BoundedCache[int, Pixels](CACHE_BYTES)
        self._processing = Lock()

    def pixels(self, place: Place, file: Callable[[str], bytes]) -> Pixels:
        """Return a picture's pixels, as `Vision.pixels` does. May be called in threads. A picture that several requests
        show is processed only once."""
        with self._processing:
            found = self._pixels.get(place.key)
            if found is None:
                found = self.vision.pixels(place, file)
                self._pixels.put(place.key, found, sum(tensor.nbytes for tensor in found.tensors.values()))
            return found

    def of(self, shown: Mapping[int, Callable[[], Pixels]]) -> dict[int, Tensor]:
        """Return the features of each picture, of shape (count, levels, D), by key. For each picture, `shown` has a
        function that returns the pixels. It is called only if the cache doesn't have the features."""
        found = {key: features for key in shown if (features := self.features.get(key)) is not None}
        todo = [(key, pixels()) for key, pixels in shown.items() if key not in found]
        ends = accumulate(pixels.patches for _, pixels in todo)
        for _, some in groupby(zip(todo, ends, strict=True), key=lambda one: one[1] // TOWER_PATCHES):
            keys, together = zip(*(one for one, _ in some), strict=True)
            made = self._decoder.features(together).split([pixels.count for pixels in together])
            for key, features in zip(keys, made, strict=True):
                # Copied, because a view would keep the features of all pictures in this call in memory.
                found[key] = features.clone()
                self.features.put(key, found[key], features.nbytes)
        return found
