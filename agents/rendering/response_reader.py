"""Reads calls and thoughts by a `response_template`, the declarative description of a model's answers that transformers
defines (`transformers.utils.chat_parsing`).

A response template has fields, such as `tool_calls`, and the marks that open and close a field's regions. Training must
never use a call that the model didn't write, so this reader is stricter than transformers' parser. A region is a call
only if its closing mark was written, its body is nothing but valid JSON or tags, its arguments are an object, and it
names an offered tool. The syntax of JSON decides where a region of JSON ends, so its strings may contain marks. A bad
call is reported, and the other calls of the answer are still read. If a later mark may belong to a bad call, the text
after this call isn't read.

The values in a region are read by transformers. Reading takes time linear in the length of the answer, if the patterns
of the response template do.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import JsonValue

from ...tapes.common.plain_json import read_plain
from ...tapes.errors import UsageError
from ...tapes.records import Message
from .response_templates import format_of
from .tool_calls import (
    AnswerStream,
    CallReader,
    CallsRead,
    HermesReader,
    JoinedRegions,
    Piece,
    Span,
    chat_call,
    checked_call,
    json_end,
    read_calls,
    tool_names,
)

_CALLS, _CONTENT = "tool_calls", "content"
_BETWEEN = re.compile(r"[\s,]+|</[\w:.-]+>")
"""Matches text that may be between the tags of a call, such as `</function>`."""
_SPACE = re.compile(r"\s*")
_LAST = "\uffff"
"""Put behind the text, so that `$` in a pattern doesn't close a call whose closing mark is missing."""
_NO_END = "it has no end"
_HELD = 1000
"""If more characters than this may be the beginning of a mark, a stream sends nothing more before the answer ends."""
_TAIL = 400
"""Number of characters at the end of a prompt in which the beginning of the answer's turn is searched."""


class _Region(NamedTuple):
    """The place of one field in the answer. `body` and `stop` are the indices of the text between its marks."""

    field: Any
    start: int
    body: int
    stop: int
    end: int
    captures: Mapping[str, str]
    fault: str = ""
    """Why a region of `tool_calls` can't be a call, or ""."""
    closed: bool = True
    """False if the text after `start` isn't read, because the region's end is unknown."""
    values: Mapping[str, JsonValue] | None = None
    """The arguments of a call that is written in tags."""


class ResponseReader:
    """Reads answers by one response template. Implements `CallReader`."""

    def __init__(self, template: Mapping[str, JsonValue], source: str = "response_template") -> None:
        """`source` names the template's origin in error messages. Raises UsageError if the template is invalid."""
        import regex
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec: Any = load_response_template(dict(template))
            pattern = {**template["fields"]}.get(_CALLS, {}).get("content_args", {}).get("tag_pattern")  # pyright: ignore
            self._tag = regex.compile(pattern, regex.DOTALL) if pattern else None
        except (ValueError, TypeError, AttributeError, KeyError, regex.error) as error:
            raise UsageError(f"{source} isn't a response template that transformers can read: {error}") from error
        self._never = regex.compile("(?!)")
        self._opening = [one for one in self._spec.fields.values() if one.open_re is not None]
        self._thoughts = [one for one in self._opening if one.name not in (_CALLS, _CONTENT) and one.content == "text"]

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
        whole, length = text + end + _LAST, len(text)
        names, schemas = tool_names(tools or ()), _properties(tools or ())
        written, entries = list[Span](), list[tuple[Message | None, str]]()
        thoughts, said = list[Span](), list[str]()
        for one in self._regions(whole, self._opened(prompt)):
            if (
                one is None
            ):  # a thought ended that the prompt or a lost token opened, so all calls belong to the thought
                written.clear()
                entries.clear()
                continue
            span = Span(one.start, min(one.end, length), whole[one.body : min(one.stop, length)])
            if one.field.name == _CALLS:
                found = self._entries(one, whole[one.body : one.stop], names, schemas) if tools is not None else []
                entries += found
                # If a region has several calls, the first one stands for the region's text.
                written += [span, *[span._replace(start=span.end)] * (len(found) - 1)][: len(found)]
            elif one.field in self._thoughts:
                thoughts.append(span)
            else:
                said.append(span.body.strip())
        read = read_calls(text, written, entries, thoughts, cut=cut)
        if self._spec.implicit is None and (said or thoughts or written):
            return read.answering("\n".join(filter(None, said)))
        return read

    def stream(self, *, tools: bool, prompt: str = "") -> AnswerStream:
        """Return an object that reads one streamed answer, as `CallReader.stream` describes."""
        plain = self._spec.implicit is not None
        return _ResponseStream(self._opening, self._thoughts, self._opened(prompt), plain=plain)

    def _opened(self, prompt: str) -> Any:
        """Return the field that the prompt opened for the answer, or None."""
        tail = prompt[-_TAIL:]
        last = None
        if tail.rstrip().endswith("<think>") and self._thoughts:
            return self._thoughts[0]
        if self._spec.start_anchor_re.search(tail) is None:
            return None
        for one in self._regions(self._spec.truncate_past_last_anchor(tail) + _LAST, None):
            last = one
        return last.field if last is not None and not last.closed and last.field.name != _CALLS else None

    def _regions(self, text: str, opened: Any) -> Iterator[_Region | None]:
        """Yield the explicit regions in order, and None after a thought's end that has no beginning. `opened` is the
        field that is open at the beginning of the text, or None."""
        at, ahead = 0, dict[str, Any]()
        while at < len(text):
            if opened is not None:
                region = self._plain(text, opened, at, at, {})
                opened = None
            else:
                found = self._next(text, at, ahead)
                if found is None:
                    return
                field, mark, opens = found
                if not opens:
                    yield None
                    at = max(mark.end(), at + 1)
                    continue
                captures = {name: value for name, value in mark.groupdict().items() if value is not None}
                bounds = self._call if field.name == _CALLS else self._plain
                region = bounds(text, field, mark.start(), mark.end(), captures)
            yield region
            if not region.closed or region.end <= at:
                return
            at = region.end

    def _next(self, text: str, at: int, ahead: dict[str, Any]) -> tuple[Any, Any, bool] | None:
        """Return (field, match, whether it opens the field) for the next mark from `at` on, the longest one if several
        begin there. `ahead` keeps the next match of each pattern, so that no text is searched twice for it."""
        best = None
        marks = [(one, one.open_re, True) for one in self._opening]
        marks += [(one, one.close_re, False) for one in self._thoughts if one.close_re is not None]
        for field, pattern, opens in marks:
            key = f"{opens}{field.name}"
            match = pattern.match(text, at)  # a pattern with \G matches only here
            if match is None or match.end() == len(text):
                if key not in ahead or (ahead[key] is not None and ahead[key].start() < at):
                    ahead[key] = pattern.search(text, at)
                match = ahead[key]
            if match is None or match.end() == len(text):
                continue
            rank = (match.start(), match.start() - match.end(), not opens)
            if best is None or rank < best[0]:
                best = rank, (field, match, opens)
        return None if best is None else best[1]

    def _plain(self, text: str, field: Any, start: int, body: int, captures: Mapping[str, str]) -> _Region:
        """Return a region that isn't a call. It ends at the first closing mark."""
        close = field.close_re.search(text, body) if field.close_re is not None else None
        if close is None or close.end() == len(text):
            return _Region(field, start, body, len(text), len(text), captures, closed=False)
        return _Region(field, start, body, close.start(), close.end(), captures)

    def _call(self, text: str, field: Any, start: int, body: int, captures: Mapping[str, str]) -> _Region:
        """Return a region of `tool_calls`. Its fault is set if it has no end, or its body can't be read to its end."""
        closing = field.close_re or self._never
        at = body
        if field.content == "json" and not field.content_args:
            stop = json_end(text, _past(text, body))
            for end in () if stop is None else (stop, _past(text, stop)):
                close = closing.match(text, end)
                if close is not None and close.end() < len(text):
                    return _Region(field, start, body, end, close.end(), captures)
        elif self._tag is not None:
            at, close, values = self._tags(text, body, field)
            if close is not None:
                twice = "an argument is written twice" if values is None else ""
                return _Region(field, start, body, at, close.end(), captures, twice, values=values)
            if values is None:
                return _Region(field, start, body, len(text), len(text), captures, _NO_END, closed=False)
        close = closing.search(text, at)
        if close is None or close.end() == len(text) or field.open_re.search(text, at, close.start()) is not None:
            return _Region(field, start, body, len(text), len(text), captures, _NO_END, closed=False)
        by_syntax = self._tag is not None or (field.content == "json" and not field.content_args)
        fault = "other text is in it" if by_syntax else ""
        return _Region(field, start, body, close.start(), close.end(), captures, fault)

    def _tags(self, text: str, at: int, field: Any) -> tuple[int, Any, dict[str, JsonValue] | None]:
        """Read the tags from `at` on. Return (index after them, closing mark, values).

        The closing mark is None if other text follows. The values are None if a tag has no end, or an argument is
        written twice. A tag whose value begins another tag or call has lost its end, so it isn't known where it ends.
        """
        assert self._tag is not None
        values: dict[str, JsonValue] = {}
        twice = False
        while True:
            close = field.close_re.match(text, at) if field.close_re is not None else None
            if close is not None and close.end() < len(text):
                return at, close, None if twice else values
            tag = self._tag.match(text, at, partial=True)
            if tag is not None and tag.partial and tag.end() == len(text):
                return at, None, None
            if tag is not None and not tag.partial and tag.end() > at:
                begin = text[at : tag.start("key")].strip()
                inside = text[tag.start("value") : tag.end()]
                if (begin and begin in inside) or field.open_re.search(inside) is not None:
                    return at, None, None
                twice = twice or tag["key"] in values
                values[tag["key"]] = _value(tag["value"], field.content_args.get("value_parser"))
            else:
                tag = _BETWEEN.match(text, at)
            if tag is None:
                return at, None, values
            at = tag.end()

    def _entries(
        self, region: _Region, body: str, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]]
    ) -> list[tuple[Message | None, str]]:
        """Return (call, fault) for each call in a region, as `read_calls` takes them."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        field, name = region.field, region.captures.get("name", "").strip()
        try:
            if region.closed and field.content == "json" and not field.content_args:
                read_plain(body)
            if region.fault:
                raise ValueError(region.fault)
            if field.content == "kv-lines":
                _check_lines(body, field.content_args)
            if region.values is not None:
                body, field = json.dumps(region.values), replace(field, content="json", content_args={})
            value = process_field(body, field, dict(region.captures))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if name and name not in names:
                return []  # text that resembles a call, such as a list in Python
            fault = f"The call can't be read: {str(error).partition(chr(10))[0].rstrip('.')}."
            broken = name and region.closed and json_end(body, _past(body, 0)) is None
            return [(chat_call(name, body.strip()) if broken else None, fault)]
        casts = {} if region.field.content == "json" else schemas  # JSON has types of its own
        return [_entry(call, names, casts) for call in (value if isinstance(value, list) else [value])]


class _ResponseStream:
    """Reads as `ResponseReader.read` does. It stops at the first call, even if no tools are offered, because only the
    end of the answer shows what belongs to this call."""

    def __init__(self, opening: list[Any], thoughts: list[Any], opened: Any, *, plain: bool) -> None:
        """`opened` is the field that the prompt opened, or None. If `plain` is true, text outside of regions is part of
        the answer."""
        self._thoughts, self._plain = thoughts, plain
        self._marks = [(one, one.open_re, True) for one in opening]
        self._marks += [(one, one.close_re, False) for one in thoughts if one.close_re is not None]
        self._held = ""
        self._inside: Any = opened
        """The field whose region is open where `_held` begins, or None."""
        self._edge = True
        """Whether `_held` begins where the answer begins or a region ends. `\\G` matches only there."""
        self._stopped = False
        self._reasoning, self._answer = JoinedRegions(), JoinedRegions(begun=plain and not self._thinking)

    @property
    def _thinking(self) -> bool:
        return self._inside is not None and self._inside in self._thoughts

    def feed(self, text: str) -> list[Piece]:
        if self._stopped:
            return []
        held, at, found = self._held + text, 0, list[Piece]()
        while True:
            end, mark, field, opens = self._next(held, at)
            if self._plain or self._inside is not None:
                self._edge = self._edge and end == at
                found += self._sent(held[at:end])
                at = end
            if mark is None or mark.partial:
                break
            if not mark[0] or (opens and field.name == _CALLS):
                self._stopped = True
                break
            at, self._edge = end + len(mark[0]), True
            if field in self._thoughts and (opens or self._thinking):
                (self._answer if opens else self._reasoning).end()
            elif self._plain:
                found += self._sent(mark[0])
            elif not opens:
                self._answer.end()
            self._inside = field if opens else None
        self._held = held[at:]
        self._stopped = self._stopped or len(self._held.lstrip()) > _HELD
        return found

    def _next(self, held: str, at: int) -> tuple[int, Any, Any, bool]:
        """Return (index, match, field, whether the mark opens it) for the next mark, which may be incomplete. Without a
        mark, the index is the length of `held`."""
        marks = self._marks if self._inside is None else [(self._inside, self._inside.close_re, False)]
        before = "" if self._edge or self._inside is not None else _LAST
        best = None
        for field, pattern, opens in marks:
            match = pattern.search(before + held[at:], partial=True) if pattern is not None else None
            if match is None:
                continue
            rank = (-match.start(), match.partial, match.end(), opens)
            if best is None or rank > best[0]:
                best = rank, match, field, opens
        return (len(held), None, None, False) if best is None else (at + best[1].start() - len(before), *best[1:])

    def _sent(self, text: str) -> list[Piece]:
        sent = (self._reasoning if self._thinking else self._answer).feed(text)
        return [Piece(self._thinking, sent)] if sent else []


def _entry(
    call: object, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[Message | None, str]:
    """Return (call, fault) for one call as the response template gives it."""
    try:
        name, arguments = checked_call(call)
    except ValueError as error:
        return None, str(error)
    if name not in names:
        return None, f"There is no tool {name!r}."
    properties = schemas.get(name, {})
    return chat_call(name, {key: _cast(value, properties.get(key)) for key, value in arguments.items()}), ""


def _value(written: str, parser: Mapping[str, Any] | None) -> JsonValue:
    """Return the value of a tag, as its parser reads it. Raises ValueError."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    name, args = (parser or {}).get("name", "raw"), (parser or {}).get("args", {})
    if name == "json" and any("'" in delims for delims in args.get("string_delims", ())):
        # Python's syntax. Its escapes and its True, False and None aren't JSON.
        try:
            value: Any = ast.literal_eval(written.strip())
            return read_plain(json.dumps(value))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return written
    return written if name == "raw" else parse_content(written, name, args)


def _past(text: str, at: int) -> int:
    """Return the index after the white space at `at`."""
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at


def _check_lines(body: str, args: Mapping[str, Any]) -> None:
    """Raise ValueError if a line of a body of `key: value` lines is something else."""
    for line in body.split(args.get("line_sep", "\n")):
        if line.strip() and args.get("kv_sep", ":") not in line:
            raise ValueError(f"the line {line.strip()[:80]!r} isn't an argument")


def _properties(tools: Collection[str | Mapping[str, JsonValue]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of each tool's parameters, by the tool's name."""
    found = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function: Any = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
            found[str(function.get("name"))] = parameters["properties"]
    return found


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _cast(value: JsonValue, schema: object) -> JsonValue:
    """Return an argument that was written without quotes as the type in its schema. Text stays text if the schema
    allows a string, has no type, or the text isn't a value of the type."""
    types = _types(schema)
    if not isinstance(value, str) or not types or "string" in types:
        return value
    written = value.strip()
    try:
        cast = read_plain(_PYTHON.get(written, written))
    except ValueError:
        return value
    if isinstance(cast, float) and cast.is_integer() and "number" not in types:
        cast = int(cast)
    fits = any(isinstance(cast, _TYPES[one]) and isinstance(cast, bool) == (one == "boolean") for one in types)
    return cast if fits else value


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema names. A reference counts as an object."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", "object" if "$ref" in schema else ())
    found = {str(one) for one in ([declared] if isinstance(declared, str) else declared)}
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        found = found.union(*map(_types, choices if isinstance(choices, list) else ()))
    return (found | {"null"} if schema.get("nullable") else found) & {*_TYPES, "string"}


def choose_reader(
    setting: Mapping[str, JsonValue] | None, own: Mapping[str, JsonValue] | None, chat_template: str
) -> CallReader:
    """Return the reader for a model's answers. `setting` and `own` are the response templates of the configuration and
    of the tokenizer. If both are None, the first of `FORMATS` that fits the chat template is used, or else
    `HermesReader`. Raises UsageError if a response template is invalid."""
    if setting is not None:
        return ResponseReader(setting, "the setting response_template")
    if own is not None:
        return ResponseReader(own, "response_template in the tokenizer's tokenizer_config.json")
    template = format_of(chat_template).template
    return HermesReader() if template is None else ResponseReader(template)
