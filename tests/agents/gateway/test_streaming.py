"""What may be sent of an answer that is still sampled: all pieces, however it is cut, add up to the whole."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents import Completion
from tapereel.agents.episode.stop_strings import cut_at_stop
from tapereel.agents.gateway import chat_protocol
from tapereel.agents.gateway.dialect import Asked
from tapereel.agents.gateway.gateway_session import Live
from tapereel.agents.rendering import Renderer

from ..families import FAMILIES, tokenizer
from .lab import RENDERER

RENDERERS = {"characters": RENDERER, **{name: Renderer(tokenizer(name)) for name in FAMILIES}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PARTS = st.sampled_from(
    [
        "a",
        " b",
        "\n",
        "  ",
        "é",
        "東京",
        "🙂",
        "👩\u200d👩\u200d👧",
        "\ufffd",
        "Äpfel",
        "{",
        "}",
        "<",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        "STOP",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<tool_call>{broken",
        '{"name": "add", "arguments": {}}',
        "<think>",
        "</think>",
        "<|python_tag|>",
        '{"name": "add", "parameters": {"a": "<think>"}}; ',
        "stop",
        "sto",
        ".\n",
        "The quick brown fox",
    ]
)
TEXTS = st.lists(PARTS | st.text(max_size=4), max_size=8).map("".join)
STOP = st.sampled_from(["stop", "p", "sto", "topic", ".\n", "\n\n", "🙂", "<tool_call>", "}", " b"])
STOPS = st.lists(STOP, max_size=3)


def request(stop: Any = (), tools: bool = False) -> Asked:
    body = {"messages": [{"role": "user", "content": "x"}], "stop": list(stop), "tools": [TOOL] if tools else []}
    return chat_protocol.read(body)


def live(name: str, asked: Asked | None = None) -> Live:
    found = Live(asked or request())
    found.open("x", RENDERERS[name])
    return found


def told(to: Live, ids: list[int], sizes: list[int]) -> list[str]:
    """The texts that are taken when ids come, and are taken, so many at a time."""
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        to.tokens(array("i", ids[at : at + size]))
        pieces.append(text(to))
        at += size
        if at >= len(ids):
            break
    return pieces


def text(to: Live) -> str:
    """What is taken of an answer without thoughts."""
    pieces = to.take()
    assert not any(piece.thought for piece in pieces)
    return "".join(piece.text for piece in pieces)


def whole(name: str, ids: list[int], asked: Asked, prompt: str = "") -> tuple[str, str]:
    """The thoughts and the text of the answer, as the door and the protocol make them."""
    renderer = RENDERERS[name]
    made = Completion(text=renderer.decode(ids), ids=array("i", ids))
    text = (cut_at_stop(made, asked.stop, renderer.decode) if asked.stop else made).text or ""
    read = renderer.reader.read(text, ["add"] if asked.tools else None, prompt=prompt)
    return read.reasoning, read.answer


SIZES = st.lists(st.integers(1, 5), max_size=30)
NAMES = st.sampled_from(sorted(RENDERERS))


@given(NAMES, TEXTS, STOPS, st.booleans(), st.booleans(), SIZES, st.sampled_from(["", "<think>\n"]))
@settings(max_examples=300, deadline=None)
def test_what_is_sent_of_any_text_is_how_its_answer_begins(
    name: str, text: str, stops: list[str], tools: bool, ends: bool, sizes: list[int], prompt: str
) -> None:
    renderer, asked = RENDERERS[name], request(stops, tools)
    ids = renderer._codec._raw(text + renderer._before_end * ends) + list(renderer.end_ids[:1]) * ends
    to = live(name, asked)
    to.shown(prompt)
    send(to, ids, sizes)
    answer = whole(name, ids, asked, prompt)
    assert to.end(*answer), (to.sent, answer)


def send(to: Live, ids: list[int], sizes: list[int]) -> None:
    """Let ids come, and be taken, so many at a time. What is taken is what counts as sent."""
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        to.tokens(array("i", ids[at : at + size]))
        pieces += to.take()
        at += size
    for thought in (True, False):
        assert "".join(piece.text for piece in pieces if piece.thought is thought) == to.sent[thought]


@given(NAMES, st.data(), SIZES)
@settings(max_examples=300, deadline=None)
def test_what_is_sent_of_any_ids_is_how_their_text_begins(name: str, data: Any, sizes: list[int]) -> None:
    """Ids that no text gives: halves of characters, control tokens, ends of turns in the midst."""
    codec, ends = RENDERERS[name]._codec, RENDERERS[name].end_ids
    odd = [*ends, *sorted(codec.byte_ids)[0xC0:], *sorted(codec.byte_ids)[0x80:0xC0]]
    ids = data.draw(st.lists(st.integers(0, codec._backend.get_vocab_size() - 1) | st.sampled_from(odd), max_size=30))
    to = live(name)
    send(to, ids, sizes)
    assert to.end(*whole(name, ids, request())), (to.sent, RENDERERS[name].decode(ids))


@pytest.mark.parametrize("name", RENDERERS)
def test_nothing_is_held_back_without_need(name: str) -> None:
    opens = "<|channel|>final<|message|>" if name == "harmony" else ""  # text outside of its channels is no answer
    text = f"{opens}quick brown fox, 47 times"
    ids = RENDERERS[name]._codec._raw(text) if name != "characters" else RENDERER._codec._raw(text)
    to = live(name)
    for k in range(len(ids)):
        to.tokens(array("i", ids[k : k + 1]))
        to.take()
        assert to.sent[False] == RENDERERS[name].decode(ids[: k + 1])[len(opens) :].rstrip()


def test_half_a_character_is_never_sent() -> None:
    to = live("chatml")
    ids = RENDERERS["chatml"]._codec._raw("x𝄞𝄞y")
    pieces = told(to, ids, [1] * len(ids))
    assert len(ids) == 10
    assert [piece for piece in pieces if piece] == ["x", "𝄞", "𝄞", "y"]


def test_what_is_written_before_the_end_of_a_turn_is_no_text() -> None:
    renderer = RENDERERS["llama2"]
    assert renderer._before_end == " "
    to = live("llama2")
    assert told(to, [*renderer._codec._raw("fox "), renderer.end_ids[0]], [1] * 9)[-2:] == ["", ""]
    assert (to.sent[False], renderer.decode([*renderer._codec._raw("fox "), renderer.end_ids[0]])) == ("fox", "fox")


def test_bytes_that_may_read_otherwise_wait_for_what_follows_them() -> None:
    """Where a run of byte tokens isn't UTF-8, all of it is replaced, what was whole before it too."""
    codec = RENDERERS["llama2"]._codec
    one, half = codec._raw("ж")[-2:], codec._raw("𝄞")[-4:-3]
    assert set(one + half) <= codec.byte_ids
    assert codec.decode([*one, *half]) == "\ufffd" * 3
    to = live("llama2")
    assert told(to, [*one, *half], [2]) == ["", ""]
    assert told(live("llama2"), [*one, *codec._raw("fox")], [2]) == ["", "ж fox"]


@pytest.mark.parametrize(
    ("text", "stops", "tools", "sent"),
    [
        ("one two", (), False, "one two"),
        ("one st", ("stop",), False, "one"),
        ("one star", ("stop",), False, "one star"),
        ("one stop two", ("stop",), False, "one"),
        ("abc", ("abcd", "c"), False, ""),
        ("a <tool", (), False, "a <tool"),
        ("a <thi", (), False, "a"),
        ("a <thin ", (), False, "a <thin"),
        ("a  <tool", (), True, "a"),
        ("a <tools", (), True, "a <tools"),
        ("a <tool_call>{} b", (), True, "a"),
        (' {"name"', (), False, ' {"name"'),
        (' {"name"', (), True, ""),
        ('a {"name"', (), True, 'a {"name"'),
        (" \n", (), True, ""),
        ("a \n", (), False, "a"),
        (" \nb ", (), True, " \nb"),
    ],
)
def test_what_may_become_something_else_is_held(text: str, stops: Any, tools: bool, sent: str) -> None:
    to = live("qwen3", request(stops, tools))
    ids = RENDERERS["plain"]._codec._raw(text)
    to._renderer = RENDERERS["plain"]
    told(to, ids, [1] * len(ids))
    assert to.sent == {True: "", False: sent}


def test_another_try_must_begin_with_what_was_sent() -> None:
    ids = array("i", RENDERER._codec._raw("abcdef"))
    other = array("i", RENDERER._codec._raw("abXdef".lower().replace("x", "z")))
    to = live("characters")
    to.tokens(ids[:3])
    assert text(to) == "abc"
    to.tokens(ids[3:4])
    to.again()
    assert text(to) == ""
    to.tokens(ids[:2])
    assert text(to) == ""
    to.tokens(ids[2:5])
    assert (text(to), to.sent[False]) == ("de", "abcde")
    to.again()
    to.tokens(other[:2])
    assert text(to) == ""
    to.tokens(other[2:])
    assert text(to) == ""
    assert not to.end("", "abzdef")
    to.again()
    to.tokens(ids)
    assert (text(to), to.sent[False]) == ("f", "abcdef")
    assert to.end("", "abcdef")
    to.tokens(ids)
    assert text(to) == ""
