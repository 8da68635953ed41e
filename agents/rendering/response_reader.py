"""Reads calls and thoughts by a `response_template`, the declarative description of a model's answers that transformers
defines (`transformers.utils.chat_parsing`).

A response template has fields, such as `tool_calls`, and the marks that open and close a field's regions. Training must
never use a call that the model didn't write, so this reader is stricter than transformers' parser. A region is a call
only if its closing mark was written, its body is nothing but valid JSON or tags, its arguments are an object, and it
names an offered tool. The syntax of JSON decides where a region of JSON ends, so its strings may contain marks. A bad
call is reported, and the other calls of the answer are still read.

Other formats don't escape strings, so a string may contain the marks that end it. An argument ends at the first closing
mark that the next argument or the end of the call follows. If something else is wrong or left over, a string may have
gone on, and none of the answer's calls is made.

Reading takes time linear in the length of the answer, if the patterns of the response template do.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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

_Tools = Collection[str | Mapping[str, JsonValue]]
_Declared = Mapping[str, Mapping[str, Any]]
"""The schemas of the tools' parameters, by the tool's name."""
_Entry = tuple[Message | None, str]
"""A call in the chat format and its fault, as `read_calls` takes them."""
_Spec = Mapping[str, JsonValue] | None
_CALLS, _CONTENT = "tool_calls", "content"
_BETWEEN = re.compile(r"[\s,]+")
"""Matches text that may be between the tags of a call."""
_ELEMENT_END = re.compile(r"(</[\w:.-]+>)\s*")
"""Matches a tag such as `</function>`, which may be before the closing mark of a call."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\n\\'\"abfnrtvxNuU01234567")
"""The characters that Python reads as an escape after a backslash."""
_SPACE = re.compile(r"\s*")
_LAST = "\uffff"
"""Put behind the text, so that `$` in a pattern doesn't close a call whose closing mark is missing."""
_NO_END = "it has no end"
_UNSURE = "The calls are ambiguous: a string in one of them may contain another one, or its marks."
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
    tags: _Tags | None = None
    """The arguments of a call that is written in tags."""


class _Tags(NamedTuple):
    """The arguments of one call that is written in tags, and its faults."""

    values: dict[str, JsonValue]
    written: dict[str, str]
    """The text of each value that isn't in quotes, or marked as text in another way."""
    faults: list[str]


class ResponseReader:
    """Reads answers by one response template. Implements `CallReader`."""

    def __init__(
        self, template: Mapping[str, JsonValue], source: str = "response_template", *, raw: bool = False
    ) -> None:
        """`source` names the template's origin in error messages. `raw` is true if the chat template doesn't escape the
        strings in a call. Raises UsageError if the response template is invalid."""
        import regex
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec: Any = load_response_template(dict(template))
            calls: Any = {**template["fields"]}.get(_CALLS, {})  # pyright: ignore
            pattern = calls.get("content_args", {}).get("tag_pattern")
            self._tag = regex.compile(pattern, regex.DOTALL) if pattern else None
            self._parser: Mapping[str, Any] = calls.get("content_args", {}).get("value_parser") or {}
            delimiters = self._parser.get("args", {}).get("string_delims", ())
        except (ValueError, TypeError, AttributeError, KeyError, regex.error) as error:
            raise UsageError(f"{source} isn't a response template that transformers can read: {error}") from error
        self._never = regex.compile("(?!)")
        self._json: bool = calls.get("content") == "json" and not calls.get("content_args")
        """Whether the syntax of JSON alone decides where a call ends."""
        self._python = any("'" in pair for pair in delimiters)
        """Whether values have Python's syntax, whose escapes and whose True, False and None aren't JSON."""
        self._raw = raw if self._python else not self._json
        """Whether nothing escapes a string, so that it may contain the marks of a call."""
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
        calls, written, entries = list[_Region](), list[Span](), list[_Entry]()
        thoughts, said = list[Span](), list[str]()
        for one in self._regions(whole, self._opened(prompt)):
            if one is None:  # a thought ended that the prompt or a lost token opened, so it had all calls
                calls.clear()
                continue
            span = Span(one.start, min(one.end, length), whole[one.body : min(one.stop, length)])
            if one.field.name == _CALLS:
                calls.append(one)
            elif one.field in self._thoughts:
                thoughts.append(span)
            else:
                said.append(span.body.strip())
        for one, found in self._calls(whole, calls, tools) if tools is not None else ():
            span = Span(one.start, min(one.end, length), whole[one.body : min(one.stop, length)])
            entries += found
            # If a region has several calls, the first one stands for the region's text.
            written += [span, *[span._replace(start=span.end)] * (len(found) - 1)][: len(found)]
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
        if self._json:
            stop = json_end(text, _past(text, body))
            for end in () if stop is None else (stop, _past(text, stop)):
                close = closing.match(text, end)
                if close is not None and close.end() < len(text):
                    return _Region(field, start, body, end, close.end(), captures)
        elif self._tag is not None:
            at, close, tags = self._tags(text, body, field)
            if close is not None:
                return _Region(field, start, body, at, close.end(), captures, " ".join(tags.faults[:1]), tags=tags)
            if _NO_END in tags.faults:
                return _Region(field, start, body, len(text), len(text), captures, _NO_END, closed=False)
        close = closing.search(text, at)
        if close is None or close.end() == len(text) or field.open_re.search(text, at, close.start()) is not None:
            return _Region(field, start, body, len(text), len(text), captures, _NO_END, closed=False)
        fault = "other text is in it" if self._tag is not None or self._json else ""
        return _Region(field, start, body, close.start(), close.end(), captures, fault)

    def _tags(self, text: str, at: int, field: Any) -> tuple[int, Any, _Tags]:
        """Read the tags from `at` on. Return (index after them, closing mark, arguments). The closing mark is None if
        other text follows. A tag whose value begins another tag or call has lost its end."""
        assert self._tag is not None
        found, closing, ended = _Tags({}, {}, []), field.close_re or self._never, ""
        while True:
            close = closing.match(text, at)
            inner = _ELEMENT_END.match(text, at) if close is None else None
            if inner is not None and inner[1] != ended:
                close = closing.match(text, inner.end())
            if close is not None and close.end() < len(text):
                return at, close, found
            tag = self._tag.match(text, at, partial=True)
            if tag is not None and tag.partial and tag.end() == len(text):
                found.faults.append(_NO_END)
            elif tag is not None and not tag.partial and tag.end() > at:
                begin, ended = text[at : tag.start("key")].strip(), text[tag.end("value") : tag.end()].strip()
                inside = text[tag.start("value") : tag.end()]
                if self._raw and ((begin and begin in inside) or field.open_re.search(inside) is not None):
                    found.faults.append(_NO_END)
                try:
                    self._argument(found, tag)
                except ValueError as error:
                    found.faults.append(str(error))
            else:
                tag = _BETWEEN.match(text, at)
            if tag is None or _NO_END in found.faults:
                return at, None, found
            at = tag.end()

    def _argument(self, found: _Tags, tag: Any) -> None:
        """Add the argument in a tag. Raises ValueError if its value can't be read, or can be read in two ways."""
        from transformers.utils.chat_parsing.content_parsers import parse_content

        key, value, groups = tag["key"], tag["value"], tag.groupdict()
        if key in found.values:
            raise ValueError("an argument is written twice")
        if self._python and value[:1] in ("'", '"'):
            value = _in_quotes(value, raw=self._raw)
        elif groups.get("string") is None:
            found.written[key] = value
            if self._python or "string" in groups:
                value = _literal(value, word=True)
            elif self._parser:
                value = parse_content(value, self._parser.get("name", "text"), self._parser.get("args", {}))
        found.values[key] = value

    def _calls(self, text: str, calls: Sequence[_Region], tools: _Tools) -> list[tuple[_Region, list[_Entry]]]:
        """Return each region of `tool_calls` with its calls. In formats other than JSON, one fault makes all calls
        unsure."""
        names, declared = tool_names(tools), _declared(tools)
        found = [(one, self._entries(one, text[one.body : one.stop], names, declared)) for one in calls]
        faults = [fault for _, entries in found for _, fault in entries or [(None, _UNSURE)] if fault]
        if not self._json and any(entries for _, entries in found) and (faults or _ends_again(text, calls)):
            unsure = [*faults, _UNSURE][0]
            found = [(one, [(None, fault or unsure) for _, fault in entries]) for one, entries in found]
        return [
            (one, [(call or _broken(one, text) if fault else call, fault) for call, fault in entries])
            for one, entries in found
        ]

    def _entries(self, region: _Region, body: str, names: Collection[str], declared: _Declared) -> list[_Entry]:
        """Return (call, fault) for each call in a region."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        field, name = region.field, region.captures.get("name", "").strip()
        try:
            if region.closed and self._json:
                read_plain(body)
            if region.fault:
                raise ValueError(region.fault)
            if field.content == "kv-lines":
                _check_lines(body, field.content_args)
            if field.content == "json" and field.content_args:
                body, field = _plain_json(body, field.content_args), replace(field, content_args={})
            if region.tags is not None:
                body, field = json.dumps(region.tags.values), replace(field, content="json", content_args={})
            value = process_field(body, field, dict(region.captures))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if name and name not in names:
                return []  # text that resembles a call, such as a list in Python
            return [(None, f"The call can't be read: {str(error).partition(chr(10))[0].rstrip('.')}.")]
        made = value if isinstance(value, list) else [value]
        return [_entry(call, names, declared, region, raw=self._raw) for call in made]


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


def _ends_again(text: str, calls: Sequence[_Region]) -> bool:
    """Return whether a mark that ends a call is outside of the calls, after the first one. Then a string in a call may
    have gone on until there."""
    stops = [*(one.start for one in calls[1:]), len(text)]
    ends = [(one.field.close_re, one.end, stop) for one, stop in zip(calls, stops, strict=True)]
    marks = [pattern.search(text, at, stop) for pattern, at, stop in ends if pattern is not None]
    return any(mark is not None and mark.start() < mark.end() < len(text) for mark in marks)


def _broken(region: _Region, text: str) -> Message | None:
    """Return a call that can't be read, with its own text as arguments, or None if this text might be arguments."""
    name, body = region.captures.get("name", "").strip(), text[region.body : region.stop].strip()
    return chat_call(name, body) if name and region.closed and json_end(body, 0) is None else None


def _entry(call: object, names: Collection[str], declared: _Declared, region: _Region, *, raw: bool) -> _Entry:
    """Return (call, fault) for one call as the response template gives it."""
    try:
        name, arguments = checked_call(call)
    except ValueError as error:
        return None, str(error)
    if name not in names:
        return chat_call(name, arguments), f"There is no tool {name!r}."
    schema = declared.get(name, {})
    properties = schema.get("properties", {})
    for key in [*arguments][1:] if raw and properties and not schema.get("additionalProperties") else ():
        if key not in properties:  # nothing escapes a string, so this may belong to the one before it
            return None, f"{name!r} has no argument {key!r}. If a string has this text, the call is ambiguous."
    if region.field.content != "json":  # JSON has types of its own
        written = {key: str(value) for key, value in arguments.items()} if region.tags is None else region.tags.written
        arguments = {key: _cast(value, properties.get(key), written.get(key)) for key, value in arguments.items()}
    return chat_call(name, arguments), ""


def _literal(written: str, *, word: bool = False) -> JsonValue:
    """Return the value of a literal in JSON's or Python's syntax. If `word` is true, other text stands for itself if it
    doesn't begin as a list or string. Raises ValueError."""
    # Python warns about a backslash that begins no escape, and keeps it.
    kept = _ESCAPE.sub(lambda one: one[0] if one[1] in _ESCAPES else f"\\{one[0]}", written.strip())
    for read in (read_plain, lambda text: read_plain(json.dumps(ast.literal_eval(text)))):
        try:
            return read(written if read is read_plain else kept)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    if word and not written.lstrip().startswith(("[", "{", "(", "'", '"')):
        return written
    raise ValueError(f"{written[:80]!r} isn't a value")


def _in_quotes(written: str, *, raw: bool) -> str:
    """Return the text of a string in quotes, with Python's escapes. If `raw` is true, the family writes no escapes, and
    a string that escapes would change can be read in two ways. Raises ValueError."""
    inner = written[1:-1]
    if "\\" not in inner:
        return inner  # it may have real new lines, which Python doesn't allow
    try:
        read = str(_literal(written))
    except ValueError:
        read = inner if raw else ""
    if not read or (raw and read != inner):
        raise ValueError(f"the backslashes in {written[:80]!r} can be read in two ways")
    return read


def _past(text: str, at: int) -> int:
    """Return the index after the white space at `at`."""
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at


def _check_lines(body: str, args: Mapping[str, Any]) -> None:
    """Raise ValueError if a line of a body of `key: value` lines is something else."""
    for line in body.split(args.get("line_sep", "\n")):
        if line.strip() and args.get("kv_sep", ":") not in line:
            raise ValueError(f"the line {line.strip()[:80]!r} isn't an argument")


def _plain_json(body: str, args: Mapping[str, Any]) -> str:
    """Return the JSON that a dialect of JSON stands for, with other marks around strings or keys without quotes."""
    marks = [f"{re.escape(begin)}(.*?){re.escape(end)}" for begin, end in args.get("string_delims", ())]
    marks += [r"(?<=[{,])(\w+)(?=:)"] if args.get("unquoted_keys") else []
    text = re.sub("|".join(marks) or "(?!)", lambda one: json.dumps(one[one.lastindex or 0]), body, flags=re.DOTALL)
    read_plain(text)
    json.loads(text, object_pairs_hook=_once)
    return text


def _once(pairs: list[tuple[str, object]]) -> None:
    """Raise ValueError if a key occurs twice, as it does if a string seems to end too early."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is written twice")


def _declared(tools: _Tools) -> _Declared:
    """Return the schemas of the tools' parameters that have properties, by the tool's name."""
    found = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function: Any = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
            found[str(function.get("name"))] = parameters
    return found


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
    "string": str,
}


def _cast(value: JsonValue, schema: object, written: str | None) -> JsonValue:
    """Return an argument as the type in its schema. `written` is its text, or None if it was in quotes or marked as
    text. Text stays text if the schema allows a string, has no type, or the text isn't a value of the type. Without
    quotes, `null` and `None` are no text if the schema allows null."""
    types = _types(schema)
    if isinstance(value, str) and "string" in types:
        null = "null" in types and written is not None and value.strip() in ("null", "None")
        return None if null else value
    try:
        cast = _literal(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if isinstance(cast, float) and cast.is_integer() and "number" not in types:
        cast = int(cast)
    if any(isinstance(cast, _TYPES[one]) and isinstance(cast, bool) == (one == "boolean") for one in types):
        return cast
    return written if "string" in types and written is not None else value


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema names. A reference counts as an object."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", "object" if "$ref" in schema else ())
    found = {str(one) for one in ([declared] if isinstance(declared, str) else declared)}
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        found = found.union(*map(_types, choices if isinstance(choices, list) else ()))
    return (found | {"null"} if schema.get("nullable") else found) & set(_TYPES)


def choose_reader(
    setting: _Spec, own: _Spec, chat_template: str, tokens: Collection[str] = (), *, raw: bool = False
) -> CallReader:
    """Return the reader for a model's answers. `setting` and `own` are the response templates of the configuration and
    of the tokenizer. If both are None, the format that `format_of` finds is used. For `raw`, see `ResponseReader`.
    Raises UsageError if a response template is invalid."""
    if setting is not None:
        return ResponseReader(setting, "the setting response_template", raw=raw)
    if own is not None:
        return ResponseReader(own, "response_template in the tokenizer's tokenizer_config.json", raw=raw)
    template = format_of(chat_template, tokens).template
    return HermesReader() if template is None else ResponseReader(template, raw=raw)
