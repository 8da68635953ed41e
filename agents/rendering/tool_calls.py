"""Reads the function calls in a model's answer, in the formats that models write.

`Reply.tool_calls`, `ChatAgent` and the gateway all use `read_tool_calls`. Each format has a mark and a function that
finds the calls after the mark. To support another model family, add its format to `_FORMATS`. Text inside a thought
(`<think>...</think>`) is never a call, because a model that thinks about a call hasn't made it.
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
"""Matches the beginning of a call, up to and including its name, even if the rest isn't valid JSON."""
_LEXED = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Matches text that may be JSON. The match ends before a `<` or `\\` outside of strings, and before a string without an
end. So it never runs past the next mark outside of strings, and reading all calls takes linear time."""
_TAGGED_END = re.compile(rf"\s*(?:{_END_TAG}|(?={_TAG})|\Z)")
_ANY_TAG = re.compile(f"{_TAG}|{_END_TAG}")
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*;?\s*")
_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallsRead:
    """The function calls in a model's answer, and the text around them."""

    content: str
    """The answer's text with its thoughts and without its calls. Without any calls, this is the whole text."""
    calls: tuple[ToolCall, ...] = ()
    """All calls that could be read, in order."""
    problem: str = ""
    """Sentences that tell the model why some calls couldn't be read. Empty if all calls could be read."""
    chat: tuple[Message, ...] = ()
    """All calls that have a name, in the chat format. A call's arguments are JSON text, or the model's own text if it
    isn't valid JSON. A call's id is empty if the engine gave none."""


class _Written(NamedTuple):
    """The position of a call in the answer's text, and the call's JSON, which may be invalid."""

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

    `tools` has the names or schemas of the offered tools. A JSON object after a mark such as `<tool_call>` is always a
    call. Without a mark, it is a call only if it names an offered tool. `native` has the calls that the engine itself
    has parsed, in the chat format. If there are any, the text isn't read. `thinking` is true if the answer begins
    inside a thought that the prompt has opened.
    """
    if native:
        return _read(text, [_native_call(call) for call in native])
    names = {tool if isinstance(tool, str) else tool_name(tool) for tool in tools} - {""}
    written = _find(text, names, thinking)
    entries = [_written_call(one.body) for one in written]
    named = [one for one, (call, _) in zip(written, entries, strict=True) if call is not None]
    return _read(_around(text, named), entries)


def tool_name(schema: Mapping[str, JsonValue]) -> str:
    """Return the name in a function schema. The schema may be inside `{"type": "function", "function": ...}`."""
    function = schema.get("function", schema)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def free_prefix(text: str, fresh: bool, thinking: bool) -> tuple[int, bool, bool]:
    """Find out how much of a streamed answer can be sent. `text` is the part that hasn't been sent yet. Returns (n,
    fresh, thinking).

    The first n characters are part of the answer's content, whatever text follows, so the stream can send them. They
    never include text that `read_tool_calls` may later read as part of a call. `thinking` is true inside a thought.
    `fresh` is true at the beginning of the answer and after a thought, as long as only white space has followed. The
    arguments describe the beginning of `text`, and the results describe position n.
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
    """Return the calls outside of thoughts. If a string in a call contains a mark, the mark is part of that call."""
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
                # A thought ends here that the prompt or a lost token opened, so all text before this point belongs to
                # the thought.
                found.clear()
                fresh = True


def _tagged(text: str, at: int) -> list[_Written]:
    """Return the call after a mark in the format of Hermes and Qwen, `<tool_call>JSON</tool_call>`. The end tag may be
    missing, for example because it is the token that ended the answer."""
    begin = _after(_SPACE, text, at)
    end = _json_end(_lexed(text, begin), 0)
    tag = _TAGGED_END.match(text, begin + end) if end is not None else None
    if tag is not None and end is not None:
        return [_Written(at, tag.end(), text[begin : begin + end])]
    # Broken JSON ends at the nearest tag, or at the end of the text if there is no tag.
    nearest = _ANY_TAG.search(text, at)
    end = nearest.start() if nearest is not None else len(text)
    return [_Written(at, end + len(_END_TAG) * text.startswith(_END_TAG, end), text[begin:end])]


def _run(text: str, at: int) -> list[_Written]:
    """Return the calls after a mark in the format of Llama 3, which is JSON objects separated by `;`."""
    return list(_objects(text, at)) or [_Written(at, len(text), text[at:])]


_FORMATS: Mapping[str, Callable[[str, int], list[_Written]]] = {_TAG: _tagged, "<|python_tag|>": _run}
"""The function that reads each format's calls, by the format's mark. The function gets the text and the index after the
mark. It returns at least one call, which may be broken. `_find` itself handles calls without a mark (Llama 3)."""
_MARKS = (*_FORMATS, _THINK, _END_THINK)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))


def _objects(text: str, at: int, names: Collection[str] | None = None) -> Iterator[_Written]:
    """Yield the JSON objects from `at` on, separated by white space or `;`. A broken object extends to the end of the
    text. If `names` is given, the series ends before the first object that names none of these tools."""
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
    """Return the text from `at` on, up to where it can't be JSON. Only this text is given to the parser, because after
    an error, the parser counts all lines before the error, which takes time in a long text."""
    return text[at : _after(_LEXED, text, at)] if text.startswith("{", at) else ""


def _json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON object that begins at `at`, or None if no valid object begins there."""
    try:
        return _json.raw_decode(text, at)[1] if text.startswith("{", at) else None
    except (ValueError, RecursionError):
        return None


def _begins_call(text: str, at: int, end: int | None, names: Collection[str]) -> bool:
    """Return whether the JSON object text[at:end] is a call of one of the tools in `names`. For broken JSON, `end` is
    None, and only the beginning of the object is read."""
    try:
        value = read_plain(text[at:end]) if end is not None else None
    except ValueError:
        value = None
    if isinstance(value, dict):
        return tool_name(value) in names
    head = _HEAD.match(text, at)
    return head is not None and head[1][1:-1] in names


def _native_call(call: Mapping[str, JsonValue]) -> tuple[Message | None, str]:
    """Return (call, fault) for a call that an engine has parsed. `call` is in the chat format, or None if it has no
    name. `fault` is "" if the call is valid."""
    try:
        return _chat(*_parts(dict(call)), id=str(call.get("id") or "")), ""
    except ValueError as error:
        return None, str(error)


def _written_call(body: str) -> tuple[Message | None, str]:
    """Return (call, fault) for a call in the answer's text. `call` is in the chat format, or None if it has no name.
    `fault` is "" if the call is valid."""
    try:
        try:
            value = read_plain(body)
        except ValueError as error:
            raise ValueError(f"The call is not valid JSON: {error}.") from None
        return _chat(*_parts(value)), ""
    except ValueError as error:
        # The text after the call's name is kept as it is. A program that gets the call can't read this text either, and
        # will say so to the model.
        head = _HEAD.match(body)
        tail = body[head.end() :].strip() if head is not None else ""
        return _chat(head[1][1:-1], tail) if head is not None and tail else None, str(error)


def _parts(call: JsonValue) -> tuple[str, JsonValue]:
    """Return (name, arguments) of a call, which may be in the chat format. Raises ValueError with the call's fault.

    A key other than name and arguments is a fault, because it may be an argument that the tool wouldn't get.
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
    """Return the calls and faults in `entries`. Each entry is (call, fault). `call` is in the chat format or None, and
    `fault` is "" if no fault is known yet."""
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
    """Return the `ToolCall` for a call in the chat format. Raises ValueError with the call's fault."""
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
    """Return the text without these calls. White space at the end of the text before the first call is removed. The
    later pieces go on separate lines."""
    if not calls:
        return text
    gaps = zip(calls, [*calls[1:], None], strict=True)
    behind = [text[one.end : following.start if following else None].strip() for one, following in gaps]
    return "\n".join(part for part in (text[: calls[0].start].rstrip(), *behind) if part)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match of `pattern` at index `at`, or `at` itself if nothing matches there."""
    match = pattern.match(text, at)
    return match.end() if match is not None else at


def tool_schema(tool: type[BaseModel] | dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a tool's function schema in the chat format. A dict is returned unchanged. For a step class, the schema
    is built from its kind, docstring and fields."""
    if isinstance(tool, dict):
        return tool
    schema = tool.model_json_schema()
    schema.pop("title", None)
    description = schema.pop("description", None) or ""
    function = {"name": getattr(tool, "kind", tool.__name__), "description": description, "parameters": schema}
    return {"type": "function", "function": function}
