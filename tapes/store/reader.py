"""Reading one segment: its lines in order, up to its end or to the first place where they break.

A reader never skips a line. Where the lines break it asks one question: was what stood here durable? If a line that can
be shown to be of this segment says so (its `c` is higher than the place of the break), or a pin does, the bytes were
changed: *corrupt*. Otherwise the tail is *torn*: a crash leaves that, and nobody can know the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic_core import from_json

from ..errors import Corrupt
from .disk import REAL, Disk
from .segment import MAX_LINE, ZERO, BadLine, Chain, Line, parse_line, peek, read_body

PINS = "pins.json"
"""Beside a run's other files: the heads as of the last `close`."""


def read_pin_file(disk: Disk, path: Path) -> dict[str, str]:
    """The heads in a file like `pins.json`, by segment. ValueError where it holds none."""
    with disk.open(path) as file:
        data = file.read()
    try:
        heads = from_json(data)
    except ValueError as error:
        raise ValueError(f"{path} does not hold pins: {error}") from error
    if not isinstance(heads, dict) or not all(isinstance(head, str) for head in heads.values()):
        raise ValueError(f"{path} does not hold pins: it is no JSON object of segments and hashes")
    return heads


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why a segment's lines end before its file does."""

    segment: str
    offset: int
    """Bytes before the break: the intact part."""
    n: int
    """Lines before the break."""
    size: int
    """Bytes from the break to the end of the file."""
    verdict: Literal["torn", "corrupt"]
    why: str

    def __str__(self) -> str:
        return (
            f"segment {self.segment} is {self.verdict} at line {self.n} (byte {self.offset}, {self.size} bytes "
            f"follow): {self.why}"
        )

    def error(self) -> Corrupt:
        """The error for a corrupt segment."""
        return Corrupt(
            f"{self}. Bytes that were on the disk have changed: `tapereel verify` lists the damage; bring "
            "the file back from a copy, or go on in a new run"
        )


class SegmentReader:
    """Iterates (offset, line, length) over a segment, from its start or from a place that was verified before.

    After the iteration `broken` tells whether the file goes on after the last line, `chain` what the lines said.
    """

    def __init__(self, folder: Path, segment: str, *, disk: Disk = REAL) -> None:
        self.path = folder / f"{segment}.jsonl"
        self.segment, self.disk = segment, disk
        self.chain = Chain(segment)
        self.offset = 0
        """Where the next line starts."""
        self.why: str | None = None
        """Why the iteration stopped before the end of the file; None when it did not."""
        self._unfinished = False

    def __iter__(self) -> Iterator[tuple[int, Line, int]]:
        chain = self.chain
        with self.disk.open(self.path) as file:
            file.seek(self.offset)
            while raw := file.readline(MAX_LINE):
                try:
                    if raw[-1:] != b"\n":
                        raise BadLine("the line has no end" if len(raw) < MAX_LINE else "the line is too long")
                    line = parse_line(raw[:-1])
                    chain.take(line)
                except BadLine as error:
                    self.why, self._unfinished = str(error), raw[-1:] != b"\n" and len(raw) < MAX_LINE
                    return
                at, self.offset = self.offset, self.offset + len(raw)
                yield at, line, len(raw)
            self.why = None

    def broken(self) -> Break | None:
        """After the iteration: the break, judged by what the file itself says; None when there is none."""
        if self.why is None:
            return None
        with self.disk.open(self.path) as file:
            evidence = None if self.chain.sealed is None else "nothing can follow a seal"
            if evidence is None and not self._unfinished:  # of a live segment, the rest may have been written since
                evidence = _evidence(file, self.chain, self.offset)
            size = file.seek(0, 2) - self.offset
        return Break(
            self.segment,
            self.offset,
            self.chain.n,
            size,
            "corrupt" if evidence else "torn",
            f"{self.why}; {evidence}" if evidence else self.why,
        )


@dataclass(slots=True)
class _Run:
    """Lines after a break that agree with their own hashes and with each other."""

    first: Line
    head: bytes
    frontier: int
    sealed: bool
    own: bool
    """Shown to be of this segment, whatever its hashes link to."""

    def proves(self, chain: Chain) -> str | None:
        """What it says, if it is of this segment, that makes the place after `chain` one that was durable."""
        first = self.first
        if self.sealed:
            return "the segment was sealed after it"
        if self.frontier > chain.n:
            return f"a later line was written when {self.frontier} lines were durable"
        if first.n == first.c == chain.n and first.p != chain.head:
            return f"the line after line {chain.n - 1} knew another one, which was durable"
        return None


def _evidence(file: BinaryIO, chain: Chain, offset: int) -> str | None:
    """Why the place of the break must have been durable, if a line after it proves that.

    A crash may leave old bytes of any other file here, so a line counts only when it is tied to this segment: it
    starts exactly at the break, or names a tape of the intact part, or is a `commit` or `seal` of this segment, or is
    chained by hash to the intact part, to the line at the break once one flipped bit is put right, or to a line that
    counts.
    """
    if not any(run.proves(chain) for run in _runs_after(file, chain, chain.first, offset)):
        return None
    mended = _mend(file, chain, offset)
    heads, first = {chain.head} - {ZERO}, chain.first
    if mended is not None:
        heads.add(mended[0].h)
        offset += mended[1]
        first = first or mended[0].h
    runs = _runs_after(file, chain, first, offset)
    while True:
        linked = [run for run in runs if run.own or run.first.p in heads]
        if not linked:
            return None
        for run in linked:
            proof = run.proves(chain)
            if proof is not None:
                return proof
            heads.add(run.head)
        runs = [run for run in runs if run not in linked]


def _runs_after(file: BinaryIO, chain: Chain, first: bytes, offset: int) -> list[_Run]:
    tapes = _tapes_before(file, offset)
    runs: list[_Run] = []
    file.seek(offset)
    at_break = True
    while piece := file.readline(MAX_LINE):
        try:
            line = parse_line(piece.rstrip(b"\n"))
            sealed = line.body.startswith(b'{"t":"seal"')
            own = _names_segment(line, first, tapes) or (at_break and _may_follow(line, chain)) or line.h == chain.head
        except BadLine:
            pass  # no evidence; the break that it is part of is reported
        else:
            if runs and line.p == runs[-1].head:
                run = runs[-1]
                run.head, run.frontier, run.own = line.h, max(run.frontier, line.c), run.own or own
                run.sealed = run.sealed or sealed
            else:
                runs.append(_Run(line, line.h, line.c, sealed, own))
        at_break = False
    return runs


def _may_follow(line: Line, chain: Chain) -> bool:
    return line.n >= chain.n and not line.body.startswith(b'{"t":"open"')


def _tapes_before(file: BinaryIO, offset: int) -> set[str]:
    file.seek(0)
    tapes: set[str] = set()
    while file.tell() < offset:
        try:
            tape = peek(parse_line(file.readline(MAX_LINE)[:-1]).body)[1]
        except BadLine:
            break  # the mended line itself
        if tape is not None:
            tapes.add(tape)
    return tapes


def _names_segment(line: Line, first: bytes, tapes: set[str]) -> bool:
    t, tape = peek(line.body)
    if t in ("commit", "seal"):
        return read_body(line.body).get("opened") == first.decode() != ""
    return tape is not None and tape in tapes


_MENDABLE = 16 * 1024
"""Bytes of a line. Each bit is tried, so this bounds the time to about a second."""


def _mend(file: BinaryIO, chain: Chain, offset: int) -> tuple[Line, int] | None:
    """The line at the break and its length, if flipping one bit makes it the line that belongs there."""
    file.seek(offset)
    region = bytearray(file.read(_MENDABLE))
    last = region.find(b"\n", region.find(b"\n") + 1)
    for i in range(last if last > 0 else len(region)):
        for bit in range(8):
            region[i] ^= 1 << bit
            line = _line_here(region, chain)
            region[i] ^= 1 << bit
            if line is not None:
                return line
    return None


def _line_here(region: bytearray, chain: Chain) -> tuple[Line, int] | None:
    end = region.find(b"\n")
    if end < 0 or region[:5] != b'{"n":':
        return None
    try:
        line = parse_line(bytes(region[:end]))
        fits = line.p == chain.head and line.n == chain.n
        if chain.n == 0:
            fits = line.n == 0 and read_body(line.body).get("segment") == chain.segment
    except BadLine:
        return None
    return (line, end + 1) if fits else None
