"""Decodes untrusted picture files within limits, and encodes their pixels as PNG.

Every error is a BadPicture that names the source. Before the pixels are decoded, only the size in the file's header is
trusted. The CPU time for each file is limited.
"""

from __future__ import annotations

import base64
import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from zlib import crc32

from .errors import BadPicture, MissingExtra

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray
    from PIL.Image import Image as PILImage
    from PIL.ImageFile import ImageFile

    Source = bytes | str | os.PathLike[str] | PILImage | NDArray[uint8]

DATA_URL = re.compile("data:image/(png|jpe?g|webp);base64,", re.IGNORECASE)
MAX_BYTES = 20_000_000
"""Maximum size in bytes of a picture file, and of the PNG that is made from it."""
MAX_PIXELS = 4096 * 4096
"""Maximum number of pixels in a picture. The size in the file's header is checked before any pixel is decoded, because
10 kB of PNG can hold 230 MB of pixels."""
MAX_RATIO = 200
"""Maximum ratio of the longer side to the shorter side. The image processors of vision models reject more."""
MAX_PARTS, MAX_SCANS = 10_000, 32
"""Limits on the structure of a file: the number of its parts (chunks of a PNG, segments of a JPEG), and the number of
scans in a JPEG. Each scan decodes all pixels again. JPEGs usually have about 10 scans."""
SECONDS = 0.7
"""Maximum CPU seconds for decoding one file. The largest photo takes about 0.2 s. The limits above bound all other
work."""


def as_png(source: object) -> tuple[bytes, int, int]:
    """Return the source as (bytes of the PNG, width, height)."""
    with decoding(source_name(source)):
        if isinstance(source, bytes | str | os.PathLike):
            rgb = decoded(_bytes_of(source))
        else:
            image = _image_of(source)
            rgb = _rgb(image, image.getexif().get(0x0112, 1))
        if rgb.width * rgb.height * 3 > 1.5 * MAX_BYTES:  # estimate the PNG's size from every eighth row
            rgb.resize((rgb.width, rgb.height // 8), 0).save(rows := io.BytesIO(), "PNG", compress_level=4)
            _check_bytes(8 * rows.tell(), 1.5)
        # At the default level 6, compressing a photo of 12 megapixels takes up to 5.4 s of CPU time. Level 4 takes 1.7
        # s for a file of the same size.
        rgb.save(written := io.BytesIO(), "PNG", compress_level=4)
        _check_bytes(written.tell())
    return written.getvalue(), rgb.width, rgb.height


def _check_bytes(size: int, slack: float = 1) -> None:
    if size > slack * MAX_BYTES:
        raise BadPicture(f"has some {size:,} bytes as PNG, and the limit is {MAX_BYTES:,}: make it smaller")


class _Timed(io.BytesIO):
    """A file in memory that stops its decoder after too much CPU time. The thread's CPU time is checked at each read,
    and the PNG and JPEG decoders read a file in pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._end = time.thread_time() + SECONDS

    def read(self, size: int | None = -1) -> bytes:
        if time.thread_time() > self._end:
            raise BadPicture(f"takes more than {SECONDS:g} s of CPU time to decode: save it again")
        return super().read(size)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Convert every exception from Pillow inside the context to a BadPicture, because Pillow raises many types. `what`
    names the picture in the message."""
    try:
        yield
    except BadPicture as error:
        raise BadPicture(f"{what} {error}") from error.__cause__
    except MissingExtra:
        raise
    except Exception as error:
        raise BadPicture(f"{what} can't be decoded ({str(error) or error!r:.200}): save it again") from error


def source_name(source: object) -> str:
    """Return the name of the source for an error message."""
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
    if not path.is_file():  # reading a pipe or a device would never end
        raise BadPicture("isn't a file: pass the path of a PNG, JPEG or WebP file")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def decoded(data: bytes) -> PILImage:
    """Return the upright pixels of a file as 8-bit RGB. Raises BadPicture, or Pillow's errors for damaged files."""
    image, orientation = opened(data)
    file = cast(IO[bytes], image.fp)
    image.load()
    file.read(0)  # checks the time again, because the WebP decoder reads the whole file at once
    return _rgb(image, orientation)


def opened(data: bytes) -> tuple[ImageFile, int]:
    """Return the image in a file and its orientation. Only the header is read. Raises the same errors as `decoded`."""
    _pillow()
    from PIL import JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    if len(data) > MAX_BYTES:
        raise BadPicture(f"has more than {MAX_BYTES:,} bytes, the limit of a file: make it smaller")
    # `Image.open` is not used, because it prints warnings.
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
"""Matches the beginning of a JPEG segment, even after the pixels of a scan."""


def _stripped(data: bytes) -> tuple[bytes, bytes]:
    """Split a PNG or JPEG into (the file without metadata, its Exif data). Pillow decodes the file without metadata,
    because it would need quadratic time to join the metadata segments of a JPEG, and would reject a PNG with a large or
    damaged colour profile."""
    png, kept, last, scans, exif = data.startswith(_PNG), list[bytes](), 0, 0, b""
    at, palette = (8, data[25:26] == b"\3") if png else (2, False)
    for _ in range(MAX_PARTS):
        if png:
            start, kind = at, data[at + 4 : at + 8]
            at += 12 + int.from_bytes(data[at : at + 4])
            content = data[start + 8 : at - 4]
            # Browsers ignore a chunk with a wrong checksum. Pillow checks only the chunks that hold pixels.
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
            pixels = (not b"\xe1" <= kind <= b"\xef" and kind != b"\xfe") or kind == b"\xee"  # Adobe's, affects colours
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
    """Return the orientation in Exif data, or None. Pillow isn't used here, because it would copy up to 65,535 values,
    each of them as large as the whole Exif data."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order: Any = "little" if tiff[:2] == b"II" else "big"

    def number(at: int, size: int = 2) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    first = number(4, 4) + 2
    entries = range(first, first + 12 * number(first - 2), 12)
    found = (number(at + 8, 4 if number(at + 2) == 4 else 2) for at in entries if number(at) == 0x0112)
    return next(found, None)


def _image_of(source: object) -> PILImage:
    """Return a PIL image unchanged, or the image in an array."""
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
    if frames > 1 and image.format != "MPO":  # MPO is a camera's JPEG followed by a second view, which is left out
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
    """Return the upright pixels as 8-bit RGB, in a new image without metadata."""
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
"""The `PIL.Image.Transpose` for each EXIF orientation: flips, 90-degree rotations, reflections across either
diagonal."""


def png_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in a PNG's header."""
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "pictures", "a picture") from error
    return Image
