"""Verification reads every line of a run without the index. It reports what holds, the damage, and what isn't checked.

A run is broken if durable bytes have changed, if a record names a missing thing, or if a token or an episode is not
accounted for (`books`). Bytes are durable if they are below a frontier, a seal or a pin. A run is undecided if it has a
torn tail that no recovery has set aside, or if an unpinned segment is missing. It is also undecided if a gap may come
from a crash or a deleted file, or if only a newer version knows a part of a record. Verification runs no agent,
environment or model, and changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from math import isqrt, prod
from pathlib import Path
from typing import cast

from pydantic import JsonValue, computed_field
from pydantic_core import from_json

from ..errors import NewerRecord, UsageError
from ..messages import image_parts, video_in, visual_parts
from ..pictures import Video, videos_in
from ..places import Place
from ..records import DIGEST_START, IN_TAPE, Begin, Call, Files, Lead, Message, Parent, StepRecord, fold
from ..schema import parse_record, reason_of
from ..value import STANDINGS, Standing, Value
from .books import Books, BooksFold
from .disk import REAL, Disk, NotAFile, changed, damage, file_digest
from .lease import FOLDER, Holder, read_leads
from .media import Media
from .reader import PINS, SegmentReader, read_pin_file, segment_sizes
from .segment import Line, peek, segment_names
from .writer import CLOSED, is_live

_PIN = re.compile(r"(?:([0-9]{6}-[0-9a-f]{6}):)?([0-9a-f]{64})")


class SegmentReport(Value):
    """The state of one segment."""

    name: str
    lines: int
    """Number of intact lines before the first break in the chain."""
    size: int
    """Number of bytes in these lines."""
    head: str
    """Hash of the last of these lines. As a pin, it covers them all."""
    frontier: int
    """Number of lines that were durable, as stated in the segment's own lines."""
    sealed: bool
    reason: str | None
    """The reason in the segment's seal (`closed`, `full` or `exit`), or None if the segment has no seal."""
    next: str | None
    """Name of the segment that continues this one. Only the seal of a full segment states it. None for all other
    segments."""
    live: bool | None
    """Whether a writer holds the segment's lock, or None if the lock can't be tested."""
    problem: str | None = None


class Report(Value):
    """What `verify` found.

    `exit_code` is 1 (broken) if `broken` has entries. Otherwise, it is 2 (undecided) if the run has no segments or if
    `torn`, `holes`, `unsettled` or `unknown` has entries. In all other cases, it is 0 (holds).
    """

    run: str
    exit_code: int
    records: int
    episodes: int
    head: str | None
    """`segment:hash` of the newest segment. Keep it outside the run, and pass it as a pin later."""
    segments: tuple[SegmentReport, ...]
    broken: tuple[str, ...]
    """Sentences about damage."""
    torn: tuple[str, ...]
    """Sentences about bytes above a frontier that don't form whole lines."""
    holes: tuple[str, ...]
    """Numbers of segments that are missing in the sequence and that no pin names."""
    unsettled: tuple[str, ...]
    """Sentences about gaps that may come from a crash, but also from a deleted or shortened file."""
    unknown: tuple[str, ...] = ()
    """Sentences about parts of records that this version doesn't know."""
    set_aside: tuple[str, ...]
    """Files with torn bytes that a recovery kept."""
    pins: int
    """Number of pins that were compared, including the pins that segments have for each other."""
    files: int
    """Number of other files (configuration, results, checkpoints) that were compared with a recorded digest."""
    media: int
    """Number of media files that records name. Each file was read, and its hash was compared with its name."""
    unnamed_media: int
    open: int
    """Number of episodes without an end, which are still running or haven't been recovered yet."""
    books: Books
    not_checked: tuple[str, ...]

    @computed_field
    @property
    def verdict(self) -> Standing:
        """The exit code in words."""
        return STANDINGS[self.exit_code]


class _Fold:
    """Accumulates the facts from the lines that were read so far."""

    def __init__(self) -> None:
        self.books = BooksFold()
        self.broken: list[str] = []
        self.tapes: set[str] = set()
        self.forks: list[tuple[str, Parent]] = []
        self.media: set[str] = set()
        self.pictures = _Pictures()
        self.files: dict[str, str | None] = {}
        self.leads: dict[int, str] = {}
        """Name of the segment with the `lead` record, by epoch."""
        self.records = 0
        self._unknown: dict[tuple[str, str | None], tuple[int, str]] = {}
        """The parts of records that this version doesn't know. For (part, version that wrote it), the value is (number
        of records, place of the first one)."""
        self._wrote: dict[str, str] = {}
        """The package version that recorded each tape."""

    def add(self, segment: str, line: Line) -> None:
        self.records += 1
        place = f"record {line.n} of segment {segment}"
        t, tape = "", None
        try:
            t, tape = peek(line.body)
            record = parse_record(line.body)
            self.books.add(line.body)
        except NewerRecord as error:
            part = (error.part, self._wrote.get(tape or ""))
            n, first = self._unknown.get(part, (0, place))
            self._unknown[part] = n + 1, first
            with contextlib.suppress(ValueError):
                self.books.add(line.body)
            return
        except ValueError as error:
            self.broken.append(f"{place} can't be read: {reason_of(error)}")
            return
        if tape is not None and t in IN_TAPE:
            self.tapes.add(tape)
        if isinstance(record, Begin | StepRecord | Call):
            self.broken += self.pictures.add(record)
            self.media |= set(record.media)
        if isinstance(record, Files):
            self.files |= record.files
        if isinstance(record, Lead):
            self.leads[record.epoch] = segment
        if isinstance(record, Begin):
            if "package" in record.versions:
                self._wrote[record.tape] = record.versions["package"]
            if record.parent is not None:
                self.forks.append((record.tape, record.parent))
            if record.task.hash != record.task_hash:
                self.broken.append(
                    f"tape {record.tape}: its task hashes to {record.task.hash}, not to the recorded {record.task_hash}"
                )

    def unknown(self) -> list[str]:
        """Return sentences about the parts of records that this version doesn't know."""
        return [
            f"{first} has {part}, which this version doesn't know"
            f"{f'; Tapereel {wrote} wrote it' if wrote else ''}{f' (and {n - 1:,} more records)' if n > 1 else ''}"
            for (part, wrote), (n, first) in self._unknown.items()
        ]


class _Pictures:
    """Checks the places of pictures in each prompt, which are the ranges of tokens that stand for them. The places must
    fit the pictures in the prompt's messages, and the tape must have these pictures.

    No model is loaded, so the tokens at a place can only be checked against the size of the picture. A processor
    produces the same grid and ids for all pictures of one size, and a picture's first and last id are equal.
    """

    def __init__(self) -> None:
        self._shown: dict[str, set[str]] = {}
        """Names (`_named`) of the pictures in each tape's steps and requests. A fork of an unread tape has no entry."""
        self._sizes: dict[tuple[str, int, int], str] = {}
        """The recorded sizes of pictures, as (file, width, height). The value is a tape that recorded the size."""
        self._placed: list[tuple[str, str, Place, bytes, bool, bool]] = []
        """One tuple for each place: (call, processor and agent, place, hash of the ids at the place, whether these ids
        are all equal, whether the first and last id are plausible)."""
        self._processors: dict[str, str] = {}
        self._calls: dict[str, tuple[list[tuple[int, Message]], list[Place]]] = {}
        """For each call with pictures: its pictures and videos, each as (message index, content part), and the places
        in its prompt."""

    def add(self, record: Begin | StepRecord | Call) -> list[str]:
        """Add a record, and return a sentence for each disagreement."""
        if isinstance(record, Begin):
            above = self._shown.get(record.parent.tape) if record.parent is not None else ()
            if above is not None:
                self._shown[record.tape] = set(above)
            self._processors[record.tape] = record.versions.get("processor", "")
        # The class of a step may not have been imported, so the step's JSON is read instead.
        asks = isinstance(record, Call)
        content = visual_parts(record.messages) if asks else from_json(record.body()) if record.media else []
        self._sizes |= dict.fromkeys(_sizes(content), record.tape)
        shown = self._shown.get(record.tape)
        if shown is not None and not isinstance(record, Begin):
            shown.update(record.media)
            shown.update(_named(video) for video in videos_in(content) if isinstance(record, StepRecord))
        if shown is None or not isinstance(record, Call):
            return []
        asked, places = self._calls.get(record.base or "", ([], []))
        asked = [one for one in asked if one[0] < record.keep_messages]
        places = [place for place in places if place.end <= record.keep] + list(record.places)
        for i, message in enumerate(record.messages, record.keep_messages):
            asked += [(i, part) for part in visual_parts([message])]
        if (not asked and not places) or record.prompt is None:
            return []
        self._calls[record.call] = asked, places
        by = f"{self._processors.get(record.tape)} {record.by}"
        for place in record.places:
            start, end = place.offset - record.keep, place.end - record.keep
            ids = record.prompt[start:end]
            run, around = len(set(ids)) == 1, [*record.prompt[:start][-1:], *record.prompt[end : end + 1]]
            ends = place.kind == "video" or (ids[0] == ids[-1] and not (run and ids[0] in around))
            self._placed.append((record.call, by, place, sha256(ids).digest(), run, ends))
        # A renderer represents either every video as one place or every video as separate frames.
        parts: list[Message] = [part for _, part in asked]
        if not any(place.kind == "video" for place in places):
            parts = image_parts([{"content": parts}])
        read = [_named(video) if (video := video_in(part)) else str(part.get("media")) for part in parts]
        names = [_named(place) for place in places]
        if shown.issuperset(names) and (read == names or record.cut):
            return []
        return [
            f"call {record.call} has the pictures {names} in its prompt, {read} in its messages, {sorted(shown)} shown"
        ]

    def check(self, sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """Yield a sentence for each disagreement with the files. `sizes` has (width, height) from each header."""
        for (name, *said), tape in self._sizes.items():
            if tuple(said) != (size := sizes.get(name, tuple(said))):
                yield f"tape {tape} records {said[0]}x{said[1]} pixels for the picture {name}; its file has {size}"
        first: dict[tuple[object, ...], object] = {}
        for call, by, place, ids, run, ends in self._placed:
            width, height = size = sizes.get(place.media[0], (0, 0))
            grid, known = place.grid, (by, place.kind, place.times, size) if any(size) else (place,)
            fits = ends and first.setdefault(known, (grid, ids)) == (grid, ids)
            if run:  # a processor merges a square of patches into one token
                fits &= isqrt(max(prod(grid), 0) // place.length) ** 2 * place.length == prod(grid)
            tall, wide = (0, 0, *grid)[-2:]
            if not fits or (tall - wide) * (height - width) < 0:
                yield (
                    f"call {call} has the {place.kind} {place.media[0]} at {place.length} tokens from {place.offset} "
                    f"with the grid {grid}, which doesn't fit its tokens or the size {size} of the file"
                )


def _sizes(content: object) -> Iterator[tuple[str, int, int]]:
    """Yield (file, width, height) for each picture in a JSON value."""
    match content:
        case {"media": str(name), "width": int(width), "height": int(height)}:
            yield name.removeprefix("media:"), width, height
        case dict() | list():
            for part in content.values() if isinstance(content, dict) else content:
                yield from _sizes(part)
        case _:
            pass


def _named(shown: Place | Video) -> str:
    """Return the file names of a picture or video as one string. For a video, add the time of each frame in seconds."""
    names = shown.media if isinstance(shown, Place) else [frame.name for frame in shown.frames]
    return " ".join([*names, *(f"{seconds!r} s" for seconds in shown.times)])


class _Pins:
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

    def see(self, name: str, line: Line) -> None:
        """Mark the pins that name this line as met. `line` is an intact line in segment `name`."""
        h = line.h.decode()
        if h in self.anywhere or (name, h) in self.of_segment:
            self.met[name, h] = line.n + 1
        self.anywhere.discard(h)
        self.of_segment.discard((name, h))

    def unmet(self) -> list[str]:
        return [
            *self.problems,
            *(
                f"segment {name} does not hold the line with the hash {head} that was pinned"
                for name, head in sorted(self.of_segment)
            ),
            *(f"no segment holds the line with the hash {head} that was pinned" for head in sorted(self.anywhere)),
        ]


def verify(path: str | Path, *, pins: Iterable[str] = (), exact: Iterable[str] = (), disk: Disk = REAL) -> Report:
    """Check a run. A pin is `segment:hash`, a bare hash, or the path of a file like `pins.json`.

    The pins in `exact` together mark the end of the run: any line or file that they don't cover counts as broken.
    Raises UsageError if `path` is not a run, and ValueError if a pin is invalid.
    """
    path, folder = Path(path), Path(path) / "tapes"
    try:
        entries = disk.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} is not a run: it has no folder `tapes`") from None
    exact = [*exact]
    wanted = _gather_pins(path, segment_names(entries), [*pins, *exact], disk)
    sizes = segment_sizes(folder, disk)  # read after the pins, so that every pinned line is included
    pinned = len(wanted.of_segment) + len(wanted.anywhere)
    found, torn = _Fold(), list[str]()
    reports = [_segment(folder, name, size, disk, found, wanted, torn) for name, size in sizes.items()]
    found.broken += wanted.unmet()
    numbers = {int(name[:6]) for name in sizes}
    holes = tuple(f"{number:06d}" for number in sorted(set(range(1, max(numbers, default=0))) - numbers))
    _check_forks(folder, [report.name for report in reports if report.lines], disk, found)
    unnamed = _check_media(folder, disk, found)
    compared = _check_files(path, found)
    unsettled = _unsettled(path, reports, found, wanted, disk)
    open_files = tuple(_open_files(path, found))
    if exact:
        after = _after(folder, reports, _Pins(exact, disk), wanted, disk)
        found.broken += [*after, *(f"after the pin: {text}" for text in open_files)]
    books, unknown = found.books.books(), found.unknown()
    findings = [f"the books: {finding}" for finding in books.findings]
    (unknown if unknown else found.broken).extend(findings)  # unknown parts of records may explain these findings
    return Report(
        run=str(path),
        exit_code=1 if found.broken else 2 if torn or holes or unsettled or unknown or not sizes else 0,
        records=found.records,
        episodes=books.begun,
        head=f"{reports[-1].name}:{reports[-1].head}" if reports and reports[-1].lines else None,
        segments=tuple(reports),
        broken=tuple(found.broken),
        torn=tuple(torn),
        holes=holes,
        unsettled=tuple(unsettled),
        unknown=tuple(unknown),
        set_aside=tuple(sorted(name for name in entries if ".torn-" in name)),
        pins=pinned,
        files=compared,
        media=len(found.media),
        unnamed_media=unnamed,
        open=books.open,
        books=books,
        not_checked=(*_not_checked(reports, wanted), *open_files),
    )


def _gather_pins(path: Path, names: list[str], pins: Iterable[str], disk: Disk) -> _Pins:
    """Collect the caller's pins, those in the run's `pins.json`, and those in each segment's first line."""
    wanted = _Pins(pins, disk)
    with contextlib.suppress(FileNotFoundError):  # `not_checked` says what a missing file leaves unchecked
        try:
            wanted.add_file(disk, path / PINS)
        except (ValueError, NotAFile) as error:
            wanted.problems.append(str(error))
    for name in names:
        reader = SegmentReader(path / "tapes", name, disk=disk)
        with contextlib.suppress(OSError):  # `_segment` reports this error
            for _ in reader:
                pinned = cast("dict[str, JsonValue]", reader.chain.opened["pins"])
                wanted.opens[name] = [(of, str(head)) for of, head in pinned.items()]
                wanted.of_segment |= set(wanted.opens[name])
                break
    return wanted


def _segment(
    folder: Path, name: str, size: int, disk: Disk, found: _Fold, wanted: _Pins, torn: list[str]
) -> SegmentReport:
    reader, problem = SegmentReader(folder, name, end=size, disk=disk), None
    try:
        for _, line, _ in reader:
            found.add(name, line)
            wanted.see(name, line)
        broken = reader.broken()
    except OSError as error:
        found.broken.append(problem := f"segment {name} can't be read: {error}")
        broken = None
    chain, seal = reader.chain, reader.chain.sealed or {}
    # A writer holds its lock until the head of its seal is in `pins.json`.
    settled = chain.sealed is not None and seal.get("reason") != CLOSED
    live = False if settled or problem is not None else is_live(folder, name, disk)
    if broken is not None and broken.verdict == "corrupt":
        found.broken.append(problem := str(broken))
    elif broken is not None and not live:
        torn.append(problem := str(broken))
    return SegmentReport(
        name=name,
        lines=chain.n,
        size=reader.offset,
        head=chain.head.decode(),
        frontier=chain.frontier,
        sealed=chain.sealed is not None,
        reason=cast("str | None", seal.get("reason")),
        next=cast("str | None", seal.get("next")),
        live=live,
        problem=problem,
    )


def _check_forks(folder: Path, names: list[str], disk: Disk, found: _Fold) -> None:
    """Check that each fork's parent has the digest that the fork recorded. Parents outside this run are skipped."""
    wanted = {(parent.tape, parent.records) for _, parent in found.forks if parent.tape in found.tapes}
    digests = _digests(folder, names, disk, {tape for tape, _ in wanted}) if wanted else ()
    met = {(tape, n, digest) for tape, n, digest in digests if (tape, n) in wanted}
    for fork, parent in found.forks:
        if parent.tape in found.tapes and (parent.tape, parent.records, parent.digest) not in met:
            found.broken.append(
                f"tape {fork} was forked from tape {parent.tape} with the digest {parent.digest} after "
                f"{parent.records} records, which that tape does not have"
            )


def _digests(folder: Path, names: list[str], disk: Disk, tapes: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    state: dict[str, tuple[int, bytes]] = dict.fromkeys(tapes, (0, DIGEST_START))
    for name in names:
        for _, line, _ in SegmentReader(folder, name, disk=disk):
            t, tape = peek(line.body)
            if tape in state and t in IN_TAPE:
                n, digest = state[tape]
                state[tape] = n + 1, fold(digest, line.body)
                yield tape, n + 1, state[tape][1].hex()


def _check_media(folder: Path, disk: Disk, found: _Fold) -> int:
    """Check every media file that a record names. Return the number of files that no record names."""
    media, sizes = Media(folder / "media", disk=disk), dict[str, tuple[int, int]]()
    for name in sorted(found.media):
        try:
            with disk.open(media.folder / name) as file:
                if (head := file.read(24)).startswith(b"\x89PNG"):
                    sizes[name] = int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
            if file_digest(media.folder / name, disk) != name[:64]:
                found.broken.append(f"media file {name} does not hold the bytes of its name")
        except FileNotFoundError:
            found.broken.append(f"media file {name} is gone, but a record names it")
        except OSError as error:
            found.broken.append(f"media file {name} can't be read: {error}")
    found.broken += found.pictures.check(sizes)
    return len(set(media.names()) - found.media)


def _check_files(path: Path, found: _Fold) -> int:
    """Compare files with their recorded digests, and return the number of compared files. A checkpoint that is missing
    as a whole is skipped, because old checkpoints are deleted."""
    compared, whole = 0, dict[Path, dict[Path, str]]()
    if os.path.lexists(path / "checkpoints") and not (path / "checkpoints").is_dir():
        found.broken.append(f"{path / 'checkpoints'} is not a folder")
    for name, digest in sorted(found.files.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            found.broken.append(f"a record has the digest of {name}, which is outside the run")
            continue
        checkpoint = next((one for one in Path(name).parents if one.name.startswith("update-")), None)
        if digest is None or (checkpoint is not None and not os.path.lexists(path / checkpoint)):
            continue
        compared += 1
        if checkpoint is not None:
            whole.setdefault(path / checkpoint, {})[path / name] = digest
        elif (sentence := changed(path / name, digest)) is not None:
            found.broken.append(sentence)
    found.broken += [text for checkpoint, digests in whole.items() for text in damage(checkpoint, digests)]
    return compared


def _unsettled(path: Path, reports: list[SegmentReport], found: _Fold, wanted: _Pins, disk: Disk) -> list[str]:
    """Return sentences about gaps that may come from a crash, but also from a shortened or deleted file."""
    kept = dict[str, str]()
    # The pins are read after the locks were tested, because a writer may have closed its segment just before the test.
    with contextlib.suppress(OSError, ValueError):
        kept = read_pin_file(disk, path / PINS)
    settled = {pin for pins in wanted.opens.values() for pin in pins}
    pinned = {name for name, _ in settled}
    by_name = {report.name: report for report in reports}
    sentences = list[str]()
    for report in reports:
        if report.next is not None and report.next not in by_name:
            found.broken.append(f"segment {report.next} is gone, but segment {report.name} names it as the next one")
        if report.reason == CLOSED and not report.live and report.name not in kept:
            sentences.append(f"segment {report.name} was closed, but {PINS} doesn't have its head")
    if reports and not reports[-1].lines and not reports[-1].live and reports[-1].problem is None:
        sentences.append(f"segment {reports[-1].name}, the last one, has no line")
    leads = dict[int, Holder]()
    try:
        leads = read_leads(path)
    except OSError as error:
        found.broken.append(str(error))
    for epoch, name in found.leads.items():
        last = by_name[name]
        while last.next in by_name and last.next > last.name:  # forged names could form a cycle
            last = by_name[last.next]
        if epoch < max(found.leads) and last.name in pinned:
            # A later lead ended this one, so this one may have no seal. The later lead's first line pins its lines.
            continue
        if epoch not in leads:
            sentences.append(f"lead {epoch} has a record, but no file in {FOLDER}/")
        elif (leads[epoch].ended or not leads[epoch].pid) and not last.sealed and (last.name, last.head) not in settled:
            how = "ended" if leads[epoch].ended else "has an unreadable file"
            sentences.append(f"lead {epoch} {how}, but its segment {last.name} has no seal")
    return sentences


def _after(folder: Path, reports: list[SegmentReport], last: _Pins, wanted: _Pins, disk: Disk) -> Iterator[str]:
    """Yield a sentence for each segment with bytes after the end that the pins in `last` mark. A pin covers the lines
    before it, and the pins in covered lines cover further segments."""
    covered: dict[str, int] = {}
    todo = [pin for pin in wanted.met if pin in last.of_segment or pin[1] in last.anywhere]
    while todo:
        name, head = todo.pop()
        lines = wanted.met.get((name, head), 0)
        if lines > covered.get(name, 0):
            covered[name] = lines
            todo += wanted.opens.get(name, [])
    for report in reports:
        after = report.lines - covered.get(report.name, 0)
        if after or report.problem is not None or disk.size(folder / f"{report.name}.jsonl") > report.size:
            yield f"segment {report.name} continues after the pin, by {after} lines"


def _open_files(path: Path, found: _Fold) -> Iterator[str]:
    folders = [one for depth in ("", "*/") for one in sorted(path.glob(f"checkpoints/{depth}update-*"))]
    for folder in folders:
        if not any((path / name).is_relative_to(folder) for name in found.files):
            yield f"no record has the digests of {folder}: it was added, or a crash came before they were recorded"
    names = sorted(name for name, digest in found.files.items() if digest is None and (path / name).exists())
    if names:
        yield f"{', '.join(names)}: the run is open, or was never closed, so no record has their digests"


def _not_checked(reports: list[SegmentReport], wanted: _Pins) -> Iterator[str]:
    yield "what agents, environments, models and training did; this reads bytes and runs nothing"
    for report in reports:
        if not report.sealed and report.lines > report.frontier:
            yield (
                f"segment {report.name}: its last {report.lines - report.frontier} lines stand above its frontier; "
                "if more were cut off, that does not show"
            )
        if report.live is None:
            yield f"whether a writer holds segment {report.name}: its lock can't be tested here"
    if not wanted.outside:
        yield "no pin was given: lines cut off at the end, or a run rewritten from the start, would not show"
    elif not wanted.anywhere:
        yield f"pins in the run's {PINS} show accidents only; against intent, give a pin that was kept elsewhere"
