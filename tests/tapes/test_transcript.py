"""The text of steps for people: tool calls as code, results without their envelope, errors marked."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tapereel.tapes import (
    Action,
    Answer,
    Observation,
    ParseError,
    Picture,
    Step,
    Text,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
    Video,
)
from tapereel.tapes.pictures import videos_in
from tapereel.tapes.steps import Prompt, read_step
from tapereel.tapes.transcript import Fragment, fragments_of, reads, shown


class TranscriptGuess(Action):
    number: int
    why: str


COUNT = ToolCall(id="0", name="count", arguments={"shelf": 92})
FIND = ToolCall(id="1", name="find", arguments={"title": 'the "red" book', "deep": True, "odd key": None, "in": [1]})
EIGHTY = ToolResult(id="0", name="count", content="86")
LOST = ToolResult(id="1", name="find", content="KeyError: '166'", error=True)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (ToolCalls(calls=(COUNT,)), "count(shelf=92)"),
        (
            ToolCalls(calls=(COUNT, FIND)),
            'count(shelf=92)\nfind(title="the \\"red\\" book", deep=true, "odd key"=null, in=[1])',
        ),
        (ToolResults(results=(EIGHTY,)), "86"),
        (ToolResults(results=(EIGHTY, LOST)), "count: 86\nfind: KeyError: '166'"),
        (ToolCalls(calls=()), ""),
        (Answer(text="seven"), "seven"),
        (Text(text="two\nlines"), "two\nlines"),
        (TranscriptGuess(number=3, why="odd"), '{"number":3,"why":"odd"}'),
    ],
)
def test_a_step_reads_as_code_and_text(step: Step, text: str) -> None:
    assert shown(step) == text


def test_a_fragment_names_its_tool_and_marks_an_error() -> None:
    assert fragments_of(ToolResults(results=(EIGHTY, LOST))) == (
        Fragment(text="86", tool="count"),
        Fragment(text="KeyError: '166'", tool="find", error=True),
    )
    assert fragments_of(ParseError(problem="no JSON")) == (Fragment(text="no JSON", error=True),)
    assert fragments_of(Answer(text="7")) == (Fragment(text="7"),)


class TranscriptScene(Observation):
    question: str
    pictures: tuple[Picture, ...] = ()
    film: Video | None = None
    answers: tuple[str, ...] = ()


PICTURE = Picture.of(np.zeros((4, 6, 3), "uint8"), alt="a lamp")
FILM = Video.of(np.zeros((2, 4, 6, 3), "uint8"), fps=2)


@pytest.mark.parametrize(
    "step",
    [
        Text(text="plain"),
        TranscriptGuess(number=3, why="\N{LATIN SMALL LETTER E WITH ACUTE}"),
        TranscriptScene(question="Where?", pictures=(PICTURE,)),
        TranscriptScene(question="Where?", pictures=(PICTURE, PICTURE), film=FILM, answers=("a", "b")),
    ],
)
def test_a_step_of_a_class_that_is_not_imported_reads_the_same(step: Step) -> None:
    content = json.loads(step.model_dump_json())
    assert reads(read_step("observation", "a_kind_of_elsewhere", content)) == reads(step) == shown(step)
    assert list(videos_in(content)) == [FILM for value in step.__dict__.values() if value == FILM]


def test_text_that_looks_like_a_picture_and_is_none_stays_text() -> None:
    for broken in ({"media": "media:1f0c.png", "width": 6, "height": 4}, {"media": 1, "width": 6, "height": 4}):
        unknown = read_step("observation", "a_kind_of_elsewhere", {"question": "Where?", "picture": broken})
        assert json.loads(reads(unknown)) == {"question": "Where?", "picture": broken}


def test_a_picture_is_named_once_also_if_the_class_has_its_own_text() -> None:
    result = ToolResult(id="0", name="look", content="a shelf", pictures=(PICTURE,))
    assert shown(ToolResults(results=(result,))) == f"a shelf\n{PICTURE}"
    message = {"role": "user", "content": [{"type": "image"}]}
    prompt = Prompt(text="Where?", messages=(message,), pictures=(PICTURE,))
    assert shown(prompt) == f"Where?\n{PICTURE}"
