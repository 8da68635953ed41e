"""The text of steps for people: tool calls as code, results without their envelope, errors marked."""

from __future__ import annotations

import pytest

from tapereel.tapes.steps import Action, Answer, ParseError, Step, Text, ToolCall, ToolCalls, ToolResult, ToolResults
from tapereel.tapes.transcript import Fragment, fragments_of, shown


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
