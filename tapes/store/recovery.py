"""Recovery: what a new writer does about those that died.

Under the folder's lock, for each segment that nobody holds: set a torn tail aside, with its bytes kept, and make the
rest durable; then open a segment that pins every head found, and end the episodes that the dead left open as `crashed`.
A segment whose lock is held has a live writer and is never touched; a corrupt one, or a head in `pins.json` that no
segment holds, stops recovery before it changes anything.
Every step may be cut by another crash: the next recovery does what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ..errors import Corrupt
from ..records import Cause, CauseType, End, Status
from .disk import REAL, Disk, put_file
from .index import Index, Place, Segment, Summary
from .reader import PINS, Break, SegmentReader, read_pin_file
from .segment import ZERO, parse_line, read_body, segment_names
from .writer import FolderLock, SegmentWriter, new_segment


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that a crash left behind the last whole line of a segment."""

    segment: str
    offset: int
    size: int
    kept: str
    """Name of the file, beside the segments, that holds them now."""


@dataclass(frozen=True, slots=True)
class Dangling:
    """An action whose effect can't be undone or repeated, and of which nobody knows whether it happened."""

    tape: str
    env: str
    action: str
    """Kind of the action."""


@dataclass(slots=True)
class Recovered:
    """What opening a run for writing found and did."""

    crashed: list[str] = field(default_factory=list)
    """Tapes that were open and are now ended as `crashed`."""
    torn: list[Torn] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    """Segments of other writers at work."""
    dangling: list[Dangling] = field(default_factory=list)
    """Irreversible actions that need a person to look what became of them; never retried."""


def start_writer(
    folder: Path, index: Index, *, disk: Disk = REAL, clock: Callable[[], float] = time.time, **options: Any
) -> tuple[SegmentWriter, Recovered]:
    """Recover what the dead left and start a writer of our own. Raises Corrupt where bytes below a frontier changed."""
    found = Recovered()
    with FolderLock(disk, folder):
        index.refresh()
        held = _hold_dead(folder, disk, index.segments(), found)
        try:
            breaks = index.refresh()  # again: a writer may have ended before its lock was ours
            segments = index.segments()
            _refuse_corrupt(index, segments, breaks, _kept_pins(folder.parent / PINS, disk))
            for name, handle in held.items():
                _mend(folder, disk, name, handle, breaks.get(name), found)
            _clear_parts(folder, disk)
            pins = tips(segments, set(found.live), folder, disk)
            name, handle = new_segment(disk, folder)
            writer = SegmentWriter(folder, name, handle, pins=pins, disk=disk, clock=clock, **options)
            try:
                for tape in index.tapes("status is null"):
                    if owner(segments, tape, index) not in found.live:
                        _end(tape, index, folder, disk, writer, found, clock)
                if found.crashed:
                    writer.sync()
            except BaseException:
                writer.abandon()
                raise
        finally:
            for handle in held.values():
                disk.close(handle)
    return writer, found


def _hold_dead(folder: Path, disk: Disk, segments: list[Segment], found: Recovered) -> dict[str, int]:
    """Lock every segment that may need something done: all but those that a seal ends and a later segment pins."""
    pinned = {(name, head) for segment in segments for name, head in read_pins(segment).items()}
    settled = {
        segment.name for segment in segments if segment.sealed is not None and (segment.name, segment.head) in pinned
    }
    held: dict[str, int] = {}
    for name in segment_names(disk.names(folder)):
        if name in settled:
            continue
        handle = disk.edit(folder / f"{name}.jsonl")
        if disk.lock(handle):
            held[name] = handle
        else:
            disk.close(handle)
            found.live.append(name)
    return held


def _kept_pins(path: Path, disk: Disk) -> dict[str, str]:
    """The heads beside the run, which the next close writes anew; none where no writer has closed yet."""
    try:
        return read_pin_file(disk, path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Corrupt(f"{error}. If you know why, move it away and open the run again") from error


def _refuse_corrupt(index: Index, segments: list[Segment], breaks: dict[str, Break], kept: dict[str, str]) -> None:
    for broken in breaks.values():
        if broken.verdict == "corrupt":
            raise broken.error()
    missing = unmet_pins(segments, index, kept)
    if missing:
        raise Corrupt(
            f"{missing[0]}. Bring the segment back from a copy, or go on in a new run; "
            "`tapereel verify` lists all that is damaged"
        )


def _mend(folder: Path, disk: Disk, name: str, handle: int, broken: Break | None, found: Recovered) -> None:
    """Keep the torn bytes in a file of their own, then cut them off, then make what is left durable.

    The last is needed even where nothing is torn: what a dead process wrote may still be in memory only, and a pin on
    bytes that a power cut then takes would read as tampering.
    """
    if broken is not None:
        with disk.open(folder / f"{name}.jsonl") as file:
            file.seek(broken.offset)
            tail = file.read()
        kept = f"{name}.torn-{broken.offset}"
        put_file(disk, folder / kept, tail)
        disk.truncate(handle, broken.offset)
        found.torn.append(Torn(name, broken.offset, len(tail), kept))
    disk.sync(handle)


def _clear_parts(folder: Path, disk: Disk) -> None:
    """Unfinished copies of the dead; each was to be renamed once it was whole."""
    for name in disk.names(folder):
        if name.endswith(".part"):
            disk.remove(folder / name)


def tips(segments: list[Segment], live: set[str], folder: Path, disk: Disk) -> dict[str, str]:
    """The heads that pin everything: of each segment that no later one pins to its end.

    Of a live writer's segment, the last line below its frontier: the rest may yet be lost.
    """
    pinned = {name: head for segment in segments for name, head in read_pins(segment).items()}
    found: dict[str, str] = {}
    for segment in segments:
        head = segment.head
        if segment.name in live and segment.sealed is None:
            head = head_at(folder, disk, segment, segment.frontier)
        if head and pinned.get(segment.name) != head:
            found[segment.name] = head
    return found


def read_pins(segment: Segment) -> dict[str, str]:
    """What the segment's `open` pins."""
    return from_json(segment.pins)


def head_at(folder: Path, disk: Disk, segment: Segment, n: int) -> str:
    """Hash of the segment's line before ordinal `n`; empty when there is none."""
    head = ZERO
    if n <= 0:
        return ""
    for _, line, _ in SegmentReader(folder, segment.name, disk=disk):
        head = line.h
        if line.n == n - 1:
            break
    return head.decode()


def unmet_pins(segments: list[Segment], index: Index, kept: dict[str, str]) -> list[str]:
    """What the segments pin of each other, or `kept` of them, and they don't hold; each as a sentence."""
    held = {(segment.name, segment.head) for segment in segments} | index.met()
    wanted = {pin for segment in segments for pin in read_pins(segment).items()} | set(kept.items())
    wanted -= held
    found: set[tuple[str, str]] = set()
    for segment in segments:
        heads = {head for name, head in wanted if name == segment.name}
        if heads:
            lines = SegmentReader(index.folder, segment.name, disk=index.disk)
            found |= {(segment.name, line.h.decode()) for _, line, _ in lines if line.h.decode() in heads}
    index.note_met(found)
    return [
        f"segment {name} does not hold the line with the hash {head} that was pinned"
        for name, head in sorted(wanted - found)
    ]


def owner(segments: list[Segment], tape: Summary, index: Index) -> str:
    """The segment whose writer this open tape belongs to: where its last record stands, or that writer's newest."""
    by_name = {segment.name: segment for segment in segments}
    name = index.places(tape.id)[-1].segment
    while (segment := by_name.get(name)) is not None and segment.next is not None:
        name = segment.next
    return name


def _end(
    tape: Summary,
    index: Index,
    folder: Path,
    disk: Disk,
    writer: SegmentWriter,
    found: Recovered,
    clock: Callable[[], float],
) -> None:
    """Write the end that the dead process could not."""
    cause = None
    last = [place for place in index.places(tape.id) if place.t in ("begin", "step", "call", "reward")][-1]
    body = read_place(folder, disk, last)
    record = read_body(body)
    if tape.effect == "irreversible" and record.get("role") == "action":
        found.dangling.append(Dangling(tape.id, tape.env, str(record.get("kind"))))
        cause = Cause(
            type=CauseType.OURS,
            message="the process died when the irreversible action "
            f"{record.get('kind')!r} may have been under way: somebody must look whether it happened",
        )
    now = clock()
    end = End(tape=tape.id, status=Status.CRASHED, cause=cause, seconds=max(now - tape.begun, 0.0), at=now)
    writer.append(end.body())
    found.crashed.append(tape.id)


def read_place(folder: Path, disk: Disk, place: Place) -> bytes:
    """The body at a place that the index gave; its hash is checked again."""
    with disk.open(folder / f"{place.segment}.jsonl") as file:
        file.seek(place.offset)
        return parse_line(file.read(place.length)[:-1]).body
