"""Videos on the tape: frames with times, in steps and in messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

import tapereel as tr
from tapereel.tapes import BadPicture, ToolResult, ToolResults, Video
from tapereel.tapes.messages import content_of, frames_of, heard, image_of, image_parts, part_of, text_of, video_in
from tapereel.tapes.pictures import media_of, pictures_of, visuals_of
from tapereel.tapes.records import StepRecord
from tapereel.tapes.schema import parse_record
from tapereel.tapes.steps import Prompt, parts_of


def pixels(*shades: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.stack([np.full((height, width, 3), shade, dtype="uint8") for shade in shades])


CLIP = Video.of(pixels(1, 2, 3), fps=2.0, indices=(0, 1, 3))
STILL = tr.Picture.of(pixels(9)[0])


class Inside(BaseModel):
    clips: dict[str, list[Video]]


class Watched(tr.Observation):
    title: str
    clip: Video
    picture: tr.Picture | None = None
    inside: Inside | None = None
    end: str = ""


class Commented(tr.Observation):
    clip: Video

    def __str__(self) -> str:
        return "a film"


def test_a_video_is_frames_and_their_times(tmp_path: Path) -> None:
    assert (CLIP.fps, CLIP.indices, CLIP.times) == (2.0, (0, 1, 3), (0.0, 0.5, 1.5))
    assert CLIP.frames == tuple(tr.Picture.of(frame) for frame in pixels(1, 2, 3))
    assert str(CLIP) == f"[video 3 frames 8x6 0.0-1.5 s {CLIP.frames[0].name[:12]}]"
    (tmp_path / "b.png").write_bytes(CLIP.frames[1].data or b"")
    sources = [CLIP.frames[0].data, tmp_path / "b.png", CLIP.frames[2]]
    assert Video.of(sources, fps=2, indices=np.array([0, 1, 3])) == CLIP
    assert asyncio.run(Video.read(pixels(1, 2, 3), fps=2)).indices == (0, 1, 2)
    assert Video.of(pixels(1, 2, 3), fps=4, indices=(0, 1, 3)) != CLIP, "other times"


@pytest.mark.parametrize(
    ("frames", "more", "says"),
    [
        ([], {}, "least"),
        (pixels(1, 2), {"fps": 0}, r"fps=0\.0"),
        (pixels(1, 2), {"fps": float("nan")}, "fps=nan"),
        (pixels(1, 2), {"fps": "fast"}, "fps: .*number"),
        (pixels(1, 2), {"indices": [3]}, r"\b2\b.*\b1 indices"),
        (pixels(1, 2), {"indices": [3, 3]}, r"\(3, 3\)"),
        (pixels(1, 2), {"indices": [-1, 3]}, r"\(-1, 3\)"),
        (pixels(1, 2), {"fps": "fast"}, "'fast'"),
        (pixels(1, 2), {"fps": 1e-308, "indices": [0, 7]}, r"\b7\b.*fps=1e-308"),
        (pixels(1, 2), {"indices": (0, 1.5)}, r"\(0, 1\.5\)"),
        (pixels(1, 2), {"indices": 7}, "7"),
        (pixels(1, 2), {"indices": ["a", None]}, "'a', None"),
        (pixels(1, 2), {"indices": (0, 10**400)}, "10000"),
        (7, {}, r"frames\b.*\b7\b"),
        (None, {}, r"frames\b.*\bNone\b"),
        (["film.mp4"], {}, r"\b0\b.*'film\.mp4'"),
        ([STILL, pixels(1, height=5)[0]], {}, "8x6.*8x5"),
        (pixels(1)[0], {}, r"\(6, 8, 3\)"),
        ("film.mp4", {}, r"'film\.mp4'.*decoded"),
        (b"\0\0\0\x18ftypmp42", {}, r"\b12\b.*decoded"),
        ([STILL, "https://example.com/a.png"], {}, r"frame 1\b.*URL"),
        ([STILL, b"GIF89a"], {}, r"frame 1\b.*b'GIF89a'"),
        (pixels(1, 2).astype("float32"), {}, r"frame 0\b.*uint8"),
    ],
)
def test_a_bad_video_is_an_error_that_says_why(frames: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(BadPicture, match=says):
        Video.of(frames, **{"fps": 1, **more})


def test_a_video_stands_wherever_a_picture_can() -> None:
    other = Video.of([STILL], fps=1)
    step = Watched(title="look", clip=CLIP, picture=STILL, inside=Inside(clips={"left": [other, CLIP]}), end="so?")
    assert parts_of(step) == ("look", CLIP, STILL, "left", other, CLIP, "so?")
    assert visuals_of(step) == (CLIP, STILL, other, CLIP)
    assert pictures_of(step) == (*CLIP.frames, STILL, STILL, *CLIP.frames)
    assert parts_of(Commented(clip=CLIP)) == ("a film", CLIP)
    assert str(step).splitlines()[:2] == ["look", str(CLIP)]
    (result,) = heard(ToolResults(results=(ToolResult(id="1", name="f", content="two", pictures=(CLIP, STILL)),)))
    assert result["content"] == [{"type": "text", "text": "two"}, part_of(CLIP), image_of(STILL)]


def test_a_recorded_video_is_read_back_without_its_bytes() -> None:
    step = Watched(title="look", clip=CLIP)
    body = StepRecord(tape="t", by="env", role="observation", kind=Watched.kind, content=step, at=0).body()
    read = parse_record(body)
    assert isinstance(read, StepRecord)
    assert (read.content, read.media) == (step, media_of(step))
    assert read.body() == body
    assert [frame.data for frame in pictures_of(read.content)] == [None, None, None]
    with pytest.raises(ValidationError, match=r"Media\.put"):
        Video.model_validate(CLIP.model_dump(mode="json"))


def test_a_message_has_one_part_for_a_video_and_a_blind_reader_gets_frames() -> None:
    frames = [{"media": frame.name, "width": 8, "height": 6} for frame in CLIP.frames]
    part = {"type": "video", "frames": frames, "fps": 2.0, "indices": [0, 1, 3]}
    (message,) = heard(Watched(title="look", clip=CLIP))
    assert message == {"role": "user", "content": [{"type": "text", "text": "look"}, part]}
    assert video_in(part) == CLIP
    assert text_of(message) == f"look\n{CLIP}"
    plain: dict[str, Any] = {"role": "user", "content": "hi"}
    shown, same = frames_of([message, plain])
    assert shown["content"] == content_of(
        ("look", "<0.0 seconds>", CLIP.frames[0], "<0.5 seconds>", CLIP.frames[1], "<1.5 seconds>", CLIP.frames[2])
    )
    assert same is plain
    assert image_parts([message]) == [image_of(frame) for frame in CLIP.frames]


@pytest.mark.parametrize(
    "change", [{"fps": 0}, {"indices": [0]}, {"frames": "a"}, {"frames": [{"media": "../x.png"}]}, {"more": 1}]
)
def test_a_part_that_is_no_video_stays_as_it_is(change: dict[str, Any]) -> None:
    message = {"role": "user", "content": [part_of(CLIP) | change]}
    assert video_in(message["content"][0]) is None
    assert (frames_of([message]), image_parts([message]), text_of(message)) == ([message], [], "[video]")


def test_a_prompt_has_a_place_of_the_type_of_each_picture_and_video() -> None:
    places: list[dict[str, Any]] = [{"type": "video"}, {"type": "text", "text": "or"}, {"type": "image"}]
    messages: Any = ({"role": "user", "content": places},)
    (message,) = heard(Prompt(text="", messages=messages, pictures=(CLIP, STILL)))
    assert message["content"] == [part_of(CLIP), places[1], part_of(STILL)]
    for wrong in ((STILL, CLIP), (STILL,), (CLIP, STILL, STILL)):
        with pytest.raises(ValidationError, match=r"\b1\b.*'image'.*\b1\b.*'video'"):
            Prompt(text="", messages=messages, pictures=wrong)
