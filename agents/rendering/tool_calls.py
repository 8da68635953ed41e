"""Reads the function calls and thoughts in a model's answer.

A `CallReader` reads the answers of one model family. `HermesReader` reads the formats of Hermes, Qwen and Llama 3, and
also serves engines without a renderer. `response_reader` reads other formats by a declarative description. Text inside
a thought (`<think>...</think>`) is never a call, because a model that thinks about a call hasn't made it. An answer
that was cut off has no calls, because the model hadn't finished it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from pydantic import BaseModel, JsonValue

from ...tapes.common.arguments import shown
from ...tapes.common.plain_json import read_plain
from ...tapes.errors import BadArgument
from ...tapes.records import Message
from ...tapes.steps import ToolCall
from .incremental_decoder import overlap

if TYPE_CHECKING:
    from ...envs.adapters.tools import Tool

ToolLike: TypeAlias = "Callable[..., object] | Tool | type[BaseModel] | dict[str, JsonValue]"
"""What can be offered to a model: a function, a `Tool`, a step class or a function schema."""

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_SHAPE = 'A call is a JSON object with "name" and "arguments".'
_HEAD = re.compile(r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
"""Matches the beginning of a call, up to and including its name, even if the rest isn't valid JSON."""
_LEXED = re.compile(r'(?:[\s{}\[\]:,;0-9.eE+-]++|"(?:[^"\\]++|\\.)*+"|true|false|null|NaN|Infinity)*+', re.DOTALL)
"""Matches text that may be JSON values, separated by white space or `;`. The match ends before a character that JSON
doesn't have outside of strings, and before a string without an end. So it never runs past the next mark outside of
strings, and reading all calls takes linear time."""
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
    reasoning: str = ""
    """The text of the answer's thoughts, without their marks. Several thoughts are on separate lines."""
    answer: str = ""
    """The answer's text without its thoughts and without its calls."""

    def answering(self, answer: str) -> CallsRead:
        """Return the same with this `answer`."""
        return replace(self, answer=answer)


class Span(NamedTuple):
    """The position of a call or thought in the answer's text, and the text between its marks, which may be invalid."""

    start: int
    end: int
    body: str


class CallReader(Protocol):
    """Reads the answers of one model family."""

    def read(
        self,
        text: str,
        tools: Collection[str | Mapping[str, JsonValue]] | None,
        *,
        prompt: str = "",
        end: str = "",
        cut: bool = False,
    ) -> CallsRead:
        """Read an answer. `tools` has the names or schemas of the offered tools. If it is None, no text is a call.
        `prompt` is the end of the prompt, which may have opened a thought. `end` is the text of the token that ended
        the answer, which isn't in `text`. `cut` is true if the answer was cut off. Then it has no calls."""
        ...

    def stream(self, *, tools: bool, prompt: str = "") -> AnswerStream:
        """Return an object that reads one streamed answer. `tools` is true if tools are offered. For `prompt`, see
        `read`."""
        ...


class Piece(NamedTuple):
    """A piece of a streamed answer."""

    thought: bool
    """Whether the text belongs to a thought."""
    text: str


class AnswerStream(Protocol):
    """Separates the thoughts from the answer while it is sampled, and holds back text that may begin a call."""

    def feed(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that can be sent now, in order. The pieces of thoughts are the beginning of
        `CallsRead.reasoning`, and the others are the beginning of `CallsRead.answer`, whatever text follows."""
        ...


class JoinedRegions:
    """Joins the regions of a streamed answer as `read_calls` does: without the white space around them, and on separate
    lines."""

    def __init__(self, *, begun: bool = False) -> None:
        """If `begun` is true, white space at the beginning of the first region is kept."""
        self._begun, self._any, self._space = begun, False, ""

    def feed(self, text: str) -> str:
        """Add text to the region, and return the text that can be sent now. White space waits for what follows it."""
        text = self._space + text if self._begun else text.lstrip()
        known = text.rstrip()
        self._space = text[len(known) :]
        if not known:
            return ""
        line = "\n" if self._any and not self._begun else ""
        self._begun = self._any = True
        return line + known

    def end(self) -> None:
        """End the region."""
        self._begun, self._space = False, ""


def read_tool_calls(
    text: str,
    tools: Collection[str | Mapping[str, JsonValue]] = (),
    *,
    native: Sequence[Mapping[str, JsonValue]] = (),
    thinking: bool = False,
    cut: bool = False,
) -> CallsRead:
    """Return the function calls in a model's answer, in the formats of Hermes, Qwen and Llama 3.

    `tools` has the names or schemas of the offered tools. A JSON object after a mark such as `<tool_call>` is a call of
    one of them, or a problem. Without a mark, it is text unless it names an offered tool. If `tools` is empty, each
    object after a mark is a call. `native` has the calls that the engine itself has parsed, in the chat format. If
    there are any, the text isn't read. `thinking` is true if the answer begins inside a thought that the prompt has
    opened. `cut` is true if the answer was cut off. Then it has no calls.
    """
    if native:
        return read_calls(text, [], [_native_call(call) for call in native], [], cut=cut)
    names = tool_names(tools)
    written, thoughts = _find(text, names, thinking)
    return read_calls(text, written, [_written_call(one.body, names) for one in written], thoughts, cut=cut)


class HermesReader:
    """Reads the formats of Hermes, Qwen 2.5 and 3 (`<tool_call>JSON</tool_call>`), and of Llama 3 (JSON)."""

    def read(
        self,
        text: str,
        tools: Collection[str | Mapping[str, JsonValue]] | None,
        *,
        prompt: str = "",
        end: str = "",
        cut: bool = False,
    ) -> CallsRead:
        """Read an answer, as `CallReader.read` describes."""
        # A template such as DeepSeek's may begin the model's thought at the end of the prompt.
        thinking = prompt.rstrip().endswith(_THINK)
        if tools is None:
            return read_calls(text, [], [], _find(text, None, thinking)[1])
        return read_tool_calls(text, tools, thinking=thinking, cut=cut)

    def stream(self, *, tools: bool, prompt: str = "") -> AnswerStream:
        """Return an object that reads one streamed answer, as `CallReader.stream` describes."""
        return _HermesStream(tools, prompt.rstrip().endswith(_THINK))


class _HermesStream:
    def __init__(self, tools: bool, thinking: bool) -> None:
        self._tools, self._thinking = tools, thinking
        self._pattern, self._words = (_MARK, _MARKS) if tools else (_THOUGHT, (_THINK, _END_THINK))
        self._held = ""
        self._fresh = True
        """True at the beginning of the answer and after a thought, as long as only white space has followed."""
        self._stopped = False
        """True if the rest of the answer may belong to a call, so nothing more is sent before the answer ends."""
        self._reasoning, self._answer = JoinedRegions(), JoinedRegions(begun=not thinking)

    def feed(self, text: str) -> list[Piece]:
        if self._stopped:
            return []
        held, at, found = self._held + text, 0, list[Piece]()
        while True:
            if self._thinking:
                end = held.find(_END_THINK, at)
                found += self._sent(held[at : end if end >= 0 else max(at, len(held) - overlap(held, _END_THINK))])
                if end < 0:
                    at = max(at, len(held) - overlap(held, _END_THINK))
                    break
                self._reasoning.end()
                at, self._fresh, self._thinking = end + len(_END_THINK), True, False
                continue
            if self._fresh and self._tools and (first := held[at:].lstrip()[:1]) in ("", "{"):
                self._stopped = first == "{"
                break
            mark = self._pattern.search(held, at)
            end = (
                max(at, len(held) - max(overlap(held, word) for word in self._words)) if mark is None else mark.start()
            )
            if mark is not None and mark[0] == _END_THINK:
                end = mark.end()  # it ends no thought that is known, so it is text
            self._fresh = self._fresh and not held[at:end].strip()
            found += self._sent(held[at:end])
            at = end
            if mark is None:
                break
            if mark[0] == _END_THINK:
                self._fresh = True
                continue
            if mark[0] != _THINK:
                self._stopped = True
                break
            self._answer.end()
            at, self._thinking = mark.end(), True
        self._held = held[at:]
        return found

    def _sent(self, text: str) -> list[Piece]:
        sent = (self._reasoning if self._thinking else self._answer).feed(text)
        return [Piece(self._thinking, sent)] if sent else []


def tool_names(tools: Collection[str | Mapping[str, JsonValue]]) -> set[str]:
    """Return the names of the offered tools."""
    return {tool if isinstance(tool, str) else tool_name(tool) for tool in tools} - {""}


def tool_name(schema: Mapping[str, JsonValue]) -> str:
    """Return the name in a function schema. The schema may be inside `{"type": "function", "function": ...}`."""
    function = schema.get("function", schema)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _find(text: str, names: Collection[str] | None, thinking: bool) -> tuple[list[Span], list[Span]]:
    """Return the calls outside of thoughts, and the thoughts. If a string in a call contains a mark, the mark is part
    of that call. If `names` is None, nothing is a call."""
    found, thoughts = list[Span](), list[Span]()
    at, opened, fresh = 0, 0, True
    while True:
        if thinking:
            end = text.find(_END_THINK, at)
            if end < 0:
                thoughts.append(Span(opened, len(text), text[at:]))
                return found, thoughts
            thoughts.append(Span(opened, end + len(_END_THINK), text[at:end]))
            at, fresh, thinking = end + len(_END_THINK), True, False
        calls = list(_objects(text, at, names)) if fresh and names is not None else []
        mark = None if calls else _MARK.search(text, at)
        if mark is None and not calls:
            return found, thoughts
        if mark is not None and mark[0] in _FORMATS and names is not None:
            calls = _FORMATS[mark[0]](text, mark.end())
            calls[0] = calls[0]._replace(start=mark.start())
        fresh = False
        if calls:
            found += calls
            at = calls[-1].end
        elif mark is not None:
            at, opened, thinking = mark.end(), mark.start(), mark[0] == _THINK
            if mark[0] == _END_THINK:
                # A thought ends here that the prompt or a lost token opened, so all text before this point belongs to
                # the thought.
                found.clear()
                fresh = True


def _tagged(text: str, at: int) -> list[Span]:
    """Return the call after a mark in the format of Hermes and Qwen, `<tool_call>JSON</tool_call>`. The end tag may be
    missing, for example because it is the token that ended the answer."""
    begin = _after(_SPACE, text, at)
    end = _json_end(_lexed(text, begin), 0)
    tag = _TAGGED_END.match(text, begin + end) if end is not None else None
    if tag is not None and end is not None:
        return [Span(at, tag.end(), text[begin : begin + end])]
    # Broken JSON ends at the nearest tag, or at the end of the text if there is no tag.
    nearest = _ANY_TAG.search(text, at)
    end = nearest.start() if nearest is not None else len(text)
    return [Span(at, end + len(_END_TAG) * text.startswith(_END_TAG, end), text[begin:end])]


def _run(text: str, at: int) -> list[Span]:
    """Return the calls after a mark in the format of Llama 3, which is JSON objects separated by `;`."""
    return list(_objects(text, at)) or [Span(at, len(text), text[at:])]


_FORMATS: Mapping[str, Callable[[str, int], list[Span]]] = {_TAG: _tagged, "<|python_tag|>": _run}
"""The function that reads each format's calls, by the format's mark. The function gets the text and the index after the
mark. It returns at least one call, which may be broken. `_find` itself handles calls without a mark (Llama 3)."""
_MARKS = (*_FORMATS, _THINK, _END_THINK)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_THOUGHT = re.compile(f"{_THINK}|{_END_THINK}")


def _objects(text: str, at: int, names: Collection[str] | None = None) -> Iterator[Span]:
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
        yield Span(at, following, text[at:end])
        at = following


def json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON value that begins at `at`, or None if no valid value begins there. The time doesn't
    depend on the text after the value's own characters."""
    try:
        return at + _json.raw_decode(text[at : _after(_LEXED, text, at)])[1]
    except (ValueError, RecursionError):
        return None


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
        return chat_call(*_parts(dict(call)), id=str(call.get("id") or "")), ""
    except ValueError as error:
        return None, str(error)


def _written_call(body: str, names: Collection[str]) -> tuple[Message | None, str]:
    """Return (call, fault) for a call in the answer's text. `call` is in the chat format, or None if it has no name.
    `fault` is "" if the call is valid and `names` has its tool or is empty."""
    try:
        try:
            value = read_plain(body)
        except ValueError as error:
            raise ValueError(f"The call is not valid JSON: {error}.") from None
        name, arguments = _parts(value)
        return chat_call(name, arguments), f"There is no tool {name!r}." if names and name not in names else ""
    except ValueError as error:
        # The text after the call's name is kept as it is. A program that gets the call can't read this text either, and
        # will say so to the model.
        head = _HEAD.match(body)
        tail = body[head.end() :].strip() if head is not None else ""
        return chat_call(head[1][1:-1], tail) if head is not None and tail else None, str(error)


def _parts(call: object) -> tuple[str, JsonValue]:
    """Return (name, arguments) of a call, which may be in the chat format. Raises ValueError with the call's fault.

    A key other than name and arguments is a fault, because it may be an argument that the tool wouldn't get.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise ValueError(_SHAPE)
    unknown = ", ".join(map(repr, sorted(set(function) - _KEYS)))
    if unknown:
        raise ValueError(f"The call has {unknown} in addition to its arguments. {_SHAPE}")
    if "arguments" in function and "parameters" in function:
        raise ValueError('The call has "arguments" and "parameters": write one of them.')
    arguments = function.get("arguments", function.get("parameters"))
    return name, {} if arguments is None or arguments == "" else arguments


def checked_call(call: object) -> tuple[str, dict[str, JsonValue]]:
    """Return (name, arguments) of a call, which may be in the chat format. Raises ValueError with the call's fault."""
    name, arguments = _parts(call)
    if isinstance(arguments, str):
        try:
            arguments = read_plain(arguments)
        except ValueError as error:
            raise ValueError(f"The arguments are not valid JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise ValueError(_SHAPE)
    return name, arguments


def chat_call(name: str, arguments: JsonValue, id: str = "") -> Message:
    """Return a call in the chat format."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def read_calls(
    text: str,
    written: Sequence[Span],
    entries: Sequence[tuple[Message | None, str]],
    thoughts: Sequence[Span],
    *,
    cut: bool = False,
) -> CallsRead:
    """Return the calls and faults in `entries`. Each entry is (call, fault). `call` is in the chat format or None, and
    `fault` is "" if no fault is known yet. `written` has the place of each entry in the text, or is empty if the calls
    aren't in the text. If the answer was cut off, it has no calls."""
    if not entries and not thoughts:
        return CallsRead(text, answer=text)
    fault = "The answer was cut off before its end, so it makes no call." if cut and entries else ""
    if fault:
        written, entries = [], []
    named = [one for one, (call, _) in zip(written, entries, strict=bool(written)) if call is not None]
    reasoning = "\n".join(body for one in thoughts if (body := one.body.strip()))
    content, answer = _around(text, named), _around(text, sorted((*named, *thoughts)))
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
    chat = tuple(call for call, _ in entries if call is not None)
    return CallsRead(content, tuple(calls), fault or " ".join(problems), chat, reasoning, answer)


def _tool_call(call: Message, k: int) -> ToolCall:
    """Return the `ToolCall` for a call in the chat format. Raises ValueError with the call's fault."""
    name, arguments = checked_call(call)
    return ToolCall(id=str(call.get("id") or f"call_{k}"), name=name, arguments=arguments)


def _around(text: str, spans: Sequence[Span]) -> str:
    """Return the text without these spans. White space at the end of the text before the first span is removed. The
    later pieces go on separate lines."""
    if not spans:
        return text
    gaps = zip(spans, [*spans[1:], None], strict=True)
    behind = [text[one.end : following.start if following else None].strip() for one, following in gaps]
    return "\n".join(part for part in (text[: spans[0].start].rstrip(), *behind) if part)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match of `pattern` at index `at`, or `at` itself if nothing matches there."""
    match = pattern.match(text, at)
    return match.end() if match is not None else at


def tool_schema(tool: ToolLike) -> dict[str, JsonValue]:
    """Return a tool's function schema in the chat format. A dict is returned unchanged. For a step class, the schema
    is built from its kind, docstring and fields, and for a function from its type hints and docstring. Raises
    BadArgument for any other value."""
    from ...envs.adapters.tools import Tool
    from ...envs.adapters.tools import tool as of_function

    if isinstance(tool, dict) and tool_name(tool):
        return tool
    if isinstance(tool, Tool):
        return tool.schema
    if callable(tool) and not isinstance(tool, type):
        return of_function(tool).schema
    if not isinstance(tool, type) or not issubclass(tool, BaseModel):
        raise BadArgument(
            f"the tool {shown(tool)} can't be offered: give a function, a Tool, a step class, or a schema of the form "
            "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}"
        )
    schema = tool.model_json_schema()
    schema.pop("title", None)
    description = schema.pop("description", None) or ""
    function = {"name": getattr(tool, "kind", tool.__name__), "description": description, "parameters": schema}
    return {"type": "function", "function": function}
