"""Checks the places of pictures in each prompt, which are the ranges of tokens that stand for them. The places must fit
the pictures in the prompt's messages, and the tape must have these pictures. Verification of a run uses this module.

No model is loaded, so the tokens at a place can only be checked against the size of the picture. A processor produces
the same grid and ids for all pictures of one size, and a picture's first and last id are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import isqrt, prod
from typing import NamedTuple

from pydantic_core import from_json

from .messages import image_parts, video_in, visual_parts
from .pictures import Video, videos_in
from .places import Place
from .records import Begin, Call, Message, StepRecord


class Shown(NamedTuple):
    """The pictures that one record shows. No other record is needed to find them."""

    sizes: tuple[tuple[str, int, int], ...]
    """The recorded sizes of pictures, as (file, width, height)."""
    media: tuple[str, ...]
    """Names of the media files in the record."""
    videos: tuple[str, ...] = ()
    """Names (`_named`) of the videos in a step."""
    asked: Asked | None = None
    begun: tuple[str | None, str] | None = None
    """The id of the parent tape and the hash of the picture processor, in a `begin`."""


class Asked(NamedTuple):
    """The pictures in the prompt of a call."""

    call: str
    by: str
    base: str | None
    keep: int
    keep_messages: int
    cut: int
    parts: list[tuple[int, Message]]
    """The call's own pictures and videos, each as (message index, content part)."""
    places: tuple[Place, ...]
    """The call's own places."""
    tokens: list[tuple[bytes, bool, bool]]
    """For each of these places: hash of its ids, whether these ids are all equal, whether the first and last id are
    plausible."""


def shown_in(record: Begin | StepRecord | Call) -> Shown | None:
    """Return the pictures in a record. None means that the record has none and that nothing depends on it."""
    if record.t == "call":
        return _shown_in_call(record)
    media = record.media
    if record.t == "step" and not media:
        return None
    # The class of a step may not have been imported, so the step's JSON is read instead.
    content = from_json(record.body()) if media else None
    sizes = tuple(_sizes(content))
    if record.t == "step":
        return Shown(sizes, media, tuple(_named(video) for video in videos_in(content)))
    parent = record.parent.tape if record.parent is not None else None
    return Shown(sizes, media, begun=(parent, record.versions.get("processor", "")))


def _shown_in_call(call: Call) -> Shown | None:
    parts = [(i, part) for i, one in enumerate(call.new_messages, call.keep_messages) for part in visual_parts([one])]
    if not parts and not call.places and not call.media and call.base is None:
        return None
    sizes = tuple(_sizes([part for _, part in parts]))
    if call.new_prompt is None:
        return Shown(sizes, call.media)
    tokens = list[tuple[bytes, bool, bool]]()
    for place in call.places:
        start, end = place.offset - call.keep, place.end - call.keep
        ids = call.new_prompt[start:end]
        run, around = len(set(ids)) == 1, [*call.new_prompt[:start][-1:], *call.new_prompt[end : end + 1]]
        ends = place.kind == "video" or (ids[0] == ids[-1] and not (run and ids[0] in around))
        tokens.append((sha256(ids).digest(), run, ends))
    base, keep, kept = call.base, call.keep, call.keep_messages
    asked = Asked(call.call, call.by, base, keep, kept, call.cut, parts, call.places, tokens)
    return Shown(sizes, call.media, asked=asked)


class PlaceChecks:
    """Compares the pictures in each prompt with those in its tape, and at last with the files."""

    def __init__(self) -> None:
        self._shown: dict[str, frozenset[str]] = {}
        """Names (`_named`) of the pictures in each tape's steps and requests. A fork of an unread tape has no entry."""
        self._sizes: dict[tuple[str, int, int], str] = {}
        """The recorded sizes of pictures, as (file, width, height). The value is a tape that recorded the size."""
        self._placed: list[tuple[str, str, Place, bytes, bool, bool]] = []
        """One tuple for each place: (call, processor and agent, place, and the values in `Asked.tokens`)."""
        self._processors: dict[str, str] = {}
        self._calls: dict[str, tuple[list[tuple[int, Message]], list[Place]]] = {}
        """For each call with pictures: its pictures and videos, each as (message index, content part), and the places
        in its prompt."""

    def add(self, tape: str, shown: Shown) -> list[str]:
        """Add the pictures in a record of this tape, and return a sentence for each disagreement."""
        self._sizes |= dict.fromkeys(shown.sizes, tape)
        if shown.begun is not None:
            parent, self._processors[tape] = shown.begun
            above = self._shown.get(parent) if parent is not None else frozenset[str]()
            if above is not None:
                self._shown[tape] = above
            return []
        known = self._shown.get(tape)
        if known is None:
            return []
        self._shown[tape] = known = known.union(shown.media, shown.videos)
        return self._ask(tape, known, shown.asked) if shown.asked is not None else []

    def _ask(self, tape: str, known: frozenset[str], own: Asked) -> list[str]:
        asked, places = self._calls.get(own.base, ([], [])) if own.base is not None else ([], [])
        asked = [*(one for one in asked if one[0] < own.keep_messages), *own.parts]
        places = [*(place for place in places if place.end <= own.keep), *own.places]
        if not asked and not places:
            return []
        self._calls[own.call] = asked, places
        by = f"{self._processors.get(tape)} {own.by}"
        self._placed += [(own.call, by, place, *ids) for place, ids in zip(own.places, own.tokens, strict=True)]
        # A renderer represents either every video as one place or every video as separate frames.
        parts: list[Message] = [part for _, part in asked]
        if not any(place.kind == "video" for place in places):
            parts = image_parts([{"content": parts}])
        read = [_named(video) if (video := video_in(part)) else str(part.get("media")) for part in parts]
        names = [_named(place) for place in places]
        if known.issuperset(names) and (read == names or own.cut):
            return []
        return [
            f"call {own.call} has the pictures {names} in its prompt, {read} in its messages, {sorted(known)} shown"
        ]

    def check(self, sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """Yield a sentence for each disagreement with the files. `sizes` has (width, height) from each header."""
        for (name, *said), tape in self._sizes.items():
            if tuple(said) != (size := sizes.get(name, tuple(said))):
                yield f"tape {tape} records {said[0]}x{said[1]} pixels for the picture {name}; its file has {size}"
        first: dict[tuple[object, ...], object] = {}
        for call, by, place, ids, run, ends in self._placed:
            width, height = size = sizes.get(place.media[0], (0, 0))
            grid, known = place.grid, (by, place.kind, place.times, size) if any(size) else (place,)
            fits = ends and first.setdefault(known, (grid, ids)) == (grid, ids)
            if run:  # a processor merges a square of patches into one token
                fits &= isqrt(max(prod(grid), 0) // place.length) ** 2 * place.length == prod(grid)
            tall, wide = (0, 0, *grid)[-2:]
            if not fits or (tall - wide) * (height - width) < 0:
                yield (
                    f"call {call} has the {place.kind} {place.media[0]} at {place.length} tokens from {place.offset} "
                    f"with the grid {grid}, which doesn't fit its tokens or the size {size} of the file"
                )


def _sizes(content: object) -> Iterator[tuple[str, int, int]]:
    """Yield (file, width, height) for each picture in a JSON value."""
    match content:
        case {"media": str(name), "width": int(width), "height": int(height)}:
            yield name.removeprefix("media:"), width, height
        case dict() | list():
            for part in content.values() if isinstance(content, dict) else content:
                yield from _sizes(part)
        case _:
            pass


def _named(shown: Place | Video) -> str:
    """Return the file names of a picture or video as one string. For a video, add the time of each frame in seconds."""
    names = shown.media if isinstance(shown, Place) else [frame.name for frame in shown.frames]
    return " ".join([*names, *(f"{seconds!r} s" for seconds in shown.times)])
