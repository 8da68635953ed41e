"""Verification reads every line of a run without the index. It reports what holds, the damage, and what isn't checked.

A run is broken if durable bytes have changed, if a record names a missing thing, or if a token or an episode is not
accounted for (`books`). Bytes are durable if they are below a frontier, a seal or a pin. A run is undecided if it has a
torn tail that no recovery has set aside, or if an unpinned segment is missing. It is also undecided if a gap may come
from a crash or a deleted file, or if only a newer version knows a part of a record. Verification runs no agent,
environment or model, and changes nothing.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import JsonValue, computed_field

from ..common.text import guard_terminal
from ..errors import NewerRecord, TapereelError, UsageError
from ..place_checks import PlaceChecks, Shown, shown_in
from ..records import DIGEST_START, IN_TAPE, Parent, fold
from ..schema import parse_record, reason_of
from ..value import STANDINGS, Standing, Value
from .books import Books, BooksFold, Entry, entry_of
from .disk import REAL, Disk, NotAFile, changed, damage, file_digest
from .lease import FOLDER, Holder, read_leads
from .media import Media
from .reader import PINS, Pins, SegmentReader, read_pin_file, segment_sizes
from .segment import MAX_LINE, ZERO, BadLine, Chain, Line, parse_line, peek, segment_names
from .summary import read_facts
from .writer import CLOSED, is_live


class VerifierDied(TapereelError, RuntimeError):
    """Raised if a process that read a part of a run died, so there is no report."""


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


class _Begun(NamedTuple):
    """What only verification needs from a `begin`."""

    parent: Parent | None
    package: str | None
    """The package version that recorded the tape."""
    problem: str | None
    """Sentence about a wrong hash of the task."""


class _Odd(NamedTuple):
    """The reason why a record can't be read."""

    reason: str
    part: str | None = None
    """The part that this version doesn't know, if that is the only reason."""


_Item = tuple[int, str, str | None, Entry | None, Shown | None, _Begun | _Odd | dict[str, str | None] | int | None]
"""The facts from one line: its number, its record's type and tape, the entry for the books, the pictures, and further
facts, which are the digests in a `files` record and the epoch in a `lead` record."""


def _examine(line: Line) -> _Item:
    """Check a line's record without the other lines, and return the facts from it."""
    n, t, tape, body = line.n, "", None, line.body
    try:
        t, tape = peek(body)
        record = parse_record(body)
    except NewerRecord as error:
        entry = None
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            entry = entry_of(read_facts(t, body))
        return n, t, tape, entry, None, _Odd(str(error), error.part)
    except ValueError as error:
        return n, t, tape, None, None, _Odd(reason_of(error))
    t, entry = record.t, entry_of(record)
    if record.t == "step" or record.t == "call":
        return n, t, tape, entry, shown_in(record), None
    if record.t == "begin":
        problem, found = None, record.task.hash
        if found != record.task_hash:
            problem = f"tape {record.tape}: its task hashes to {found}, not to the recorded {record.task_hash}"
        begun = _Begun(record.parent, record.versions.get("package"), problem)
        return n, t, tape, entry, shown_in(record), begun
    if record.t == "files":
        return n, t, tape, entry, None, record.files
    return n, t, tape, entry, None, record.epoch if record.t == "lead" else None


class _Fold:
    """Accumulates the facts from the lines that were read so far."""

    def __init__(self) -> None:
        self.books = BooksFold()
        self.broken: list[str] = []
        self.torn: list[str] = []
        self.tapes: set[str] = set()
        self.forks: list[tuple[str, Parent]] = []
        self.media: set[str] = set()
        self.places = PlaceChecks()
        self.files: dict[str, str | None] = {}
        self.leads: dict[int, str] = {}
        """Name of the segment with the `lead` record, by epoch."""
        self.records = 0
        self._unknown: dict[tuple[str, str | None], tuple[int, str]] = {}
        """The parts of records that this version doesn't know. For (part, version that wrote it), the value is (number
        of records, place of the first one)."""
        self._wrote: dict[str, str] = {}
        """The package version that recorded each tape."""

    def add(self, segment: str, item: _Item) -> None:
        """Add the facts from a line of `segment`. The lines must come in order."""
        n, t, tape, entry, shown, more = item
        self.records += 1
        if isinstance(more, _Odd):
            self._add_odd(f"record {n} of segment {segment}", more, t, tape, entry)
            return
        if entry is not None:
            self.books.post(t, tape, entry)
        if tape is not None and t in IN_TAPE:
            self.tapes.add(tape)
            if shown is not None:
                self.broken += self.places.add(tape, shown)
                self.media.update(shown.media)
        if more is not None:
            self._add_more(segment, tape, more)

    def _add_more(self, segment: str, tape: str | None, more: _Begun | dict[str, str | None] | int) -> None:
        if isinstance(more, int):
            self.leads[more] = segment
        elif isinstance(more, dict):
            self.files |= more
        elif tape is not None:
            if more.package is not None:
                self._wrote[tape] = more.package
            if more.parent is not None:
                self.forks.append((tape, more.parent))
            if more.problem is not None:
                self.broken.append(more.problem)

    def _add_odd(self, place: str, odd: _Odd, t: str, tape: str | None, entry: Entry | None) -> None:
        if odd.part is None:
            self.broken.append(f"{place} can't be read: {odd.reason}")
            return
        part = (odd.part, self._wrote.get(tape or ""))
        n, first = self._unknown.get(part, (0, place))
        self._unknown[part] = n + 1, first
        if entry is not None:
            with contextlib.suppress(TypeError):  # for example, text in the place of a number
                self.books.post(t, tape, entry)

    def unknown(self) -> list[str]:
        return [
            f"{first} has {part}, which this version doesn't know"
            f"{f'; Tapereel {wrote} wrote it' if wrote else ''}{f' (and {n - 1:,} more records)' if n > 1 else ''}"
            for (part, wrote), (n, first) in self._unknown.items()
        ]


PART = 4 << 20
"""Size in bytes of the parts of a segment that processes read."""
PER_JOB = 64 << 20
"""Number of bytes that justify another process."""


class _Part(NamedTuple):
    """The lines of a segment that begin in a range of bytes, read by a process that knows none of the lines before."""

    offset: int
    n: int
    head: bytes
    """The offset and number of the first line, and the hash that it states for the line before it."""
    frontier: int
    """The number of durable lines that the first line states."""
    end: int
    chain: Chain
    """The offset and the state of the chain after the last line."""
    items: list[_Item]
    pinned: list[tuple[int, str]]
    """Number and hash of each line that is pinned."""

    def follows(self, reader: SegmentReader) -> bool:
        """Whether the part continues the lines that `reader` has read."""
        chain = reader.chain
        at = (self.offset, self.n, self.head) == (reader.offset, chain.n, chain.head)
        return at and chain.sealed is None and chain.frontier <= self.frontier


_Range = tuple[str, int, int]
"""A segment, and the range of bytes in which a part's lines begin."""


def _read_part(folder: Path, part: _Range, disk: Disk, pinned: frozenset[bytes]) -> _Part | None:
    """Return the part's lines up to the first break, or None if there are none."""
    name, begin, end = part
    reader = SegmentReader(folder, name, end=end, disk=disk)
    offset, n, head, frontier = 0, 0, ZERO, 0
    if begin:
        for _ in reader:  # the segment's first line, whose hash later lines state
            break
        with disk.open(reader.path) as file:
            file.seek(begin - 1)
            reader.offset = begin - 1 + len(file.readline(MAX_LINE))
            first = parse_line(file.readline(MAX_LINE)[:-1])
        offset, n, head, frontier = reader.offset, first.n, first.p, first.c
        reader.chain.n, reader.chain.head, reader.chain.frontier = n, head, frontier
    items, met = list[_Item](), list[tuple[int, str]]()
    for _, line, _ in reader:
        items.append(_examine(line))
        if line.h in pinned:
            met.append((line.n, line.h.decode()))
    return _Part(offset, n, head, frontier, reader.offset, reader.chain, items, met) if items else None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Return a context without garbage collection. Reading records makes no reference cycles, so a collection would
    find nothing and visit the growing books again and again, which takes an eighth of the CPU."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _send_parts(folder: Path, parts: list[_Range], disk: Disk, pinned: frozenset[bytes], to: Connection) -> None:
    """Read parts and send each of them. This runs in a process of its own, which ends when the receiver is gone."""
    guard_terminal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C too
    with _uncollected(), contextlib.suppress(BrokenPipeError):
        for part in parts:
            try:
                found = _read_part(folder, part, disk, pinned)
            except (OSError, BadLine):
                found = None  # the parent reads the part itself, and reports the reason
            to.send(found)


class _Parts:
    """Reads the parts of all segments in several processes, and gives them in order."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], jobs: int, disk: Disk, pinned: frozenset[bytes]) -> None:
        ranges = [(name, k, min(k + PART, size)) for name, size in sizes.items() for k in range(0, size, PART)]
        jobs = min(jobs, len(ranges))
        self._left = collections.deque(ranges if jobs > 1 else ())
        self._workers = collections.deque[tuple[BaseProcess, Connection]]()
        spawn = multiprocessing.get_context("spawn")  # a child forked from a process with threads may hang
        for k in range(jobs if jobs > 1 else 0):
            receive, send = spawn.Pipe(duplex=False)
            worker = spawn.Process(target=_send_parts, args=(folder, ranges[k::jobs], disk, pinned, send), daemon=True)
            worker.start()
            send.close()
            self._workers.append((worker, receive))

    def of(self, segment: str) -> Iterator[_Part]:
        """Yield the parts of the next segment. Raises VerifierDied if a process died."""
        while self._left and self._left[0][0] == segment:
            self._left.popleft()
            worker, receive = self._workers[0]
            self._workers.rotate(-1)
            try:
                part: _Part | None = receive.recv()
            except EOFError:
                worker.join()
                raise VerifierDied(
                    f"a process that verified segment {segment} died with exit code {worker.exitcode}: "
                    "verify the run again with `jobs=1`"
                ) from None
            if part is not None:
                yield part

    def close(self) -> None:
        for worker, receive in self._workers:
            receive.close()
            worker.terminate()
            worker.join()


def verify(
    path: str | Path,
    *,
    pins: Iterable[str] = (),
    exact: Iterable[str] = (),
    jobs: int | None = 1,
    disk: Disk = REAL,
) -> Report:
    """Check a run. A pin is `segment:hash`, a bare hash, or the path of a file like `pins.json`.

    The pins in `exact` together mark the end of the run: any line or file that they don't cover counts as broken.
    `jobs` is the number of processes that read the segments. None means one for every 64 MB, up to the number of CPUs
    and at most 4. The report is the same with any number.

    Raises UsageError if `path` is not a run or `jobs` is below 1, ValueError if a pin is invalid, and VerifierDied if a
    process died.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}; it must be 1 or more")
    path, folder = Path(path), Path(path) / "tapes"
    try:
        entries = disk.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} is not a run: it has no folder `tapes`") from None
    exact = [*exact]
    wanted = _gather_pins(path, segment_names(entries), [*pins, *exact], disk)
    sizes = segment_sizes(folder, disk)  # read after the pins, so that every pinned line is included
    pinned = len(wanted.of_segment) + len(wanted.anywhere)
    found = _Fold()
    jobs = jobs or max(1, min(os.cpu_count() or 1, 4, sum(sizes.values()) // PER_JOB))
    with _uncollected(), contextlib.closing(_Parts(folder, sizes, jobs, disk, wanted.hashes())) as parts:
        reports = [_segment(folder, name, size, disk, found, wanted, parts) for name, size in sizes.items()]
    found.broken += wanted.unmet()
    numbers = {int(name[:6]) for name in sizes}
    holes = tuple(f"{number:06d}" for number in sorted(set(range(1, max(numbers, default=0))) - numbers))
    _check_forks(folder, [report.name for report in reports if report.lines], disk, found)
    unnamed = _check_media(folder, disk, found)
    compared = _check_files(path, found)
    unsettled = _unsettled(path, reports, found, wanted, disk)
    open_files = tuple(_open_files(path, found))
    if exact:
        after = _after(folder, reports, Pins(exact, disk), wanted, disk)
        found.broken += [*after, *(f"after the pin: {text}" for text in open_files)]
    books, unknown = found.books.books(), found.unknown()
    findings = [f"the books: {finding}" for finding in books.findings]
    (unknown if unknown else found.broken).extend(findings)  # unknown parts of records may explain these findings
    return Report(
        run=str(path),
        exit_code=1 if found.broken else 2 if found.torn or holes or unsettled or unknown or not sizes else 0,
        records=found.records,
        episodes=books.begun,
        head=f"{reports[-1].name}:{reports[-1].head}" if reports and reports[-1].lines else None,
        segments=tuple(reports),
        broken=tuple(found.broken),
        torn=tuple(found.torn),
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
        not_checked=(*_not_checked(path, reports, wanted), *open_files),
    )


def _gather_pins(path: Path, names: list[str], pins: Iterable[str], disk: Disk) -> Pins:
    """Collect the caller's pins, those in the run's `pins.json`, and those in each segment's first line."""
    wanted = Pins(pins, disk)
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
    folder: Path, name: str, size: int, disk: Disk, found: _Fold, wanted: Pins, parts: _Parts
) -> SegmentReport:
    reader, problem, pinned = SegmentReader(folder, name, end=size, disk=disk), None, wanted.hashes()
    try:
        for part in parts.of(name):
            if part.follows(reader):
                for item in part.items:
                    found.add(name, item)
                for n, h in part.pinned:
                    wanted.see(name, n, h)
                reader.chain, reader.offset = part.chain, part.end
        for _, line, _ in reader:  # the lines that the parts don't have, such as a damaged one
            found.add(name, _examine(line))
            if line.h in pinned:
                wanted.see(name, line.n, line.h.decode())
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
        found.torn.append(problem := str(broken))
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
    found.broken += found.places.check(sizes)
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


def _unsettled(path: Path, reports: list[SegmentReport], found: _Fold, wanted: Pins, disk: Disk) -> list[str]:
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


def _after(folder: Path, reports: list[SegmentReport], last: Pins, wanted: Pins, disk: Disk) -> Iterator[str]:
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


def _not_checked(path: Path, reports: list[SegmentReport], wanted: Pins) -> Iterator[str]:
    yield "what agents, environments, models and training did; this reads bytes and runs nothing"
    for inner in sorted(one.parent for depth in ("*", "*/*") for one in path.glob(f"{depth}/tapes")):
        yield f"the run {inner.relative_to(path)} in this folder, which training may have read: verify it too"
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
