"""Function calls in the text of an answer: by format, never inside a thought, and nothing of an argument lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents import read_tool_calls
from tapereel.agents.rendering import HermesReader, tool_calls

from .answer_formats import begins

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = [ADD, "mul"]
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
LLAMA = '{"name": "add", "parameters": {"a": 2, "b": 3}}'


def plain(text: str, **more: bool) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in read_tool_calls(text, TOOLS, **more).calls]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<tool_call>{CALL}</tool_call>", ""),
        (f"<tool_call>\n{CALL}\n</tool_call>", ""),
        (f"a <tool_call>{CALL}</tool_call> b", "a\nb"),
        (f"<tool_call>{CALL}", ""),  # the end tag was the end of the answer
        (f"<tool_call>{LLAMA}</tool_call>", ""),
        (CALL, ""),
        (f"\n {LLAMA} \n", ""),
        (f"{LLAMA}\nThat is all.", "That is all."),
        ('{"type": "function", "name": "add", "parameters": {"a": 2, "b": 3}}', ""),
        ('{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}}', ""),
        (f"<|python_tag|>{LLAMA}", ""),
        (f"Well.\n<|python_tag|>{LLAMA};", "Well."),
        (f"<think>Sums.</think>\n\n{LLAMA}", "<think>Sums.</think>"),
        (f"<think>{{</think>\n<tool_call>{CALL}</tool_call>", "<think>{</think>"),
        (f"Sums.</think>{LLAMA}", "Sums.</think>"),
    ],
)
def test_a_call_of_every_format_is_read_with_its_arguments(text: str, content: str) -> None:
    read = read_tool_calls(text, TOOLS)
    assert [(call.name, call.arguments) for call in read.calls] == [("add", {"a": 2, "b": 3})]
    assert (read.content, read.problem) == (content, "")


@pytest.mark.parametrize("between", ["\n", "", " and "])
def test_several_calls_of_an_answer_keep_their_order(between: str) -> None:
    tags = between.join(f'<tool_call>{{"name": "add", "arguments": {{"a": {k}}}}}</tool_call>' for k in range(3))
    assert plain(tags) == [("add", {"a": k}) for k in range(3)]
    assert plain('{"name": "add", "parameters": {"a": 0}}; {"name": "mul", "parameters": {}}') == [
        ("add", {"a": 0}),
        ("mul", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada Lovelace", "age": 36}',
        '{"name": "Ada Lovelace", "arguments": {}}',
        '{"function": "add"}',
        '{"names": ["add"]}',
        '{"result": {"name": "add", "arguments": {}}}',
        "{x | x > 3}",
        "{",
        '["add"]',
        "I add them.",
        f"Use it so: {CALL}",
        "",
    ],
)
def test_an_answer_that_names_no_offered_tool_is_no_call(text: str) -> None:
    read = read_tool_calls(text, TOOLS)
    assert (read.content, read.calls, read.problem, read.chat) == (text, (), "", ())


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        (f"<think>I might write <tool_call>{CALL}</tool_call> but no.</think>No.", False),
        (f"<think>I might write <tool_call>{CALL}</tool_call>", False),
        (f"<think>{LLAMA}", False),
        (f"I might write <tool_call>{CALL}</tool_call> but no.</think>No.", False),
        (f"I might write <tool_call>{CALL}</tool_call> and so", True),
        (f"{CALL}", True),
        (f"<|python_tag|>{LLAMA}\n</think>\nNo.", True),
        (f"<think>a</think>No. <think>{CALL} <tool_call>{CALL}</tool_call>", False),
    ],
)
def test_nothing_inside_a_thought_is_a_call(text: str, thinking: bool) -> None:
    read = read_tool_calls(text, TOOLS, thinking=thinking)
    assert (read.content, read.calls, read.problem) == (text, (), "")


@pytest.mark.parametrize("written", ["<think>", "</think>", "</tool_call>", "<tool_call>", "<|python_tag|>", "}"])
def test_a_mark_in_an_argument_is_part_of_the_argument(written: str) -> None:
    body = json.dumps({"name": "add", "arguments": {"text": f"a {written} b"}})
    for text in (f"<tool_call>{body}</tool_call>", body, f"<|python_tag|>{body}"):
        assert plain(text) == [("add", {"text": f"a {written} b"})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>{broken</tool_call>", "line 1 column "),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', "line 1 column "),
        ('<tool_call>{"name": "add", "arguments": {"a": ', "line 1 column "),
        ('{"name": "add", "arguments": {"a": ', "line 1 column "),
        ("<tool_call>[1]</tool_call>", '"name" and "arguments"'),
        ("<tool_call></tool_call>", "line 1 column "),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', '"name" and "arguments"'),
        ('<tool_call>{"name": "add", "arguments": false}</tool_call>', '"name" and "arguments"'),
        ("<tool_call>", "line 1 column "),
        ("<|python_tag|>add(2, 3)", "line 1 column "),
        ('<tool_call>{"name": "add", "a": 2, "b": 3}</tool_call>', "'a', 'b'"),
        ('{"name": "add", "a": 2}', "'a'"),
        ('{"name": "add", "arguments": {}, "parameters": {"a": 2}}', '"parameters"'),
        ('{"name": "add", "arguments": [2, 3]}', '"name" and "arguments"'),
        ('{"name": "add", "arguments": "2, 3"}', "line 1 column 2 "),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN"),
    ],
)
def test_a_call_that_cannot_be_read_is_told(text: str, says: str) -> None:
    read = read_tool_calls(text, TOOLS)
    assert read.calls == ()
    assert says in read.problem


def test_of_two_calls_the_good_one_is_read_and_the_bad_one_told() -> None:
    bad = '<tool_call>{"name": "mul", "arguments": {"a": }}</tool_call>'
    read = read_tool_calls(f"Two. <tool_call>{CALL}</tool_call>{bad}", TOOLS)
    assert [call.name for call in read.calls] == ["add"]
    assert "2 of 2" in read.problem
    assert "line 1 column " in read.problem
    assert [call["function"]["name"] for call in read.chat] == ["add", "mul"]
    assert (
        read.chat[1]["function"]["arguments"] == ', "arguments": {"a": }}'
    )  # as written, for a program that tells the model
    cut = read_tool_calls('{"name": "add"', TOOLS)
    assert (cut.chat, cut.content) == ((), '{"name": "add"')  # without arguments a program would call it with none
    nameless = read_tool_calls(f"<tool_call>{CALL}</tool_call><tool_call>{{oops</tool_call>", TOOLS)
    assert [call.name for call in nameless.calls] == ["add"]
    assert nameless.content == "<tool_call>{oops</tool_call>"


def test_calls_that_an_engine_has_parsed_are_read_alike() -> None:
    native = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    read = read_tool_calls("Adding.", TOOLS, native=[native, {"name": "add", "parameters": {"a": 3}}])
    assert [(call.id, call.arguments) for call in read.calls] == [("c7", {"a": 2}), ("call_1", {"a": 3})]
    assert read.content == "Adding."
    broken = read_tool_calls("", TOOLS, native=[{**native, "function": {"name": "add", "arguments": "{"}}])
    assert "line 1 column 2 " in broken.problem


class Counted(str):
    """A text that counts the characters that its methods look at or copy."""

    work = 0

    def __getitem__(self, place: Any) -> str:
        found = super().__getitem__(place)
        Counted.work += len(found)
        return found

    def find(self, part: str, start: int = 0, end: Any = None) -> int:
        found = super().find(part, start, end)
        Counted.work += (len(self) if found < 0 else found) - start
        return found


class CountedPattern:
    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def match(self, text: str, at: int = 0) -> Any:
        found = self.pattern.match(text, at)
        Counted.work += found.end() - at if found else 1
        return found

    def search(self, text: str, at: int = 0) -> Any:
        found = self.pattern.search(text, at)
        Counted.work += (found.end() if found else len(text)) - at
        return found


class CountedDecoder(json.JSONDecoder):
    def raw_decode(self, s: str, idx: int = 0) -> Any:
        try:
            value, end = super().raw_decode(s, idx)
        except json.JSONDecodeError as error:
            Counted.work += error.pos - idx + error.pos  # the error counts lines from the beginning of the text
            raise
        Counted.work += end - idx
        return value, end


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """The characters that `read_tool_calls` goes over in a text."""
    for name, value in vars(tool_calls).items():
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(tool_calls, name, CountedPattern(value))
    monkeypatch.setattr(tool_calls, "_json", CountedDecoder())

    def work(text: str) -> int:
        Counted.work = 0
        read_tool_calls(Counted(text), TOOLS)
        return Counted.work

    return work


@pytest.mark.parametrize(
    "unit",
    [
        '<tool_call>{"a": "',
        '<tool_call>{"a": "\\"',
        '<tool_call>{"\\"',
        "<tool_call>[",
        "<tool_call>",
        "<|python_tag|>{",
        "<|python_tag|>{};",
        "<think>",
        "</think>{",
        '</think>{"name": "',
        f"</think>{CALL}{{",
        f"{CALL};",
        f"<tool_call>{CALL}</tool_call>",
        "[",
    ],
)
def test_the_work_of_reading_grows_with_the_text(unit: str, counted: Callable[[str], int]) -> None:
    once = counted(unit * 200)
    assert once >= 200
    assert counted(unit * 800) <= 4.1 * once, "in unclosed marks too: a model can write as many as it likes"


PARTS = st.sampled_from(
    [
        "a",
        " ",
        "\n",
        "{",
        "}",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "; ",
        CALL,
        LLAMA,
    ]
)


@given(st.lists(PARTS | st.text(max_size=3), max_size=10).map("".join), st.lists(st.integers(1, 9), max_size=40))
@settings(max_examples=500, deadline=None)
def test_what_a_stream_sends_begins_the_thoughts_and_the_answer(text: str, sizes: list[int]) -> None:
    reader = HermesReader()
    for prompt in ("", "<think>\n"):
        for tools in (TOOLS, None):
            for cut in (False, True):
                read = reader.read(text, tools, prompt=prompt, cut=cut)
                begins(reader.stream(tools=tools is not None, prompt=prompt), text, sizes, read)
