"""Reads the lines of one segment in order, up to its end or to the first break.

A break is the first line that is damaged or doesn't fit. A reader never skips it. The question is whether the bytes at
the break had ever been durable. If so, they were changed later, and the segment is *corrupt*. Otherwise, its tail is
*torn*. An ordinary crash leaves a torn tail, but the bytes alone can't show the cause.

Two things prove that the bytes had been durable. One is a pin that covers them. The other is a later line whose `c`,
the number of durable lines, includes the line at the break. The later line must provably belong to this segment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic_core import from_json

from ..errors import Corrupt, UsageError, remedy
from .disk import REAL, Disk, read_file
from .segment import MAX_LINE, ZERO, BadLine, Chain, Line, parse_line, peek, read_body, segment_names

PINS = "pins.json"
"""Name of a file in the run directory. It has the heads of all segments that were sealed when a store last closed. A
head is the hash of a segment's last line."""
_PIN = re.compile(r"(?:([0-9]{6}-[0-9a-f]{6}):)?([0-9a-f]{64})")


def read_pin_file(disk: Disk, path: Path) -> dict[str, str]:
    """Return the head of each segment in a file like `pins.json`. Raises UsageError if the file holds no pins."""
    try:
        heads = from_json(read_file(path, disk))
    except ValueError as error:
        raise UsageError(f"{path} does not hold pins: {error}") from error
    if not isinstance(heads, dict) or not all(isinstance(head, str) for head in heads.values()):
        raise UsageError(f"{path} does not hold pins: it is not a JSON object of segment names and hashes")
    return heads


class Pins:
    """The pinned hashes. Verification must find a line with each of these hashes."""

    def __init__(self, pins: Iterable[str], disk: Disk) -> None:
        """`pins` are the caller's pins."""
        self.of_segment: set[tuple[str, str]] = set()
        self.anywhere: set[str] = set()
        self.outside = 0
        """Number of pins that did not come from the segments themselves."""
        self.opens: dict[str, list[tuple[str, str]]] = {}
        """The pins in the first line of each segment."""
        self.met: dict[tuple[str, str], int] = {}
        """The pins that were found. The value is the number of lines up to and including the pinned line."""
        self.problems: list[str] = []
        for pin in map(str, pins):
            self._add(disk, pin)

    def add_file(self, disk: Disk, path: Path) -> None:
        """Add the heads in a file like `pins.json`. Raises ValueError if the file holds no pins."""
        heads = read_pin_file(disk, path)
        self.of_segment |= set(heads.items())
        self.outside += len(heads)

    def _add(self, disk: Disk, pin: str) -> None:
        """Add one of the caller's pins, which is `segment:hash`, a hash, or the path of a file with pins."""
        match = _PIN.fullmatch(pin)
        if match is not None:
            self.outside += 1
            self.of_segment.add((match[1], match[2])) if match[1] else self.anywhere.add(match[2])
            return
        try:
            self.add_file(disk, Path(pin))
        except OSError:
            raise UsageError(
                f"invalid pin {pin!r}: give segment:hash, a hash of 64 hex digits, or the path of a file like {PINS}"
            ) from None

    def see(self, name: str, n: int, h: str) -> None:
        """Mark the pins that name a line as met. `h` is the hash of the intact line `n` in segment `name`."""
        if h in self.anywhere or (name, h) in self.of_segment:
            self.met[name, h] = n + 1
        self.anywhere.discard(h)
        self.of_segment.discard((name, h))

    def hashes(self) -> frozenset[bytes]:
        """Return the hashes of all pins that were not yet met."""
        return frozenset(h.encode() for h in self.anywhere.union(h for _, h in self.of_segment))

    def unmet(self) -> list[str]:
        return [
            *self.problems,
            *(
                f"segment {name} does not hold the line with the hash {head} that was pinned"
                for name, head in sorted(self.of_segment)
            ),
            *(f"no segment holds the line with the hash {head} that was pinned" for head in sorted(self.anywhere)),
        ]


@dataclass(frozen=True, slots=True)
class Break:
    """The place in a segment's file where the intact lines end although more bytes follow. `why` is the reason."""

    segment: str
    offset: int
    """Number of intact bytes before the break."""
    n: int
    """Number of lines before the break."""
    size: int
    """Number of bytes from the break to the end of the file."""
    verdict: Literal["torn", "corrupt"]
    why: str

    def __str__(self) -> str:
        return (
            f"segment {self.segment} is {self.verdict} at line {self.n} (byte {self.offset}, {self.size} bytes "
            f"follow): {self.why}"
        )

    def error(self) -> Corrupt:
        """Return the error for a corrupt segment."""
        return Corrupt(
            f"{self}. Bytes that were on the disk have changed: {remedy('verify', '`verify(run)`')} lists the "
            "damage; restore the file from a copy, or begin a new run"
        )


def segment_sizes(folder: Path, disk: Disk) -> dict[str, int]:
    """Return the size in bytes of each segment at one moment, in the order of creation.

    A live writer may seal a segment and continue in a new one while others read. A reader that stops at these sizes
    never finds a record without the records before it. The sizes are read from the newest segment to the oldest,
    because a writer seals its old segment before it writes to the new one.
    """
    names = segment_names(disk.names(folder))
    sizes = dict.fromkeys(names, 0)
    for name in reversed(names):
        with contextlib.suppress(OSError):  # the same error is raised later, when the file is opened
            sizes[name] = disk.size(folder / f"{name}.jsonl")
    return sizes


class SegmentReader:
    """Yields (offset, line, length) for each line of a segment, from its start or from a verified place.

    After the iteration, `chain` has the state after the last line. If other bytes follow that line, `broken()` returns
    the break.
    """

    def __init__(self, folder: Path, segment: str, *, end: int | None = None, disk: Disk = REAL) -> None:
        """Lines that begin at byte `end` or later are not read. If `end` is None, all lines are read."""
        self.path = folder / f"{segment}.jsonl"
        self.end = end
        self.segment, self.disk = segment, disk
        self.chain = Chain(segment)
        self.offset = 0
        """Byte offset at which the next line starts."""
        self.why: str | None = None
        """The reason why the iteration stopped before the end of the file, or None if it reached the end."""
        self._unfinished = False

    def __iter__(self) -> Iterator[tuple[int, Line, int]]:
        chain = self.chain
        with self.disk.open(self.path) as file:
            file.seek(self.offset)
            while raw := file.readline(MAX_LINE):
                if self.end is not None and self.offset >= self.end:
                    break
                try:
                    if raw[-1:] != b"\n":
                        raise BadLine(
                            "the line has no end"
                            if len(raw) < MAX_LINE
                            else f"the line has more than {MAX_LINE:,} bytes"
                        )
                    # The newline is part of the line, so that a write that was cut off just before it counts as torn.
                    line = parse_line(raw[:-1])
                    chain.take(line)
                except BadLine as error:
                    self.why, self._unfinished = str(error), raw[-1:] != b"\n" and len(raw) < MAX_LINE
                    return
                at, self.offset = self.offset, self.offset + len(raw)
                yield at, line, len(raw)
            self.why = None

    def broken(self) -> Break | None:
        """Return the break after the iteration, judged by the file alone, or None if the lines reach its end."""
        if self.why is None:
            return None
        with self.disk.open(self.path) as file:
            evidence = None if self.chain.sealed is None else "nothing can follow a seal"
            # A last line without its newline may come from a live writer that is in the middle of its write. Bytes
            # after it were written since then, and must not count as evidence against it.
            if evidence is None and not self._unfinished:
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
    """Consecutive lines after a break. Each line matches its own hash and names the hash of the line before it."""

    first: Line
    head: bytes
    frontier: int
    sealed: bool
    own: bool
    """True if a line in the run itself proves that the run belongs to this segment, without a hash link to the intact
    part."""

    def proves(self, chain: Chain) -> str | None:
        """Return why the line at the break must have been durable, or None if this run of lines doesn't prove it. The
        proof assumes that the run belongs to the segment."""
        first = self.first
        if self.sealed:
            return "the segment was sealed after it"
        if self.frontier > chain.n:
            return f"a later line was written when {self.frontier} lines were durable"
        if first.n == first.c == chain.n and first.p != chain.head:
            return f"the line after line {chain.n - 1} names another hash for it, and states that it was durable"
        return None


def _evidence(file: BinaryIO, chain: Chain, offset: int) -> str | None:
    """Return why the line at the break must have been durable, or None if no later line proves it.

    After a power cut, a file system may expose old blocks from any other file here, including other segments. So a line
    counts only if it is tied to this segment. A line is tied if it

    * starts exactly at the break, or names a tape in the intact part,
    * is a `commit` or `seal` that states the hash of this segment's first line, or
    * is chained by hash to the intact part, to another line that counts, or to the line at the break after one flipped
      bit in that line is corrected.

    If untied lines counted, old blocks after a crash would be reported as corruption, and recovery would refuse the
    run.
    """
    # This cheap test comes first, because mending tries each bit of a line. Most torn tails have no whole line after
    # the break.
    if not any(run.proves(chain) for run in _runs_after(file, chain, chain.first, offset)):
        return None
    mended = _mend(file, chain, offset)
    heads, first = {chain.head} - {ZERO}, chain.first
    if mended is not None:
        heads.add(mended[0].h)
        offset += mended[1]
        first = first or mended[0].h
    runs = _runs_after(file, chain, first, offset)
    # Ties spread along hash links until no further run is tied. Each round removes at least one run, so the loop ends.
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
            pass  # these bytes are not a line, so they aren't evidence
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
            break  # `offset` may be after the mended line, which is still damaged in the file
        if tape is not None:
            tapes.add(tape)
    return tapes


def _names_segment(line: Line, first: bytes, tapes: set[str]) -> bool:
    t, tape = peek(line.body)
    if t in ("commit", "seal"):
        return read_body(line.body).get("opened") == first.decode() != ""
    return tape is not None and tape in tapes


_MENDABLE = 16 * 1024
"""Maximum length in bytes of a line that is mended. Each bit is tried, so this bounds the time to about a second."""


def _mend(file: BinaryIO, chain: Chain, offset: int) -> tuple[Line, int] | None:
    """Try to restore the line at the break by flipping one bit. Return the line and its length, or None.

    A flip in a newline joins two lines, so the search covers both.
    """
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
