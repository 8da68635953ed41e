"""Pictures: values in a step that name a media file, and the one function that makes them of untrusted bytes.

`Picture.of` decodes a file within limits, turns it upright, and encodes the pixels again as PNG (8-bit RGB).
Only that PNG is stored, sent to models and shown: no metadata, no colour profile and no second format of the source
file survives. The file's name is the SHA-256 of its bytes, and pictures are equal when their files are.
A `Video` is pictures with times. Files of video formats are never decoded.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast, get_args
from zlib import crc32

from pydantic import BaseModel, Field, GetCoreSchemaHandler, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import CoreSchema, ValidationError, core_schema

from .errors import BadPicture, MissingExtra, short_repr
from .value import Value

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray
    from PIL.Image import Image as PILImage
    from PIL.ImageFile import ImageFile

    Source = bytes | str | os.PathLike[str] | PILImage | NDArray[uint8]

MEDIA_NAME = r"[0-9a-f]{64}(\.[a-z0-9]{1,12})?"
"""A media file's name: the SHA-256 of its bytes, and a suffix."""
MediaNames = tuple[Annotated[str, Field(pattern=f"^{MEDIA_NAME}$")], ...]
RECORDED = {"recorded": True}
"""Validation context of content that was read from a tape."""
DATA_URL = re.compile("data:image/(png|jpe?g|webp);base64,", re.IGNORECASE)
MAX_BYTES = 20_000_000
"""Bytes of a file, before decoding and as PNG."""
MAX_PIXELS = 4096 * 4096
"""Checked on the size in the header, before any pixel is decoded: 10 kB of PNG can hold 230 MB of pixels."""
MAX_FRAMES, MAX_RATIO = 1_000_000, 200
"""Frames of a video. Longer side to shorter side; the image processors of vision models refuse more."""
MAX_PARTS, MAX_SCANS = 10_000, 32
"""Chunks of a PNG or segments of a JPEG, and scans of a JPEG. A scan decodes all pixels again; about 10 are usual."""
SECONDS = 0.7
"""CPU time for decoding one file; a photo with the most pixels takes some 0.2 s. The limits above bound the rest."""


class MediaReference(str):
    """Text that names a media file, `media:<SHA-256><suffix>`, as `Media.put` returns it.

    A step refers to a file by a field of this type; the same characters in any other field are only text. Text becomes
    a reference only in `Media.put` and when a tape is read: neither a model nor a page can make a run name files.
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
    """Validation context of a step from another process: the files that came with it, by name. Their hashes are
    checked: a reference to any other file is refused."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        for name, data in files.items():
            if name != (found := f"{sha256(data).hexdigest()}.png"):
                raise BadPicture(f"a picture sent as {name[:80]!r} holds other bytes: their name is {found}")
            with _decoding("a picture that another process sent"):
                _opened(data)[0].verify()  # the checksums of all chunks; decodes no pixel


class Picture(Value):
    """A picture in a step: `Picture.of(...)` makes it, a field of this type (or a tuple of them) holds it.

    The bytes travel with the object; a picture of a tape that was read from a run reads them when they are asked for.
    """

    media: MediaReference
    width: int = Field(ge=1)
    height: int = Field(ge=1)
    alt: str | None = Field(default=None, exclude_if=lambda alt: alt is None)
    """A description for people; no model reads it."""
    _data: bytes | None = PrivateAttr(default=None)
    _file: Callable[[str], bytes] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, source: Source, *, alt: str | None = None) -> Picture:
        """The picture in `source`: bytes of a PNG, JPEG or WebP file, a file's path, its data URL, a PIL image, or an
        array of bytes, (height, width) or (height, width, 1, 3 or 4).

        Transparent pixels are laid over white; 16 bits a channel become 8; CMYK, grey and palettes become RGB. Raises
        BadPicture, which names the reason and the remedy. Blocks for some 0.1 s a megapixel: in an event loop use
        `await Picture.read(...)`.
        """
        data, width, height = _normalised(source)
        picture = cls(
            media=MediaReference(f"media:{sha256(data).hexdigest()}.png"), width=width, height=height, alt=alt
        )
        picture._data = data
        return picture

    @classmethod
    async def read(cls, source: Source, *, alt: str | None = None) -> Picture:
        """As `of`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(_pool(), partial(cls.of, source, alt=alt))

    @model_validator(mode="after")
    def _with_bytes(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, Received):
            self._data = info.context[self.name]
            size = _size(self._data)
            if size != (self.width, self.height):
                raise ValueError(f"the file has {size[0]}x{size[1]} pixels, not {self.width}x{self.height}")
        return self

    @property
    def name(self) -> str:
        """The media file's name."""
        return self.media.name

    @property
    def data(self) -> bytes | None:
        """The PNG's bytes. Of a tape that was read from a run they are read from its file at each use, which blocks and
        raises NotATape for a missing file and Corrupt for a changed one. None: the bytes are unknown."""
        return self._file(self.name) if self._data is None and self._file is not None else self._data

    def in_run(self, file: Callable[[str], bytes] | None) -> None:
        """Read `data` from a run's files. file: gives the bytes of a file by its name; None if no run has the file."""
        self._file = file

    def __eq__(self, other: object) -> bool:
        """Without the bytes, which the name stands for: a recorded picture equals the one that is shown again."""
        return isinstance(other, Picture) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.media)

    def __str__(self) -> str:
        return f"[picture {self.width}x{self.height} {self.name[:12]}]"


class Video(Value):
    """Pictures with times, in a step: `Video.of(...)` makes it. Each frame is a file, as a picture's is."""

    frames: tuple[Picture, ...] = Field(fail_fast=True)
    """At least one; all of one size."""
    fps: float
    """Frames of the source in a second."""
    indices: tuple[int, ...] = Field(max_length=MAX_FRAMES)
    """The number of each frame in the source, from 0, rising."""

    @classmethod
    def of(
        cls, frames: Iterable[Picture | Source] | NDArray[uint8], *, fps: float, indices: Iterable[int] | None = None
    ) -> Video:
        """The video of these frames: pictures, or sources as `Picture.of` takes them; also an array of bytes (frames,
        height, width, 3). fps: frames of the source in a second. indices: the number of each frame in the source, by
        default 0, 1, 2, ... Raises BadPicture. Blocks: in an event loop use `await Video.read(...)`."""
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
        """As `of`, without blocking the event loop."""
        # One at a time, so that a long video leaves room for the pictures of others.
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
        """What stands for it in a task: the hash of the names of its frames, fps and indices. No file has this name."""
        return (
            f"{sha256(json.dumps([[f.name for f in self.frames], self.fps, self.indices]).encode()).hexdigest()}.video"
        )

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of each frame."""
        return tuple(index / self.fps for index in self.indices)

    def __str__(self) -> str:
        """Shows the hash of the first frame's file."""
        first, times = self.frames[0], self.times
        size = f"{len(times)} frames {first.width}x{first.height}"
        return f"[video {size} {times[0]:.1f}-{times[-1]:.1f} s {first.name[:12]}]"


Visual = Picture | Video
"""A picture or video in a step."""


def media_of(value: object) -> tuple[str, ...]:
    """Names of the media files that a step refers to, in the order of its fields."""
    # Asked of every step, and nearly none refers to a file: the class alone decides for most.
    return tuple(one.name for one in _files(value)) if _may_refer(type(value)) else ()


def pictures_of(value: object) -> tuple[Picture, ...]:
    """The pictures and the frames of videos in a step, in the order of its fields."""
    return tuple(one for one in _files(value) if isinstance(one, Picture)) if _may_refer(type(value)) else ()


def visuals_of(value: object) -> tuple[Visual, ...]:
    """The pictures and videos in a step, in the order of its fields."""
    try:
        return tuple(one for one in _walked(value) if isinstance(one, Visual)) if _may_refer(type(value)) else ()
    except RecursionError:
        raise ValueError("it is nested too deeply to be recorded") from None


def videos_in(content: object) -> Iterator[Video]:
    """The videos in the JSON of a step, whose class may not be imported."""
    if isinstance(content, dict) and content.keys() == Video.model_fields.keys():
        with suppress(ValueError):
            yield Video.model_validate(content, context=RECORDED)
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from videos_in(part)


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
    """Whether a value of this class may hold a reference; of a model, by the annotations of its fields."""
    if not issubclass(cls, BaseModel):
        return True
    left: list[object] = [field.annotation for field in cls.model_fields.values()]
    seen: list[object] = []  # a recursive type names itself
    while left:
        one = left.pop()
        if one in (Any, object) or isinstance(one, TypeVar):
            return True
        # A field of a model may hold any subclass of it, which may be defined later.
        if isinstance(one, type) and (issubclass(one, BaseModel | MediaReference | tuple) or is_dataclass(one)):
            return True
        if one not in seen:
            seen.append(one)
            left += [*get_args(one), getattr(one, "__value__", None)]
    return False


def swapped(value: object, by: Callable[[str | Visual], object]) -> object:
    """A value of JSON, pictures and videos, with `by(leaf)` for each text, picture and video."""
    if isinstance(value, dict):
        return {key: swapped(one, by) for key, one in value.items()}
    if isinstance(value, list):
        return [swapped(one, by) for one in value]
    return by(value) if isinstance(value, str | Visual) else value


# Making them


@cache
def _pool() -> ThreadPoolExecutor:
    """Decodes for event loops. In the pool of a loop, pictures would delay all else that waits there."""
    return ThreadPoolExecutor(2, thread_name_prefix="tapereel-picture")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of the threads


def _frames(frames: Any) -> Iterable[Any]:
    """The frames of a video, as sources. BadPicture for a file and for an array of another shape."""
    shape = getattr(frames, "shape", None)
    if isinstance(frames, str | bytes | os.PathLike):
        raise BadPicture(f"{_named(frames)} is one file, and video files are not decoded: pass the frames")
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


def _normalised(source: object) -> tuple[bytes, int, int]:
    """(the bytes of the PNG, width, height)."""
    with _decoding(_named(source)):
        if isinstance(source, bytes | str | os.PathLike):
            rgb = decoded(_bytes_of(source))
        else:
            image = _image_of(source)
            rgb = _rgb(image, image.getexif().get(0x0112, 1))
        if rgb.width * rgb.height * 3 > 1.5 * MAX_BYTES:  # each eighth row tells noise from a photo
            rgb.resize((rgb.width, rgb.height // 8), 0).save(rows := io.BytesIO(), "PNG", compress_level=4)
            _check_bytes(8 * rows.tell(), 1.5)
        # At the default level 6, a photo of 12 megapixels takes up to 5.4 s of CPU time; at 4, 1.7 s and as many bytes.
        rgb.save(written := io.BytesIO(), "PNG", compress_level=4)
        _check_bytes(written.tell())
    return written.getvalue(), rgb.width, rgb.height


def _check_bytes(size: int, slack: float = 1) -> None:
    if size > slack * MAX_BYTES:
        raise BadPicture(f"has some {size:,} bytes as PNG, and the limit is {MAX_BYTES:,}: make it smaller")


class _Timed(io.BytesIO):
    """A file to read that bounds the CPU time of its thread. Decoders of PNG and JPEG read in pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._end = time.thread_time() + SECONDS

    def read(self, size: int | None = -1) -> bytes:
        if time.thread_time() > self._end:
            raise BadPicture(f"takes more than {SECONDS:g} s of CPU time to decode: save it again")
        return super().read(size)


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Every exception of Pillow becomes a BadPicture: it raises many types."""
    try:
        yield
    except BadPicture as error:
        raise BadPicture(f"{what} {error}") from error.__cause__
    except MissingExtra:
        raise
    except Exception as error:
        raise BadPicture(f"{what} can't be decoded ({str(error) or error!r:.200}): save it again") from error


def _named(source: object) -> str:
    """How an error names the source."""
    if isinstance(source, bytes):
        return f"a picture of {len(source):,} bytes"
    if isinstance(source, str) and DATA_URL.match(source):
        return f"a picture in a data URL of {len(source):,} characters"
    if isinstance(source, str | os.PathLike):
        return f"the file {os.fspath(source)[:100]!r}"
    return f"a picture given as {type(source).__qualname__}"


def _bytes_of(source: bytes | str | os.PathLike[str]) -> bytes:
    if isinstance(source, bytes):
        return source
    text = os.fspath(source)
    if DATA_URL.match(text):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except ValueError as error:
            raise BadPicture(f"is not base64 ({error}): send all of it") from error
    if "://" in text or text[:5].lower() == "data:":
        raise BadPicture("is a URL, which is never fetched: pass the file's bytes, or data:image/png;base64,...")
    path = Path(text)
    if not path.is_file():  # a pipe or a device would be read for ever
        raise BadPicture("isn't a file: pass the path of a PNG, JPEG or WebP file")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def decoded(data: bytes) -> PILImage:
    """The upright pixels of a file, as 8-bit RGB. BadPicture; other errors of Pillow for damaged files."""
    image, orientation = _opened(data)
    file = cast(IO[bytes], image.fp)
    image.load()
    file.read(0)  # looks at the time again: the decoder of WebP reads all of the file at once
    return _rgb(image, orientation)


def _opened(data: bytes) -> tuple[ImageFile, int]:
    """(the image in a file, of which the header alone is read; its orientation). Raises as `decoded`."""
    _pillow()
    from PIL import JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    if len(data) > MAX_BYTES:
        raise BadPicture(f"has more than {MAX_BYTES:,} bytes, the limit of a file: make it smaller")
    # Not `Image.open`, which prints warnings.
    if data.startswith((_PNG, b"\xff\xd8\xff")):
        pixels, exif = _stripped(data)
        png = data.startswith(_PNG)
        image = (PngImagePlugin.PngImageFile if png else JpegImagePlugin.JpegImageFile)(_Timed(pixels))
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        image = WebPImagePlugin.WebPImageFile(_Timed(data))
        exif = image.info.get("exif", b"")
    else:
        found = f"it begins with {data[:12]!r}" if data else "it is empty"
        raise BadPicture(f"isn't a PNG, JPEG or WebP file ({found}): save it again as PNG")
    in_xmp = re.search(rb'tiff:Orientation(?:="|>)([1-8])', data)
    _checked(image)
    return image, _orientation(exif) or (int(in_xmp[1]) if in_xmp else 1)


_PNG = b"\x89PNG\r\n\x1a\n"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""The beginning of a JPEG's segment, also behind the pixels of a scan."""


def _stripped(data: bytes) -> tuple[bytes, bytes]:
    """(a PNG or JPEG without its metadata, its Exif data). Pillow joins the metadata of a JPEG in time that grows with
    the square of its segments, and refuses a PNG for a profile that is large or damaged."""
    png, kept, last, scans, exif = data.startswith(_PNG), list[bytes](), 0, 0, b""
    at, palette = (8, data[25:26] == b"\3") if png else (2, False)
    for _ in range(MAX_PARTS):
        if png:
            start, kind = at, data[at + 4 : at + 8]
            at += 12 + int.from_bytes(data[at : at + 4])
            content = data[start + 8 : at - 4]
            # Browsers ignore a chunk with a wrong checksum. Pillow checks only the pixels' chunks.
            sound = crc32(kind + content) == int.from_bytes(data[at - 4 : at])
            pixels = kind in (b"IHDR", b"PLTE", b"IDAT", b"IEND") or (sound and kind == b"tRNS")
            palette &= kind != b"PLTE"
            if sound and kind == b"acTL" and 1 < int.from_bytes(content[:4]) < 1 << 31:
                raise BadPicture(f"has {int.from_bytes(content[:4]):,} frames: pass each frame as a picture")
            exif = content if sound and kind == b"eXIf" else exif
        else:
            found = _MARKER.search(data, at)
            start, kind = (len(data), b"\xd9") if found is None else (found.start(), found[0][1:])
            at = start + 2 + (0 if kind in b"\x01\xd8\xd9" else int.from_bytes(data[start + 2 : start + 4]))
            content = data[start + 4 : at] if kind == b"\xe1" else b""
            pixels = (not b"\xe1" <= kind <= b"\xef" and kind != b"\xfe") or kind == b"\xee"  # Adobe's, on colours
            scans += kind == b"\xda"
            if scans > MAX_SCANS or kind in b"\xc3\xc5\xc6\xc7\xc9\xca\xcb\xcd\xce\xcf":
                raise BadPicture(f"is a JPEG with over {MAX_SCANS} scans, or of a kind that is rare: save it again")
            exif = content if not exif and content.startswith(b"Exif\0\0") else exif
        kept.append(data[last : at if pixels else start])
        last = at
        if at >= len(data) or kind in (b"IEND", b"\xd9"):
            break
    else:
        raise BadPicture(f"has more than {MAX_PARTS:,} chunks or segments: save it again")
    if palette:
        raise BadPicture("has no palette (PLTE), and its pixels are numbers in one: save it again")
    return b"".join(kept), exif


def _orientation(exif: bytes) -> int | None:
    """The orientation in Exif data. Pillow would copy each of up to 65,535 values, which may all be the whole data."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order: Any = "little" if tiff[:2] == b"II" else "big"

    def number(at: int, size: int = 2) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    first = number(4, 4) + 2
    entries = range(first, first + 12 * number(first - 2), 12)
    found = (number(at + 8, 4 if number(at + 2) == 4 else 2) for at in entries if number(at) == 0x0112)
    return next(found, None)


def _image_of(source: object) -> PILImage:
    """A PIL image, or the image in an array."""
    Image = _pillow()
    if isinstance(source, Image.Image):
        return _checked(cast("PILImage", source))
    layout = getattr(source, "__array_interface__", None)
    if not isinstance(layout, dict):
        raise BadPicture("is not bytes, a path, a PIL image or a NumPy array: convert it to one of them")
    shape, kind = layout["shape"], layout["typestr"]
    if kind != "|u1":
        raise BadPicture(f"has values of type {kind}, not uint8: scale it to 0...255 and use .astype('uint8')")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        raise BadPicture(f"has the shape {shape}, not (height, width) or (height, width, 1, 3 or 4): transpose it")
    _check_size(shape[1], shape[0])
    array: Any = source
    return Image.fromarray(array[:, :, 0] if len(shape) == 3 and shape[2] == 1 else array)


def _checked(image: PILImage) -> PILImage:
    _check_size(*image.size)
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # MPO: a camera's JPEG with a second view behind it, which is left out
        raise BadPicture(f"has {frames:,} frames, and a picture has one: pass each frame as a picture")
    return image


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise BadPicture(f"has {width}x{height} pixels: both sides must be at least 1")
    if width * height > MAX_PIXELS:
        raise BadPicture(f"has {width}x{height} pixels, and the limit is {MAX_PIXELS:,} in all: make it smaller")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadPicture(f"has {width}x{height} pixels, and no side may be over {MAX_RATIO} times the other: crop it")


def _rgb(image: PILImage, orientation: int) -> PILImage:
    """The upright pixels as 8-bit RGB, in a new image, which has no metadata."""
    Image = _pillow()
    turn = _TURNS.get(orientation)
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")  # `convert` alone would clip at 255
    elif image.mode in ("I", "F"):
        raise BadPicture(f"has 32 bits a pixel (mode {image.mode}), and its value for white is unknown: make it 8")
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        rgb = Image.new("RGB", image.size, "white")
        rgb.paste(clear, mask=clear.getchannel("A"))
    else:
        rgb = image.convert("RGB")
        rgb.info = {}
    return rgb.transpose(Image.Transpose(turn)) if turn is not None else rgb


_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF orientation -> `PIL.Image.Transpose`: flips, rotations by 90 degrees, and both diagonals."""


def _size(data: bytes) -> tuple[int, int]:
    """Width and height in the header of a PNG."""
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "pictures", "a picture") from error
    return Image
