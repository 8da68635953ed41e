"""Pictures as values: the one door that makes them, what a step says of them, and files that mean harm."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from tapereel.tapes import BadPicture, MediaReference, Observation, Picture, ToolResult, ToolResults, Video
from tapereel.tapes.decoding import MAX_BYTES
from tapereel.tapes.messages import heard
from tapereel.tapes.pictures import media_of, pictures_of
from tapereel.tapes.records import StepRecord
from tapereel.tapes.schema import parse_record
from tapereel.tapes.steps import Prompt, parts_of
from tapereel.tapes.value import Value

RED = np.full((6, 9, 3), (200, 10, 20), dtype="uint8")
CORNER = RED.copy()
CORNER[0, 0] = (0, 0, 255)
"""Red, with a blue pixel at the top left."""


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(written, kind, **options)
    return written.getvalue()


def pixels(picture: Picture) -> np.ndarray:
    assert picture.data is not None
    with Image.open(io.BytesIO(picture.data)) as image:
        assert (image.mode, image.size, image.info) == ("RGB", (picture.width, picture.height), {})
        return np.asarray(image)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, *before: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG made by hand, of bytes that no library would write."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(before) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


# One door


@pytest.mark.ledger("F92")
def test_every_source_of_the_same_pixels_is_the_same_picture(tmp_path: Path):
    path = tmp_path / "a.jpg"  # the suffix says nothing
    path.write_bytes(encoded(CORNER))
    weakly = encoded(CORNER, compress_level=1)
    webp = encoded(CORNER, "WEBP", lossless=True)
    mirrored_twice = CORNER[:, ::-1][:, ::-1]
    sources = [CORNER, Image.fromarray(CORNER), encoded(CORNER), weakly, path, str(path), webp, mirrored_twice]
    sources.append(np.asfortranarray(CORNER))
    found = [Picture.of(source) for source in sources]
    assert len(set(found)) == 1
    assert len({picture.data for picture in found}) == 1
    assert (found[0].width, found[0].height) == (9, 6)
    assert (pixels(found[0]) == CORNER).all()
    assert asyncio.run(Picture.read(CORNER)) == found[0]


def test_metadata_and_what_follows_the_file_are_gone():
    image = Image.fromarray(CORNER)
    exif = image.getexif()
    exif[0x010E] = "home address"
    secret = encoded(CORNER, exif=exif, icc_profile=b"p" * 500) + b"<script>alert(1)</script>"
    found = Picture.of(secret)
    assert found == Picture.of(CORNER)
    assert found.data is not None
    assert b"home" not in found.data
    assert b"script" not in found.data


TURNED = {
    1: CORNER,
    2: CORNER[:, ::-1],
    3: CORNER[::-1, ::-1],
    4: CORNER[::-1],
    5: CORNER.transpose(1, 0, 2),
    6: CORNER.transpose(1, 0, 2)[:, ::-1],
    7: CORNER.transpose(1, 0, 2)[::-1, ::-1],
    8: CORNER.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", TURNED)
def test_the_orientation_in_exif_is_applied(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = Picture.of(encoded(CORNER, exif=exif))
    assert (pixels(found) == TURNED[orientation]).all()


def test_every_mode_becomes_the_pixels_that_a_person_sees():
    image = Image.fromarray(CORNER)
    grey16 = np.array([[0, 255, 256], [0x8000, 0xFF00, 0xFFFF]], dtype="uint16")
    assert (pixels(Picture.of(encoded(Image.fromarray(grey16))))[:, :, 0] == grey16 >> 8).all()
    assert (pixels(Picture.of(image.convert("P", palette=Image.Palette.ADAPTIVE)))[0, 1] == CORNER[0, 1]).all()
    cmyk = encoded(image.convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert (abs(pixels(Picture.of(cmyk))[3, 3].astype(int) - CORNER[3, 3]) < 9).all()
    assert (pixels(Picture.of(RED[:, :, 0])) == 200).all()
    assert (pixels(Picture.of(RED[:, :, :1])) == 200).all()
    assert (pixels(Picture.of(image.convert("1")))[0, 0] == 0).all()
    clear = np.dstack([CORNER, np.full(CORNER.shape[:2], 255, "uint8")])
    clear[:, :4, 3] = 0
    clear[:, 4, 3] = 128
    for source in (clear, encoded(clear), Image.fromarray(clear)):
        seen = pixels(Picture.of(source))
        assert (seen[:, :4] == 255).all(), "transparent pixels are laid over white"
        assert (seen[:, 5:] == CORNER[:, 5:]).all()
        assert abs(int(seen[0, 4, 1]) - (10 * 128 + 255 * 127) // 255) <= 1
    keyed = encoded(image.convert("P", palette=Image.Palette.ADAPTIVE), transparency=0)
    assert {tuple(p) for p in pixels(Picture.of(keyed)).reshape(-1, 3)} >= {(255, 255, 255)}


def frames(kind: str, n: int) -> bytes:
    first, *rest = [Image.new("RGB", (8, 8), (k % 256 * 60, 0, 0)) for k in range(n)]
    return encoded(first, kind, save_all=True, append_images=rest, lossless=True)


def segment(kind: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 255, kind, len(data) + 2) + data


def many(file: bytes, at: int, part: bytes, n: int) -> bytes:
    return file[:at] + part * n + file[at:]


JPEG, FILE = encoded(CORNER, "JPEG", quality=100, subsampling=0), encoded(CORNER)
MANY = {
    1_000_000: (JPEG, 2, segment(0xE1, b"Exif\0\0"), 1_000_000),
    900_000: (JPEG, 2, segment(0xE2, b"ICC_PROFILE\0\1\1"), 900_000),
    4_000_000: (JPEG, 2, segment(0xFE, b""), 4_000_000),
    1_600_000: (FILE, 33, chunk(b"prVt", b""), 1_600_000),
    1_600_001: (FILE, 33, chunk(b"IDAT", b""), 1_600_001),
}


def scan_bombs() -> dict[str, bytes]:
    """Each scan decodes all pixels again, and has a few bytes."""
    whole = encoded(np.zeros((4096, 4096), "uint8"), "JPEG", progressive=True)
    begin, end = whole.index(b"\xff\xda"), whole.rindex(b"\xff\xda")
    last = whole[end:-2]
    return {
        "last scan again": whole[:-2] + last * (19_000_000 // len(last)) + whole[-2:],
        "empty scans": whole[:begin] + whole[begin : begin + 10] * 1_000_000 + whole[begin:],
    }


BOMB = png(5000, 5000, zlib.compress(bytes(5000 * 15_001), 1))
TEXT_BOMB = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(9 << 20)))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "bomb": (BOMB, "5000x5000"),
    "larger bomb": (png(60_000, 60_000, b""), "60000x60000"),
    "header alone": (png(4000, 4000, b""), "decoded"),
    "truncated": (encoded(np.random.default_rng(0).integers(0, 255, (99, 99, 3), "uint8"))[:9000], "decoded"),
    "truncated JPEG": (encoded(RED.repeat(30, 0).repeat(30, 1), "JPEG")[:700], "decoded"),
    "empty": (b"", "empty"),
    "text": (b"this is no picture", r"b'this\b"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "b'%!PS"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "b'<svg"),
    "GIF": (encoded(RED, "GIF"), "b'GIF8"),
    "TIFF": (encoded(RED, "TIFF"), r"b'II\*"),
    "10,000 frames": (
        frames("PNG", 2).replace(*(chunk(b"acTL", struct.pack(">II", n, 0)) for n in (2, 10_000))),
        "frames",
    ),
    "APNG": (frames("PNG", 3), "3 frames"),
    "animated WebP": (frames("WEBP", 3), "3 frames"),
    "1 x 30,000": (encoded(np.zeros((30_000, 1, 3), "uint8")), "1x30000 pixels"),
    "30,000 x 1": (encoded(np.zeros((1, 30_000, 3), "uint8")), "30000x1 pixels"),
    "no side": (png(0, 5, zlib.compress(b"")), "decoded"),
    "no palette": (png(9, 9, zlib.compress(bytes(90)), color=3), "PLTE"),
    "too many bytes": (encoded(RED) + bytes(MAX_BYTES), "20,000,000 bytes"),
    "damaged checksum": (encoded(RED)[:40] + b"\xff" + encoded(RED)[41:], "decoded"),
    **{f"{n:,} segments": (many(*parts), "10,000") for n, parts in MANY.items()},
    **{name: (data, "32 scans") for name, data in scan_bombs().items()},
    "arithmetic coding": (encoded(RED, "JPEG").replace(b"\xff\xc0", b"\xff\xc9"), "rare"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_hostile_file_is_one_clear_sentence(name: str, tmp_path: Path):
    data, says = HOSTILE[name]
    path = tmp_path / "holiday.png"
    path.write_bytes(data)
    for source, named in ((data, f"a picture of {len(data):,} bytes"), (path, f"the file {str(path)[:90]!r}"[:90])):
        with pytest.raises(BadPicture, match=says) as caught:
            Picture.of(source)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_hostile_files_take_little_memory():
    """Peak memory of a process that refuses all of them, above what it has after the first good picture."""
    script = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from tapereel.tapes import Picture, BadPicture\n"
        "import numpy; Picture.of(numpy.zeros((9, 9, 3), 'uint8'))\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "for name in sys.argv[1:]:\n"
        "    try: Picture.of(name)\n"
        "    except BadPicture: continue\n"
        "    raise SystemExit(name)\n"
        "print((peak() - before) // 1024)\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        names = []
        for k, (data, _) in enumerate(HOSTILE.values()):
            names.append(f"{folder}/{k}.png")
            Path(names[-1]).write_bytes(data)
        done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("http://localhost/a.png", "'http://localhost/a.png'.*URL"),
        ("file:///etc/passwd", "'file:///etc/passwd'.*URL"),
        ("/dev/zero", "'/dev/zero'.*path"),
        ("/nowhere/a.png", "'/nowhere/a.png'.*path"),
        ("data:image/gif;base64,AAAA", "'data:image/gif;base64,AAAA'.*URL"),
        ("data:image/png;base64,AAA", "padding"),
        ("data:image/png;base64,AAAA", r"b'\\x00\\x00\\x00'"),
        (RED.astype("float32") / 255, "uint8"),
        (RED.transpose(2, 0, 1), "shape"),
        (np.zeros((0, 5, 3), "uint8"), "5x0"),
        (np.zeros((1, 5000, 5000, 3), "uint8"), "shape"),
        (np.zeros((5000, 5000), "uint8"), "16,777,216"),
        (Image.fromarray(np.zeros((4, 4), "float32")), "32 bits"),
        (Image.new("RGB", (5000, 5000)), "16,777,216"),
        (None, "NoneType"),
        ([1, 2], r"\blist\b"),
    ],
)
def test_a_source_that_is_no_picture_is_refused(source: Any, says: str):
    with pytest.raises(BadPicture, match=says):
        Picture.of(source)


CORRUPT_EXIF = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHII", 9, 0x010E, 2, 999, 99_999)
BIG_PROFILE = b"icc\0\0" + zlib.compress(bytes(9 << 20))
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(
    "file",
    [
        many(FILE, 33, TEXT_BOMB, 9),
        many(FILE, 33, chunk(b"iCCP", BIG_PROFILE), 1),
        many(FILE, 33, chunk(b"acTL", bytes(8)), 2),
        many(FILE, 33, chunk(b"eXIf", CORRUPT_EXIF[6:]), 1),
        many(
            FILE, 33, chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + struct.pack(">HHII", 9, 7, 18 << 20, 0) * 65_535), 1
        ),
        many(FILE, 33, chunk(b"tRNS", b"")[:-1] + b"x", 1),
        many(JPEG, 2, segment(0xE1, CORRUPT_EXIF), 1),
        many(JPEG, 2, segment(0xE1, b"Exif\0\0" + bytes(65_000)), 300),
        many(JPEG, 2, segment(0xE2, b"MPF\0" + bytes(90)), 3),
        many(JPEG, 2, segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\0\0\0\0\0\0\0" * 5000), 250),
        encoded(CORNER, "WEBP", lossless=True, exif=CORRUPT_EXIF),
    ],
    ids=lambda data: f"{len(data):,} bytes",
)
def test_metadata_of_any_size_and_kind_is_left_out_without_a_warning(file: bytes):
    seen = pixels(Picture.of(file)).astype(int)
    assert abs(seen - CORNER).max() <= (9 if file.startswith(b"\xff\xd8") else 0)


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_orientation_is_found_in_either_order_of_bytes_as_a_long_number_and_in_xmp(order: str):
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, 2)
    turned = start + struct.pack(order + "HHIIHHII", 0x0100, 4, 1, 9, 0x0112, 4, 1, 6)
    short = start + struct.pack(order + "HHIIHHIHH", 0x0100, 4, 1, 9, 0x0112, 3, 1, 6, 0)
    itxt = b"XML:com.adobe.xmp" + bytes(5) + XMP
    in_xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)
    for file in (
        *(many(FILE, 33, chunk(b"eXIf", exif), 1) for exif in (turned, short)),
        many(JPEG, 2, segment(0xE1, b"Exif\0\0" + turned), 1),
        encoded(CORNER, "WEBP", lossless=True, exif=turned),
        many(FILE, 33, chunk(b"iTXt", itxt), 1),
        many(JPEG, 2, in_xmp, 1),
        encoded(CORNER, "WEBP", lossless=True, xmp=XMP),
    ):
        assert abs(pixels(Picture.of(file)).astype(int) - TURNED[6]).max() <= 9


def test_a_decoder_ends_when_it_has_used_its_cpu_time(monkeypatch: pytest.MonkeyPatch):
    from tapereel.tapes import decoding

    monkeypatch.setattr(decoding, "SECONDS", 0.0)
    for file in (FILE, JPEG, encoded(CORNER, "WEBP")):
        with pytest.raises(BadPicture, match="CPU"):
            Picture.of(file)
    assert Picture.of(CORNER) == Picture.of(Image.fromarray(CORNER))
    monkeypatch.setattr(decoding, "SECONDS", 0.03)  # enough for its header; its decoder reads no second time
    with pytest.raises(BadPicture, match="CPU"):
        Picture.of(encoded(Image.new("RGB", (4096, 4096)), "WEBP", lossless=True, method=0))


def test_noise_is_refused_before_all_of_it_is_compressed():
    noise = Image.frombytes("RGB", (4096, 2500), np.random.default_rng(0).bytes(3 * 4096 * 2500))
    begun = time.thread_time()
    with pytest.raises(BadPicture, match="20,000,000"):
        Picture.of(noise)
    refused = time.thread_time()
    encoded(noise, compress_level=4)
    assert refused - begun < 0.5 * (time.thread_time() - refused)


def test_reading_waits_for_two_threads_of_its_own_and_for_none_of_the_loop():
    end = threading.Event()

    async def use() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, end.wait)
        try:
            async with asyncio.timeout(100):  # against a hang
                found = await asyncio.gather(*(Picture.read(CORNER) for _ in range(20)))
                video = await Video.read([CORNER, RED], fps=1)
                with pytest.raises(BadPicture):
                    await Picture.read(b"")
        finally:
            end.set()
        await busy
        assert {*found, video.frames[0]} == {Picture.of(CORNER)}

    asyncio.run(use())
    assert sum(one.name.startswith("tapereel-picture") for one in threading.enumerate()) == 2


FORKED = """
import asyncio, os, signal
from tapereel.tapes import Picture
from PIL import Image
async def several():
    await asyncio.gather(*(Picture.read(Image.new("RGB", (4, 4))) for _ in range(8)))
asyncio.run(several())
if (child := os.fork()) == 0:
    signal.alarm(60)
    asyncio.run(Picture.read(Image.new("RGB", (4, 4))))
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_reads_pictures_too():
    assert subprocess.run([sys.executable, "-c", FORKED]).returncode == 0


# In a step


class Card(Value):
    name: str
    face: Picture | None = None


@dataclass(frozen=True)
class Pair:
    left: Picture
    right: Picture


class SeenAll(Observation):
    title: str
    one: Picture
    turn: int = 3
    score: float = 0.5
    many: tuple[Picture, ...] = ()
    cards: tuple[Card, ...] = ()
    named: dict[str, Picture] | None = None
    pair: Pair | None = None
    anything: Any = None
    last: str = "end"


class Captioned(Observation):
    caption: str
    picture: Picture

    def __str__(self) -> str:
        return f"<{self.caption}>"


class Tree(Observation):
    """A recursive model."""

    leaf: Picture | None = None
    below: tuple[Tree, ...] = ()


def flat(k: int, alt: str | None = None) -> Picture:
    return Picture.of(np.full((4, 5, 3), k, "uint8"), alt=alt)


A, B, C, D = flat(1), flat(2, "two"), flat(3), flat(4)


def test_the_parts_are_texts_and_pictures_in_the_order_of_the_fields():
    king, none = Card(name="king", face=D), Card(name="none")
    step = SeenAll(title="look", one=A, many=(B, C), cards=(king, none), named={"left": A})
    assert parts_of(step) == ("look", A, '{"turn":3,"score":0.5}', B, C, "king", D, "none", "left", A, "end")
    assert str(A) == f"[picture 5x4 {A.name[:12]}]"
    assert str(step).splitlines()[:2] == ["look", str(A)]
    assert parts_of(Captioned(caption="hi", picture=B)) == ("<hi>", B)
    assert parts_of(SeenAll(title="", one=A, turn=0, score=0, last=""))[0] == A, "an empty text is no part"


@pytest.mark.ledger("F95")
def test_every_place_where_a_step_can_hold_a_picture_is_found():
    for step in (
        SeenAll(title="", one=A, many=(B, C)),
        SeenAll(title="", one=A, cards=(Card(name="x", face=B), Card(name="y", face=C))),
        SeenAll(title="", one=A, pair=Pair(B, C)),
        SeenAll(title="", one=A, anything={"deep": [(B,), C]}),
        Tree(leaf=A, below=(Tree(leaf=B), Tree(below=(Tree(leaf=C),)))),
    ):
        assert list(pictures_of(step)) == [A, B, C]
        assert list(media_of(step)) == [A.name, B.name, C.name]


def test_a_text_step_is_as_before():
    from tapereel.tapes.steps import Text

    assert parts_of(Text(text="hi")) == ("hi",)
    assert heard(Text(text="hi")) == [{"role": "user", "content": "hi"}]
    result = ToolResult(id="1", name="look", content="ok")
    assert result.model_dump_json() == '{"id":"1","name":"look","content":"ok","error":false}'
    assert heard(ToolResults(results=(result,)))[0]["content"] == "ok"
    assert "pictures" not in Prompt(text="q", messages=({"role": "user", "content": "q"},)).model_dump_json()


def image(picture: Picture) -> dict[str, Any]:
    return {"type": "image", "media": picture.name, "width": picture.width, "height": picture.height}


def test_messages_have_parts_where_a_step_has_pictures():
    both = ToolResult(id="1", name="f", content="two", pictures=(A, B))
    results = ToolResults(results=(both, ToolResult(id="2", name="g", content="no")))
    first, second = heard(results)
    assert first["content"] == [{"type": "text", "text": "two"}, image(A), image(B)]
    assert second["content"] == "no"
    place: dict[str, Any] = {"type": "image"}
    prompt = Prompt(
        text="which?",
        messages=(
            {"role": "system", "content": "s"},
            {"role": "user", "content": [place, {"type": "text", "text": "which?"}, place]},
        ),
        pictures=(A, B),
    )
    assert heard(prompt) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [image(A), {"type": "text", "text": "which?"}, image(B)]},
    ]
    with pytest.raises(ValidationError, match=r"\b2\b.*'image'.*\b1\b"):
        Prompt(text="", messages=prompt.messages, pictures=(A,))


def test_a_picture_is_its_file_and_never_its_bytes():
    again = flat(1)
    assert again == A
    assert again is not A
    assert A != B
    assert flat(2) != B, "another text for people"
    assert pickle.loads(pickle.dumps(A)).data == A.data
    shown = Captioned(caption="c", picture=A)
    body = StepRecord(tape="t", by="env", role="observation", kind="captioned", content=shown, at=0).body()
    assert A.data is not None
    assert base64.b64encode(A.data)[:40] not in body
    read = parse_record(body)
    assert isinstance(read, StepRecord)
    assert read.content == Captioned(caption="c", picture=A)
    assert pictures_of(read.content)[0].data is None
    assert read.media == (A.name,)
    assert read.body() == body


def test_no_text_becomes_a_picture():
    forged = {"media": A.media.__str__(), "width": 5, "height": 4}
    with pytest.raises(ValidationError, match=r"Media\.put"):
        Captioned.model_validate({"caption": "", "picture": forged})
    with pytest.raises(ValidationError, match=r"Media\.put"):
        Captioned.model_validate_json(json.dumps({"caption": "", "picture": {**forged, "media": str.__str__(A.media)}}))
    with pytest.raises(ValidationError):
        Picture(media=MediaReference("media:../../etc/passwd"), width=1, height=1)


def test_a_damaged_profile_costs_no_picture_and_a_damaged_pixel_does():
    """The logo that MCP's own example server sends has such a profile."""
    whole = encoded(CORNER)
    assert Picture.of(whole[:33] + struct.pack(">I", 4) + b"iCCPoops\0\0\0\0" + whole[33:]) == Picture.of(whole)
    at = whole.index(b"IDAT") + 6
    with pytest.raises(BadPicture, match="decoded"):
        Picture.of(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
