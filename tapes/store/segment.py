"""The format of a segment: pure functions that encode and read a line, and the check that lines form a chain.

    {"n":0,"c":0,"p":"<64 hex>","b":{...},"h":"<64 hex>"}\n

`n` is the number of the line in the segment, from 0. `c` is the number of lines in the segment that were durable when
this line was written. `p` is the hash of the previous line. The first line has no previous line, so its `p` is the hash
of a line in an earlier segment, or 64 zeros. `b` is the record's body. `h` is the SHA-256 of the line's bytes before
its last `,"h":`.

The first record of a segment is an `open`, which names the segment. A `commit` or `seal` states the hash of the
segment's first line. A `seal` is always the last line.

This module opens no file and takes no lock. To read a record, it needs only `t` and `tape` from its body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from pydantic import JsonValue
from pydantic_core import from_json

from ..errors import NotATape, short_repr
from ..journal import MAX_BODY

ZERO = b"0" * 64
"""The value of `p` in a first line that pins nothing."""
MAX_LINE = MAX_BODY + 1024
"""Maximum length of a line in bytes. It bounds a reader's memory. Larger content goes into a media file."""

_NAME = re.compile(r"[0-9]{6}-[0-9a-f]{6}")
_HEAD = re.compile(rb'\{"n":(0|[1-9][0-9]{0,14}),"c":(0|[1-9][0-9]{0,14}),"p":"([0-9a-f]{64})","b":(?=\{)')
_PEEK = re.compile(rb'\{"t":"([a-z]+)"(?:,"tape":"([^"\\]*)")?')
_WITHOUT_TAPE = frozenset((b"use", b"void", b"open", b"publish", b"lead", b"files", b"commit", b"seal"))
_TAIL = len(b',"h":""}') + 64


def segment_names(entries: Iterable[str]) -> list[str]:
    """Return the names of the segments among a folder's entries, in the order of their creation."""
    return sorted(entry[:-6] for entry in entries if entry.endswith(".jsonl") and _NAME.fullmatch(entry[:-6]))


def next_name(names: list[str], nonce: str) -> str:
    """Return the name of the next segment. It starts with a number, not a time, so names sort by creation.

    The nonce (6 hex digits) makes the name unique. After a crash, a file system may fill a new file with old blocks. If
    these blocks hold a whole segment of another run, the name in its `open` line differs from the file's name.
    """
    return f"{int(names[-1][:6]) + 1 if names else 1:06d}-{nonce}"


class BadLine(NotATape):
    """Raised if bytes are not a line, or if a line is out of place."""


class Line(NamedTuple):
    """One line of a segment. Its hash `h` was compared with its bytes."""

    n: int
    c: int
    p: bytes
    """Hash of the previous line, as 64 hex digits."""
    body: bytes
    h: bytes
    """Hash of this line, as 64 hex digits."""


def encode_line(n: int, c: int, p: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return the line with its newline, and its hash."""
    head = b'{"n":%d,"c":%d,"p":"%b","b":%b' % (n, c, p, body)
    h = sha256(head).hexdigest().encode()
    return b'%b,"h":"%b"}\n' % (head, h), h


def parse_line(line: bytes) -> Line:
    """Parse a line that is given without its newline. Raises a BadLine that names the fault."""
    match = _HEAD.match(line)
    if match is None:
        raise BadLine('it does not start with {"n":…,"c":…,"p":"…","b":{')
    end = len(line) - _TAIL
    if line[end - 1 : end + 6] != b'},"h":"' or line[-2:] != b'"}' or end <= match.end():
        raise BadLine('it does not end with },"h":"…"}')
    h = sha256(line[:end]).hexdigest().encode()
    if h != line[-66:-2]:
        raise BadLine(f"its bytes hash to {h[:12].decode()}…, not to the hash that it states")
    return Line(int(match[1]), int(match[2]), match[3], line[match.end() : end], h)


def peek(body: bytes) -> tuple[str, str | None]:
    """Return `t` and `tape` from a body without parsing the rest. Raises BadLine if the body is not a record."""
    match = _PEEK.match(body)
    if match is not None and (match[2] is not None or match[1] in _WITHOUT_TAPE):
        tape = match[2]
        try:
            return match[1].decode(), tape.decode() if tape is not None else None
        except UnicodeDecodeError as error:
            raise BadLine(f"its tape id is not UTF-8: {error}") from None
    record = read_body(body)
    t, tape = record.get("t"), record.get("tape")
    if not isinstance(t, str) or not (tape is None or isinstance(tape, str)):
        raise BadLine(f"its body has the `t` {short_repr(t)} and the `tape` {short_repr(tape)}, which must be strings")
    return t, tape


def read_body(body: bytes) -> dict[str, JsonValue]:
    """Return the body as plain values, without validating it as a record. Raises BadLine if it is not a JSON object."""
    try:
        value = from_json(body, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        raise BadLine(f"its body isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLine(f"its body is a {type(value).__name__}, not a JSON object")
    return value


class Chain:
    """The state of a segment after the lines taken so far. The next line is checked against this state.

    Call `take` with the lines in order. Each pass over a segment needs its own chain.
    """

    __slots__ = ("first", "frontier", "head", "n", "opened", "sealed", "segment")

    def __init__(self, segment: str) -> None:
        self.segment = segment
        self.n = 0
        """Number of lines taken."""
        self.head: bytes = ZERO
        """Hash of the last line taken."""
        self.first: bytes = b""
        """Hash of the first line. It is empty until this line is taken."""
        self.frontier = 0
        """The highest `c` so far. This number of lines was durable."""
        self.opened: dict[str, JsonValue] = {}
        """The body of the segment's `open`."""
        self.sealed: dict[str, JsonValue] | None = None
        """The body of the segment's `seal`, or None until it is taken."""

    def take(self, line: Line) -> None:
        """Check and count the next line. If it doesn't fit, raises BadLine and leaves the chain unchanged."""
        if self.sealed is not None:
            raise BadLine(f"line {line.n} follows the seal")
        if line.n != self.n:
            raise BadLine(f"line {line.n} is in the place of line {self.n}")
        # Lines below the frontier were synced. So the frontier can't decrease or exceed the number of earlier lines.
        if not self.frontier <= line.c <= line.n:
            raise BadLine(f"line {line.n} states that {line.c} lines were durable, after {self.frontier} of {line.n}")
        if self.n == 0:
            self._take_open(line)
        elif line.p != self.head:
            raise BadLine(
                f"line {line.n} follows a line with the hash {line.p[:12].decode()}…, "
                f"but the line before has {self.head[:12].decode()}…"
            )
        elif line.body.startswith((b'{"t":"seal"', b'{"t":"commit"', b'{"t":"open"')):
            self._take_own(line)
        self.n += 1
        self.head = line.h
        self.frontier = line.c

    def _take_open(self, line: Line) -> None:
        body = read_body(line.body)
        pins = body.get("pins")
        if body.get("t") != "open" or not isinstance(pins, dict):
            raise BadLine(f"the first line has the `t` {short_repr(body.get('t'))} and not `open`, or has no pins")
        if body.get("segment") != self.segment:
            raise BadLine(f"the first line opens segment {body.get('segment')!r}, not {self.segment!r}")
        # `p` in a first line continues the chain of an earlier segment, so it must be a head that this line pins.
        if line.p != ZERO and line.p.decode() not in pins.values():
            raise BadLine(f"the first line follows the head {line.p[:12].decode()}…, which its `open` does not pin")
        self.opened = body
        self.first = line.h

    def _take_own(self, line: Line) -> None:
        body = read_body(line.body)
        if body.get("t") == "open":
            raise BadLine(f"line {line.n} opens a segment that is open already")
        if body.get("opened") != self.first.decode():
            raise BadLine(f"line {line.n}, a {body.get('t')}, belongs to another segment")
        if body.get("t") == "seal":
            # The writer syncs every line before it writes the seal, so it never writes a lower `c`.
            if line.c != line.n:
                raise BadLine(f"line {line.n} seals the segment when {line.c} of {line.n} lines were durable")
            self.sealed = body
