"""Reads function calls in the text of a model's answer, in the formats that models write.

`Reply.tool_calls`, `ChatAgent` and the gateway all use `read_tool_calls`. A format consists of a mark and a function
that finds the calls after it. To support another model family, add its format to `_FORMATS`. Nothing inside a thought
(`<think>...</think>`) is a call, because a model that thinks about a call hasn't made it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, JsonValue

from ...tapes.common.plain_json import read_plain
from ...tapes.records import Message
from ...tapes.steps import ToolCall
from .incremental_decoder import overlap

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_SHAPE = 'A call is a JSON object with "name" and "arguments".'
_HEAD = re.compile(r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
"""Matches the beginning of a call up to and including its name, whether or not the call is valid JSON."""
_LEXED = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Matches text that can be JSON: up to a string without an end, or to a `<` or `\\` outside of strings. It ends at the
next mark, unless that mark is in a string. A match from that mark ends at the mark after it, so reading is linear."""
_TAGGED_END = re.compile(rf"\s*(?:{_END_TAG}|(?={_TAG})|\Z)")
_ANY_TAG = re.compile(f"{_TAG}|{_END_TAG}")
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*;?\s*")
_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallsRead:
    """A model's answer, read for function calls."""

    content: str
    """The text around the calls, including thoughts. It is the whole text if there are no calls."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that could be read, in order."""
    problem: str = ""
    """Why the other calls can't be read, as sentences for the model. It is empty if all calls could be read."""
    chat: tuple[Message, ...] = ()
    """All calls that have a name, in the chat format. Arguments are JSON text, or the model's own text if it can't be
    read. The id is empty if the engine gave none."""


class _Written(NamedTuple):
    """The place of a call in the answer's text, and its JSON, which may be invalid."""

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
    """Return the function calls in a model's answer.

    `tools` has the names or schemas of the tools that were offered. A bare JSON object is a call only if it names one
    of them. An object after a mark such as `<tool_call>` is always a call. `native` has the calls in the chat format if
    the engine has parsed them, and then the text isn't read. `thinking` says whether the answer begins inside a thought
    that the prompt has opened.
    """
    if native:
        return _read(text, [_native_call(call) for call in native])
    names = {tool if isinstance(tool, str) else tool_name(tool) for tool in tools} - {""}
    written = _find(text, names, thinking)
    entries = [_written_call(one.body) for one in written]
    named = [one for one, (call, _) in zip(written, entries, strict=True) if call is not None]
    return _read(_around(text, named), entries)


def tool_name(schema: Mapping[str, JsonValue]) -> str:
    """Return the name in a function schema, with or without `{"type": "function", "function": ...}` around it."""
    function = schema.get("function", schema)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def free_prefix(text: str, fresh: bool, thinking: bool) -> tuple[int, bool, bool]:
    """Return (n, fresh, thinking). The first n characters of `text`, the unsent end of an answer, belong to its content
    whatever follows.

    `fresh` means that only white space separates the place from the beginning of the answer or the end of a thought.
    `thinking` means that the place is in a thought. Both are given for the beginning of `text` and returned for place
    n. The n characters must contain nothing that `read_tool_calls` may take for a call, because a stream would then
    send part of a call as text.
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
        n = len(rest[: len(rest) - held].rstrip())  # white space before a call isn't content
        return at + n, fresh and not n, False


def _find(text: str, names: Collection[str], thinking: bool) -> list[_Written]:
    """Return the calls outside of thoughts. A mark in a string inside a call is a part of that call."""
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
                # The prompt or a lost token opened this thought, so everything before it was part of the thought.
                found.clear()
                fresh = True


def _tagged(text: str, at: int) -> list[_Written]:
    """Return the call after a mark as Hermes and Qwen write it: `<tool_call>JSON</tool_call>`. The end tag may be
    missing, for example because it ended the answer."""
    begin = _after(_SPACE, text, at)
    end = _json_end(_lexed(text, begin), 0)
    tag = _TAGGED_END.match(text, begin + end) if end is not None else None
    if tag is not None and end is not None:
        return [_Written(at, tag.end(), text[begin : begin + end])]
    # Broken JSON ends at the nearest tag, or with the text if no tag follows.
    nearest = _ANY_TAG.search(text, at)
    end = nearest.start() if nearest is not None else len(text)
    return [_Written(at, end + len(_END_TAG) * text.startswith(_END_TAG, end), text[begin:end])]


def _run(text: str, at: int) -> list[_Written]:
    """Return the calls after a mark as Llama 3 writes them: JSON objects with `;` between them."""
    return list(_objects(text, at)) or [_Written(at, len(text), text[at:])]


_FORMATS: Mapping[str, Callable[[str, int], list[_Written]]] = {_TAG: _tagged, "<|python_tag|>": _run}
"""The mark of a format -> a function of the text and the index after the mark, which finds at least one call, broken or
not. `_find` handles calls without any mark (Llama 3)."""
_MARKS = (*_FORMATS, _THINK, _END_THINK)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))


def _objects(text: str, at: int, names: Collection[str] | None = None) -> Iterator[_Written]:
    """Yield the JSON objects from `at` on, with white space or `;` between them. A broken one reaches to the end of the
    text. With `names`, the first object that names none of these tools ends the series."""
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
    """Return the part of the text from `at` on that can be JSON. A JSON parser counts the lines before an error, so it
    doesn't get the whole text."""
    return text[at : _after(_LEXED, text, at)] if text.startswith("{", at) else ""


def _json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON object that begins at `at`, or None if no valid one begins there."""
    try:
        return _json.raw_decode(text, at)[1] if text.startswith("{", at) else None
    except (ValueError, RecursionError):
        return None


def _begins_call(text: str, at: int, end: int | None, names: Collection[str]) -> bool:
    """Return whether the JSON object text[at:end] has the name of an offered tool in the field for a tool's name. `end`
    is None for broken JSON."""
    try:
        value = read_plain(text[at:end]) if end is not None else None
    except ValueError:
        value = None
    if isinstance(value, dict):
        return tool_name(value) in names
    head = _HEAD.match(text, at)
    return head is not None and head[1][1:-1] in names


def _native_call(call: Mapping[str, JsonValue]) -> tuple[Message | None, str]:
    """Return (call, fault) for a call that an engine has parsed, in the chat format. The call is None if it has no
    name, and the fault is "" if the call is valid."""
    try:
        return _chat(*_parts(dict(call)), id=str(call.get("id") or "")), ""
    except ValueError as error:
        return None, str(error)


def _written_call(body: str) -> tuple[Message | None, str]:
    """Return (call, fault) for a call in the answer's text. The call is in the chat format, or None if it has no name,
    and the fault is "" if the call is valid."""
    try:
        try:
            value = read_plain(body)
        except ValueError as error:
            raise ValueError(f"The call is not valid JSON: {error}.") from None
        return _chat(*_parts(value)), ""
    except ValueError as error:
        # The text after the name is kept as it is. A program that receives the call can't read it either, and informs
        # the model.
        head = _HEAD.match(body)
        tail = body[head.end() :].strip() if head is not None else ""
        return _chat(head[1][1:-1], tail) if head is not None and tail else None, str(error)


def _parts(call: JsonValue) -> tuple[str, JsonValue]:
    """Return (name, arguments) of a call that is an object, also in the chat format. Raises ValueError with its fault.

    A key other than name and arguments is a fault, because it may be an argument that no tool would get.
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
    """Return the calls and faults in `entries`. Each entry has a call in the chat format, or None, and its fault, or ""
    if none is known yet."""
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
    """Return a call in the chat format with its arguments as an object. Raises ValueError with its fault."""
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
    """Return the text without these calls. Text before the first call only loses white space at its end. Later pieces
    go on separate lines."""
    if not calls:
        return text
    gaps = zip(calls, [*calls[1:], None], strict=True)
    behind = [text[one.end : following.start if following else None].strip() for one, following in gaps]
    return "\n".join(part for part in (text[: calls[0].start].rstrip(), *behind) if part)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match of `pattern` at `at`, or `at` itself if it doesn't match."""
    match = pattern.match(text, at)
    return match.end() if match is not None else at


def tool_schema(tool: type[BaseModel] | dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a function schema in the chat format. A dict is returned unchanged. For a step class, the schema is built
    from its kind, docstring and fields."""
    if isinstance(tool, dict):
        return tool
    schema = tool.model_json_schema()
    schema.pop("title", None)
    description = schema.pop("description", None) or ""
    function = {"name": getattr(tool, "kind", tool.__name__), "description": description, "parameters": schema}
    return {"type": "function", "function": function}
