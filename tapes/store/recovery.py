"""During recovery, a new writer takes over the segments of writers that died.

It holds the folder's lock and takes these steps in order:

1. Lock every unfinished segment. A segment whose lock is held has a live writer and is never touched.
2. Refuse to start (`Corrupt`) if durable bytes changed, or if a pinned line is in no segment. At this point, nothing
   has been changed.
3. For each locked segment, copy a torn tail to a separate file, cut it off, and sync the rest.
4. Open a new segment whose first line pins every head that was found.
5. In the new segment, record the end of each episode that a dead writer left open, with the status `crashed`.

If another crash interrupts a step, the next recovery repeats it. This is safe: the copy of a tail is durable before the
cut. A segment counts as finished only when a later segment pins its seal. An episode without an end remains open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from pydantic_core import from_json

from ..errors import Corrupt, remedy
from ..records import Cause, CauseType, End, Status
from .disk import REAL, Disk, put_file
from .index import Index, Segment
from .reader import PINS, Break, SegmentReader, read_pin_file
from .segment import read_body, segment_names
from .summary import Summary
from .writer import FolderLock, SegmentWriter, WriterOptions, new_segment


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that a crash left after the last whole line of a segment."""

    segment: str
    offset: int
    size: int
    kept: str
    """Name of the file that now holds these bytes. It is in the folder of the segments."""


@dataclass(frozen=True, slots=True)
class Dangling:
    """An irreversible action that a crash interrupted. No record shows whether it happened."""

    tape: str
    env: str
    action: str
    """Kind of the action."""


@dataclass(slots=True)
class Recovered:
    """What was found and repaired when a run was opened for writing."""

    crashed: list[str] = field(default_factory=list)
    """Tapes that were open and are now ended as `crashed`."""
    torn: list[Torn] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    """Segments whose writers are still alive in other processes."""
    dangling: list[Dangling] = field(default_factory=list)
    """Irreversible actions that may have happened. They are never retried, and a person must check what happened."""


def start_writer(
    folder: Path, index: Index, *, disk: Disk = REAL, **options: Unpack[WriterOptions]
) -> tuple[SegmentWriter, Recovered]:
    """Recover the segments of dead writers and start a new writer. Raises Corrupt if durable bytes changed."""
    found = Recovered()
    clock = options.get("clock", time.time)
    with FolderLock(disk, folder):
        index.refresh()
        held = _hold_dead(folder, disk, index.segments(), found)
        try:
            # Refresh again now that the locks are held, because a writer may have written and ended after the first
            # refresh. Otherwise, its last lines would be cut off because the index hasn't seen them.
            breaks = index.refresh()
            segments = index.segments()
            _refuse_corrupt(index, segments, breaks, _kept_pins(folder.parent / PINS, disk))
            for name, handle in held.items():
                _mend(folder, disk, name, handle, breaks.get(name), found)
            _clear_parts(folder, disk)
            pins = tips(segments, set(found.live), folder, disk)
            writer = SegmentWriter(folder, new_segment(disk, folder), pins=pins, disk=disk, **options)
            try:
                for tape in index.tapes("status is null"):
                    if owner(segments, tape, index) not in found.live:
                        _end(tape, index, writer, found, clock)
                # The caller may act on `found`, for example repeat these episodes. So their ends must be durable now.
                if found.crashed:
                    writer.sync()
            except BaseException:
                writer.abandon()
                raise
        finally:
            # The locks are released only now, because no other process may recover these segments before the new
            # segment pins them.
            for handle in held.values():
                disk.close(handle)
    return writer, found


def _hold_dead(folder: Path, disk: Disk, segments: list[Segment], found: Recovered) -> dict[str, int]:
    """Lock every segment that may need recovery. A segment needs no recovery if it is sealed and a later segment pins
    its seal.

    A seal alone is not enough, because its writer may have died before the sync. Only a pin shows that a recovery or a
    rotation made the sealed bytes durable.
    """
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
    """Return the heads in `pins.json`, which is replaced whenever a store is closed. Before the first close, the result
    is empty."""
    try:
        return read_pin_file(disk, path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Corrupt(f"{error}. If you know why, move the file away and open the run again") from error


def _refuse_corrupt(index: Index, segments: list[Segment], breaks: dict[str, Break], kept: dict[str, str]) -> None:
    for broken in breaks.values():
        if broken.verdict == "corrupt":
            raise broken.error()
    missing = unmet_pins(segments, index, kept)
    if missing:
        raise Corrupt(
            f"{missing[0]}. Restore the segment from a copy, or begin a new run; "
            f"{remedy('verify', '`verify(run)`')} lists all damage"
        )


def _mend(folder: Path, disk: Disk, name: str, handle: int, broken: Break | None, found: Recovered) -> None:
    """Copy the torn bytes to a separate file, then cut them off, then sync the segment.

    The copy is durable before the cut, so that a crash between the two loses no byte. The sync is needed even if
    nothing is torn, because the lines of a dead process may exist only in the page cache. The new segment pins the last
    of these lines. If a power cut then lost this line, the unmet pin would look like tampering.
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
    """Remove unfinished files of dead processes. A `.part` file is renamed only when it is complete (`put_file`)."""
    for name in disk.names(folder):
        if name.endswith(".part"):
            disk.remove(folder / name)


def tips(segments: list[Segment], live: set[str], folder: Path, disk: Disk) -> dict[str, str]:
    """Return the head of each segment, unless another segment already pins it. If a new segment pins these heads, every
    durable line is covered by a pin.

    A head is usually the hash of the segment's last line. In a live writer's segment, it is the hash of the last line
    below the frontier. A power cut may still lose lines above the frontier, and a pin on a lost line would look like
    tampering.
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
    """Return the pins in the segment's `open` record: heads by segment name."""
    return from_json(segment.pins)


def head_at(folder: Path, disk: Disk, segment: Segment, n: int) -> str:
    """Return the hash of the last of the segment's first `n` lines, or an empty string if the segment is shorter."""
    for _, line, _ in SegmentReader(folder, segment.name, disk=disk):
        if line.n == n - 1:
            return line.h.decode()
    return ""


def unmet_pins(segments: list[Segment], index: Index, kept: dict[str, str]) -> list[str]:
    """Return a sentence for each pinned line that is in no segment. The pins are in the segments and in `kept`.

    Most pins name a segment's last line and can be checked without reading the segment. A segment with other pins is
    read once. The index keeps the pins that were found, so the next start doesn't read them again.
    """
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
    """Return the newest segment of the writer that writes this open tape.

    The search begins at the segment with the tape's last record and follows the `next` names in full segments. It must
    not stop at the first segment: its writer may be alive and may have begun a new segment before the episode wrote
    again.
    """
    by_name = {segment.name: segment for segment in segments}
    name = index.places(tape.id)[-1].segment
    while (segment := by_name.get(name)) is not None and segment.next is not None:
        name = segment.next
    return name


def _end(tape: Summary, index: Index, writer: SegmentWriter, found: Recovered, clock: Callable[[], float]) -> None:
    """Queue the end of an episode whose process died.

    The tape's last record shows whether an action was running. An irreversible action is recorded before it is carried
    out, so it may have happened even if the tape has no reaction to it.
    """
    cause = None
    last = [place for place in index.places(tape.id) if place.t in ("begin", "step", "call", "reward")][-1]
    record = read_body(next(index.bodies([last])))
    if tape.effect == "irreversible" and record.get("role") == "action":
        found.dangling.append(Dangling(tape.id, tape.env, str(record.get("kind"))))
        cause = Cause(
            type=CauseType.OURS,
            message="the process died when the irreversible action "
            f"{record.get('kind')!r} may have been running: a person must check whether it happened",
        )
    now = clock()
    end = End(tape=tape.id, status=Status.CRASHED, cause=cause, seconds=max(now - tape.begun, 0.0), at=now)
    writer.append(end.body())
    found.crashed.append(tape.id)
