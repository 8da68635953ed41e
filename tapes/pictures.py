"""Pictures and videos: values in a step that name media files.

`Picture.of` decodes a file within limits (see `decoding`), turns the image upright, and encodes its pixels again as an
8-bit RGB PNG. Only this PNG is stored, sent to models and shown. It has no metadata or colour profile from the source,
and can't also be read as another file format. The PNG is named after the SHA-256 of its bytes, and pictures with equal
PNGs are equal. A `Video` is a sequence of pictures with times. Files in video formats are never decoded.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, Field, GetCoreSchemaHandler, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import CoreSchema, ValidationError, core_schema

from .decoding import as_png, decoding, opened, png_size, source_name
from .errors import BadPicture, short_repr
from .value import Value

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray

    from .decoding import Source

MEDIA_NAME = r"[0-9a-f]{64}(\.[a-z0-9]{1,12})?"
"""Pattern of a media file's name: the SHA-256 of the file's bytes and a suffix."""
MediaNames = tuple[Annotated[str, Field(pattern=f"^{MEDIA_NAME}$")], ...]
MAX_FRAMES = 1_000_000
"""Maximum number of frames in a video."""
RECORDED = {"recorded": True}
"""Pydantic's validation context for content that was read from a tape. Only there may plain text become a
`MediaReference`, as in `Picture.model_validate(content, context=RECORDED)`."""


class MediaReference(str):
    """Text that names a media file in the form `media:<SHA-256><suffix>`, as returned by `Media.put`.

    A step refers to a file through a field of this type. In any other field, the same characters are just text. Only
    Tapereel's own code turns text into a reference, so no model or web page can make a run refer to files.
    """

    @property
    def name(self) -> str:
        """The file's name."""
        return self.removeprefix("media:")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(
            value: object, as_text: core_schema.ValidatorFunctionWrapHandler, info: core_schema.ValidationInfo
        ) -> MediaReference:
            sent = isinstance(info.context, Received) and str(value).removeprefix("media:") in info.context
            if not isinstance(value, cls) and info.context is not RECORDED and not sent:
                raise ValueError(
                    f"{short_repr(value)} is a {type(value).__name__}, not a media reference: use the value that "
                    "Media.put returned"
                )
            return cls(as_text(value))

        text = core_schema.str_schema(pattern=f"^media:{MEDIA_NAME}$")
        return core_schema.with_info_wrap_validator_function(check, text, serialization=text)


class Received(dict[str, bytes]):
    """Pydantic's validation context for a step from another process. It maps the names of the files that came with the
    step to their bytes. The bytes are checked against the hash in the name, and references to other files are
    rejected."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        for name, data in files.items():
            if name != (found := f"{sha256(data).hexdigest()}.png"):
                raise BadPicture(f"a picture sent as {name[:80]!r} holds other bytes: their name is {found}")
            with decoding("a picture that another process sent"):
                opened(data)[0].verify()  # checks the checksums of all chunks and decodes no pixel


class Picture(Value):
    """A picture in a step. Create one with `Picture.of(...)`, and store it in a field of this type or in a tuple.

    A new picture holds its bytes. On a tape that was read from a run, the bytes are read from the file when requested.
    """

    media: MediaReference
    width: int = Field(ge=1)
    height: int = Field(ge=1)
    alt: str | None = Field(default=None, exclude_if=lambda alt: alt is None)
    """A description for people. No model reads it."""
    _data: bytes | None = PrivateAttr(default=None)
    _file: Callable[[str], bytes] | None = PrivateAttr(default=None)

    def __deepcopy__(self, memo: object = None) -> Self:
        return self  # it never changes, and its file belongs to a store

    @classmethod
    def of(cls, source: Source, *, alt: str | None = None) -> Picture:
        """Create a picture from `source`: the bytes of a PNG, JPEG or WebP file, its path, its data URL, a PIL image,
        or an array of bytes with the shape (height, width) or (height, width, 1, 3 or 4).

        Transparent pixels are laid over white, 16-bit channels are reduced to 8 bits, and CMYK, grey and palette images
        are converted to RGB. Raises BadPicture, which names the reason and the remedy. Blocks for about 0.1 s per
        megapixel, so use `await Picture.read(...)` in an event loop.
        """
        data, width, height = as_png(source)
        picture = cls(
            media=MediaReference(f"media:{sha256(data).hexdigest()}.png"), width=width, height=height, alt=alt
        )
        picture._data = data
        return picture

    @classmethod
    async def read(cls, source: Source, *, alt: str | None = None) -> Picture:
        """Create a picture as `of` does, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(_pool(), partial(cls.of, source, alt=alt))

    @model_validator(mode="after")
    def _with_bytes(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, Received):
            self._data = info.context[self.name]
            size = png_size(self._data)
            if size != (self.width, self.height):
                raise ValueError(f"the file has {size[0]}x{size[1]} pixels, not {self.width}x{self.height}")
        return self

    @property
    def name(self) -> str:
        """The name of the media file."""
        return self.media.name

    @property
    def data(self) -> bytes | None:
        """The PNG's bytes, or None if they are unknown. On a tape that was read from a run, each access reads the
        picture's file, and blocks meanwhile. Raises NotATape if the file is missing, and Corrupt if the file has
        changed."""
        return self._file(self.name) if self._data is None and self._file is not None else self._data

    def in_run(self, file: Callable[[str], bytes] | None) -> None:
        """Let `data` read the picture from a run. `file(name)` returns the bytes of a media file in the run. It is None
        for a picture outside a run."""
        self._file = file

    def __eq__(self, other: object) -> bool:
        """Compare all fields except the bytes. The name is the hash of the bytes, so a picture that was read from a
        tape equals its original."""
        return isinstance(other, Picture) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.media)

    def __str__(self) -> str:
        return f"[picture {self.width}x{self.height} {self.name[:12]}]"


class Video(Value):
    """A sequence of pictures with times in a step. Create one with `Video.of(...)`. Each frame is stored as a file,
    like a picture."""

    frames: tuple[Picture, ...] = Field(fail_fast=True)
    """At least one frame. All frames have the same size."""
    fps: float
    """Frames per second of the source."""
    indices: tuple[int, ...] = Field(max_length=MAX_FRAMES)
    """The number of each frame in the source, counted from 0, in increasing order."""

    @classmethod
    def of(
        cls, frames: Iterable[Picture | Source] | NDArray[uint8], *, fps: float, indices: Iterable[int] | None = None
    ) -> Video:
        """Create a video from frames: pictures, sources that `Picture.of` accepts, or an array of bytes with the shape
        (frames, height, width, 3). `fps` is the source's number of frames per second. `indices` gives the number of
        each frame in the source, by default 0, 1, 2, ... Raises BadPicture if these values make no valid video. This
        call blocks, so use `await Video.read(...)` in an event loop."""
        pictures = [_frame(i, frame) for i, frame in enumerate(_frames(frames))]
        try:
            given = range(len(pictures)) if indices is None else map(operator.index, indices)
            numbers = tuple(islice(given, len(pictures) + 1))
        except TypeError as error:
            raise BadPicture(f"a video has the indices {short_repr(indices)}: give whole numbers") from error
        try:
            return cls(frames=tuple(pictures), fps=fps, indices=numbers)
        except ValidationError as error:
            problem = error.errors()[0]
            said = [*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")]
            raise BadPicture(
                f"{': '.join(said)}{f', not {short_repr(fps)}' if problem['loc'] == ('fps',) else ''}"
            ) from error

    @classmethod
    async def read(
        cls, frames: Iterable[Picture | Source] | NDArray[uint8], *, fps: float, indices: Iterable[int] | None = None
    ) -> Video:
        """Create a video as `of` does, without blocking the event loop."""
        # Decode one frame at a time, so that a long video doesn't block the pictures of other episodes.
        later = asyncio.get_running_loop().run_in_executor
        pictures = [await later(_pool(), _frame, i, frame) for i, frame in enumerate(_frames(frames))]
        return cls.of(pictures, fps=fps, indices=indices)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        sizes = list(dict.fromkeys(f"{frame.width}x{frame.height}" for frame in self.frames))
        if not sizes:
            raise ValueError("a video has no frames: pass at least one")
        if len(sizes) > 1:
            raise ValueError(f"a video has frames of {sizes[0]} and of {sizes[1]} pixels: resize them to one size")
        if not 0 < self.fps < float("inf"):
            raise ValueError(f"a video has fps={self.fps}: give the frames of its source in a second, as fps=30")
        if len(self.indices) != len(self.frames):
            raise ValueError(
                f"a video has {len(self.frames)} frames and {len(self.indices)} indices: give one for each"
            )
        if any(b <= a for a, b in pairwise((-1, *self.indices))):
            raise ValueError(f"a video has the indices {short_repr(self.indices)}: they must rise, from 0 or above")
        with suppress(OverflowError):
            if self.times[-1] < float("inf"):
                return self
        raise ValueError(f"a video's index {short_repr(self.indices[-1])} at fps={self.fps} is at too large a time")

    @property
    def name(self) -> str:
        """The video's name in a task: a hash of its frames' names, `fps` and `indices`. No file has this name."""
        return (
            f"{sha256(json.dumps([[f.name for f in self.frames], self.fps, self.indices]).encode()).hexdigest()}.video"
        )

    @property
    def times(self) -> tuple[float, ...]:
        """The time of each frame in seconds."""
        return tuple(index / self.fps for index in self.indices)

    def __str__(self) -> str:
        """Show the video with the hash of its first frame's file."""
        first, times = self.frames[0], self.times
        size = f"{len(times)} frames {first.width}x{first.height}"
        return f"[video {size} {times[0]:.1f}-{times[-1]:.1f} s {first.name[:12]}]"


Visual = Picture | Video
"""A picture or a video in a step."""


def media_of(value: object) -> tuple[str, ...]:
    """Return the names of the media files that a step refers to, in the order of its fields."""
    # This runs for every step, and few steps refer to a file. For most steps, the class alone gives the answer.
    return tuple(one.name for one in _files(value)) if _may_refer(type(value)) else ()


def pictures_of(value: object) -> tuple[Picture, ...]:
    """Return the pictures and the frames of videos in a step, in the order of its fields."""
    return tuple(one for one in _files(value) if isinstance(one, Picture)) if _may_refer(type(value)) else ()


def visuals_of(value: object) -> tuple[Visual, ...]:
    """Return the pictures and videos in a step, in the order of its fields."""
    try:
        return tuple(one for one in _walked(value) if isinstance(one, Visual)) if _may_refer(type(value)) else ()
    except RecursionError:
        raise ValueError(f"a {type(value).__qualname__} is nested too deeply to be recorded") from None


def with_visuals(content: object) -> object:
    """Return the JSON of a step with its pictures and videos as values and its lists as tuples, even if the step's
    class isn't imported."""
    if isinstance(content, list):
        return tuple(with_visuals(part) for part in content)
    if not isinstance(content, dict):
        return content
    for cls, keys in ((Picture, content.keys() | {"alt"}), (Video, content.keys())):
        if keys == cls.model_fields.keys():
            with suppress(ValueError):
                return cls.model_validate(content, context=RECORDED)
    return {name: with_visuals(part) for name, part in content.items()}


def videos_in(content: object) -> Iterator[Video]:
    """Yield the videos in the JSON of a step, even if the step's class isn't imported."""
    return (one for one in _walked(with_visuals(content)) if isinstance(one, Video))


def _files(value: object) -> Iterator[MediaReference | Picture]:
    for one in _walked(value):
        yield from one.frames if isinstance(one, Video) else (one,)


def _walked(value: object) -> Iterator[MediaReference | Visual]:
    if isinstance(value, MediaReference | Visual):
        yield value
    elif isinstance(value, BaseModel):
        if _may_refer(type(value)):
            yield from _walked(value.__dict__)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _walked(part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _walked(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _walked(getattr(value, one.name, None))


@cache
def _may_refer(cls: type) -> bool:
    """Return whether a value of this class may refer to a media file. For a pydantic model, the types of its fields
    decide."""
    if not issubclass(cls, BaseModel):
        return True
    left: list[object] = [field.annotation for field in cls.model_fields.values()]
    seen: list[object] = []  # a recursive type names itself
    while left:
        one = left.pop()
        if one in (Any, object) or isinstance(one, TypeVar):
            return True
        # A field of a model may hold any subclass of its type, and the subclass may be defined later.
        if isinstance(one, type) and (issubclass(one, BaseModel | MediaReference | tuple) or is_dataclass(one)):
            return True
        if one not in seen:
            seen.append(one)
            left += [*get_args(one), getattr(one, "__value__", None)]
    return False


def swapped(value: object, by: Callable[[str | Visual], object]) -> object:
    """Return a copy of a JSON value. Each string, picture or video `leaf` in it is replaced by `by(leaf)`."""
    if isinstance(value, dict):
        return {key: swapped(one, by) for key, one in value.items()}
    if isinstance(value, list):
        return [swapped(one, by) for one in value]
    return by(value) if isinstance(value, str | Visual) else value


# Creating pictures and videos


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the thread pool in which `Picture.read` and `Video.read` decode. In an event loop's own pool, decoding
    would delay all other work."""
    return ThreadPoolExecutor(2, thread_name_prefix="tapereel-picture")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads


def _frames(frames: Any) -> Iterable[Any]:
    """Return `frames` unchanged. Raises BadPicture for a single file and for an array without 4 dimensions."""
    shape = getattr(frames, "shape", None)
    if isinstance(frames, str | bytes | os.PathLike):
        raise BadPicture(f"{source_name(frames)} is one file, and video files are not decoded: pass the frames")
    if shape is not None and len(shape) != 4:
        raise BadPicture(f"an array of frames has the shape {shape}, not (frames, height, width, 3): transpose it")
    if not isinstance(frames, Iterable):
        raise BadPicture(f"the frames of a video are {short_repr(frames)}: pass a list of pictures, or an array")
    return frames


def _frame(i: int, frame: Picture | Source) -> Picture:
    try:
        return frame if isinstance(frame, Picture) else Picture.of(frame)
    except BadPicture as error:
        raise BadPicture(f"frame {i} of a video: {error}") from error
