"""Reads function calls in the text of a model's answer, in the formats that models write.

`read_tool_calls` is the one reader: `Reply.tool_calls`, `ChatAgent` and the gateway use it. A format is a mark and a
function that finds the calls behind it (`_FORMATS`); a further family's format is a further entry. Nothing inside a
thought (`<think>...</think>`) is a call: a model that thinks about a call hasn't made it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from ...tapes.common.plain_json import read_plain
from ...tapes.records import Message
from ...tapes.steps import ToolCall
from .incremental_decoder import overlap

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_SHAPE = 'A call is a JSON object with "name" and "arguments".'
_HEAD = re.compile(r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
"""The beginning of a call, valid JSON or not, through its name."""
_LEXED = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""What can be JSON: up to a string without an end, or to a `<` or `\\` outside of strings. So it ends at the next mark
unless that is in a string, and then what is lexed from that mark ends at the mark behind it: reading is linear."""
_TAGGED_END = re.compile(rf"\s*(?:{_END_TAG}|(?={_TAG})|\Z)")
_ANY_TAG = re.compile(f"{_TAG}|{_END_TAG}")
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*;?\s*")
_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallsRead:
    """A model's answer, read for function calls."""

    content: str
    """The text around the calls, thoughts included; the whole text where there are none."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that could be read, in order."""
    problem: str = ""
    """What is wrong with the other calls, as sentences for the model; empty where all could be read."""
    chat: tuple[Message, ...] = ()
    """All calls with a name in the chat format: arguments are JSON text, and as written where they can't be read. The
    id is empty where the engine gave none."""


class _Written(NamedTuple):
    """A call in a text: its place, and its JSON, valid or not."""

    start: int
    end: int
    body: str


def read_tool_calls(
    text: str,
    tools: Collection[str | Mapping[str, JsonValue]] = (),
    *,
    native: Sequence[Mapping[str, JsonValue]] = (),
    thinking: bool = False,
) -> CallsRead:
    """The function calls in a model's answer.

    tools: names or schemas of the tools that were offered. A bare JSON object is a call only if it has the name of one;
    what stands behind a mark such as `<tool_call>` is meant as a call in any case. native: the calls in the chat
    format, where the engine has parsed them; the text isn't read then. thinking: whether the answer begins inside a
    thought, which the prompt has opened.
    """
    if native:
        return _read(text, [_native_call(call) for call in native])
    names = {tool if isinstance(tool, str) else tool_name(tool) for tool in tools} - {""}
    written = _find(text, names, thinking)
    entries = [_written_call(one.body) for one in written]
    named = [one for one, (call, _) in zip(written, entries, strict=True) if call is not None]
    return _read(_around(text, named), entries)


def tool_name(schema: Mapping[str, JsonValue]) -> str:
    """The name in a function schema, with or without `{"type": "function", "function": ...}` around it."""
    function = schema.get("function", schema)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def free_prefix(text: str, fresh: bool, thinking: bool) -> tuple[int, bool, bool]:
    """(n, fresh, thinking): the first n characters of `text`, the unsent end of an answer, belong to its content
    whatever follows.

    `fresh`: nothing but white space stands between the beginning or a thought and the place; `thinking`: the place is
    in a thought. Both are given for the beginning of `text` and returned for the place n. It must free nothing that
    `read_tool_calls` may take for a call, or a stream has sent a part of a call as text.
    """
    at = 0
    while True:
        rest = text[at:]
        if thinking:
            end = rest.find(_END_THINK)
            if end < 0:
                return at + len(rest) - overlap(rest, _END_THINK), fresh, True
            at, fresh, thinking = at + end + len(_END_THINK), True, False
            continue
        if fresh and rest.lstrip()[:1] in ("", "{"):
            return at, True, False
        mark = _MARK.search(rest)
        if mark is not None and mark[0] in (_THINK, _END_THINK):
            at, fresh, thinking = at + mark.end(), True, mark[0] == _THINK
            continue
        held = max(overlap(rest, word) for word in _MARKS) if mark is None else len(rest) - mark.start()
        n = len(rest[: len(rest) - held].rstrip())  # white space before a call is no content
        return at + n, fresh and not n, False


def _find(text: str, names: Collection[str], thinking: bool) -> list[_Written]:
    """The calls outside of thoughts. A mark inside a call, in a text that it writes, is a part of that call."""
    found: list[_Written] = []
    at, fresh = 0, True
    while True:
        if thinking:
            end = text.find(_END_THINK, at)
            if end < 0:
                return found
            at, fresh, thinking = end + len(_END_THINK), True, False
        calls = list(_objects(text, at, names)) if fresh else []
        mark = None if calls else _MARK.search(text, at)
        if mark is None and not calls:
            return found
        if mark is not None and mark[0] in _FORMATS:
            calls = _FORMATS[mark[0]](text, mark.end())
            calls[0] = calls[0]._replace(start=mark.start())
        fresh = False
        if calls:
            found += calls
            at = calls[-1].end
        elif mark is not None:
            at, thinking = mark.end(), mark[0] == _THINK
            if mark[0] == _END_THINK:
                # The prompt or a lost token opened this thought: no call before it was meant.
                found.clear()
                fresh = True


def _tagged(text: str, at: int) -> list[_Written]:
    """Hermes and Qwen: `<tool_call>JSON</tool_call>`. The end tag may be missing, as where it ends the answer."""
    begin = _after(_SPACE, text, at)
    end = _json_end(_lexed(text, begin), 0)
    tag = _TAGGED_END.match(text, begin + end) if end is not None else None
    if tag is not None and end is not None:
        return [_Written(at, tag.end(), text[begin : begin + end])]
    # Broken JSON: it ends at the nearest tag, and with the text where there is none.
    nearest = _ANY_TAG.search(text, at)
    end = nearest.start() if nearest is not None else len(text)
    return [_Written(at, end + len(_END_TAG) * text.startswith(_END_TAG, end), text[begin:end])]


def _run(text: str, at: int) -> list[_Written]:
    """Llama 3: JSON objects with `;` between them."""
    return list(_objects(text, at)) or [_Written(at, len(text), text[at:])]


_FORMATS: Mapping[str, Callable[[str, int], list[_Written]]] = {_TAG: _tagged, "<|python_tag|>": _run}
"""The mark of a format -> the calls in a text whose mark ends at an index; at least one, which may be broken. Calls
without any mark (Llama 3) are in `_find`."""
_MARKS = (*_FORMATS, _THINK, _END_THINK)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))


def _objects(text: str, at: int, names: Collection[str] | None = None) -> Iterator[_Written]:
    """JSON objects from `at` on, with white space or `;` between them. A broken one reaches to the end of the text.
    names: tools; the first object that names none of them ends the row."""
    at = _after(_SPACE, text, at)
    lexed, before = _lexed(text, at), at
    while text.startswith("{", at):
        end = _json_end(lexed, at - before)
        end = None if end is None else before + end
        if names is not None and not _begins_call(text, at, end, names):
            return
        end = end or len(text)
        following = _after(_BETWEEN, text, end)
        yield _Written(at, following, text[at:end])
        at = following


def _lexed(text: str, at: int) -> str:
    """The text from `at` on, as far as it can be JSON. An error of a JSON parser counts the lines before its place, so
    the parser isn't given the whole text."""
    return text[at : _after(_LEXED, text, at)] if text.startswith("{", at) else ""


def _json_end(text: str, at: int) -> int | None:
    """Where the JSON object that begins at `at` ends; None where there is none."""
    try:
        return _json.raw_decode(text, at)[1] if text.startswith("{", at) else None
    except (ValueError, RecursionError):
        return None


def _begins_call(text: str, at: int, end: int | None, names: Collection[str]) -> bool:
    """Whether the JSON object text[at:end] (None: broken) names an offered tool, in the place of a call's name."""
    try:
        value = read_plain(text[at:end]) if end is not None else None
    except ValueError:
        value = None
    if isinstance(value, dict):
        return tool_name(value) in names
    head = _HEAD.match(text, at)
    return head is not None and head[1][1:-1] in names


def _native_call(call: Mapping[str, JsonValue]) -> tuple[Message | None, str]:
    """(a call that an engine has parsed in the chat format, or None without a name; what is wrong with it)."""
    try:
        return _chat(*_parts(dict(call)), id=str(call.get("id") or "")), ""
    except ValueError as error:
        return None, str(error)


def _written_call(body: str) -> tuple[Message | None, str]:
    """(the call in the chat format, or None without a name; what is wrong with it, or nothing)."""
    try:
        try:
            value = read_plain(body)
        except ValueError as error:
            raise ValueError(f"The call is not valid JSON: {error}.") from None
        return _chat(*_parts(value)), ""
    except ValueError as error:
        # What follows the name, as it is: a program that is served the call can't read it either, and tells the model.
        head = _HEAD.match(body)
        tail = body[head.end() :].strip() if head is not None else ""
        return _chat(head[1][1:-1], tail) if head is not None and tail else None, str(error)


def _parts(call: JsonValue) -> tuple[str, JsonValue]:
    """(name, arguments) of a call as an object, also in the chat format. ValueError says what is wrong with it.

    Nothing beside name and arguments is dropped: it may be arguments in a place where no tool would get them.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise ValueError(_SHAPE)
    unknown = ", ".join(map(repr, sorted(set(function) - _KEYS)))
    if unknown:
        raise ValueError(f"The call has {unknown} beside its arguments. {_SHAPE}")
    if "arguments" in function and "parameters" in function:
        raise ValueError('The call has "arguments" and "parameters": write one of them.')
    arguments = function.get("arguments", function.get("parameters"))
    return name, {} if arguments is None or arguments == "" else arguments


def _chat(name: str, arguments: JsonValue, id: str = "") -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def _read(content: str, entries: Sequence[tuple[Message | None, str]]) -> CallsRead:
    """entries: each call in the chat format, or None, and what is wrong with it as far as that is known."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    for k, (call, problem) in enumerate(entries):
        try:
            if problem or call is None:
                raise ValueError(problem)
            calls.append(_tool_call(call, k))
        except ValueError as error:
            place = f"Call {k + 1} of {len(entries)}: " if len(entries) > 1 else ""
            problems.append(f"{place}{error}")
    return CallsRead(content, tuple(calls), " ".join(problems), tuple(call for call, _ in entries if call is not None))


def _tool_call(call: Message, k: int) -> ToolCall:
    """A call in the chat format with its arguments as an object. ValueError says what is wrong with it."""
    name, arguments = _parts(call)
    if isinstance(arguments, str):
        try:
            arguments = read_plain(arguments)
        except ValueError as error:
            raise ValueError(f"The arguments are not valid JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise ValueError(_SHAPE)
    return ToolCall(id=str(call.get("id") or f"call_{k}"), name=name, arguments=arguments)


def _around(text: str, calls: Sequence[_Written]) -> str:
    """The text without these calls: what stands before the first as it is, what follows on lines of its own."""
    if not calls:
        return text
    gaps = zip(calls, [*calls[1:], None], strict=True)
    behind = [text[one.end : following.start if following else None].strip() for one, following in gaps]
    return "\n".join(part for part in (text[: calls[0].start].rstrip(), *behind) if part)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the match of `pattern` at `at` ends; `at` where it doesn't match."""
    match = pattern.match(text, at)
    return match.end() if match is not None else at
