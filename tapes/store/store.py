"""The store reads and writes a run directory.

`Store.create` and `Store.open(write=True)` start a writer for this process. Any number of processes may read at once.
The store owns the folder `tapes/` (segments, media and index) and `pins.json`. Other modules own the other files in a
run. The modules `ledger` and `books` decide what records mean, and `writer` decides how bytes are kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self, TypedDict, Unpack, cast

from pydantic import SkipValidation
from pydantic_core import to_json

from ..common.arguments import check_arguments
from ..common.stats import TOLERANCE
from ..errors import BadArgument, Corrupt, NoSuchTape, NotATape, StoreFailed, UsageError
from ..records import IN_TAPE, Begin, Files, Lead, Publish, Record, Status, Use, Void
from ..schema import AnyRecord, parse_record, read_record
from ..tape import Tape
from .books import Books, BooksFold
from .disk import REAL, Disk, changed, damage, file_digest, put_file
from .index import Index, Place
from .lease import Lease, LeaseLost, recorded_leads
from .ledger import Ledger, Lineages
from .media import Media
from .reader import PINS, Break, SegmentReader, segment_sizes
from .recovery import Recovered, start_writer
from .segment import peek, segment_names
from .summary import Summary
from .writer import FolderLock, SegmentWriter, WriterOptions


class Stored(NamedTuple):
    """One record of a run. Its body is parsed when `record` is accessed."""

    segment: str
    n: int
    t: str
    tape: str | None
    body: bytes

    @property
    def record(self) -> AnyRecord:
        """The parsed record. Raises ValueError if it can't be read."""
        return parse_record(self.body)


class Where(TypedDict, total=False):
    """Conditions that select tapes. `Store.summaries` explains the keys."""

    status: Status | str | None
    split: str | None
    task_hash: str | None
    group: str | None
    version: str | None
    agent: str | None
    min_reward: float | None
    max_reward: float | None
    closed: bool | None


_CLAUSES = {
    "status": "status = ?",
    "split": "split = ?",
    "task_hash": "task_hash = ?",
    "group": "group_id = ?",
    "version": "exists (select 1 from versions v where v.tape = id and v.version = ?)",
    "agent": "agent = ?",
    "min_reward": f"reward >= ? - {TOLERANCE}",
    "max_reward": f"reward <= ? + {TOLERANCE}",
    "closed": "(status is not null) = ?",
}
"""The SQL condition of each key of `Where`."""


class Store:
    """One run, open for reading or writing. As a context manager, it seals its segment on exit. A closed store can't be
    reopened."""

    @check_arguments
    def __init__(self, path: Path, *, disk: SkipValidation[Disk], index: Path | None) -> None:
        """Use `create` or `open` instead."""
        self.path, self.disk = path, disk
        self.folder = path / "tapes"
        self._index_path = index
        self._writer: SegmentWriter | None = None
        self._books_fold, self._books_lock = BooksFold(), threading.Lock()
        self._books_readers: dict[str, SegmentReader] = {}
        self.strict = True
        """Whether changed durable bytes raise Corrupt. If false, a corrupt segment is shown up to its break. The viewer
        reads runs this way, and reports the breaks itself."""
        self.lease: Lease | None = None
        """The lease under which this process writes updates, or None if this process doesn't lead the run."""
        self.recovered = Recovered()
        """What was found and repaired in the segments of dead writers when this store was opened for writing."""

    @classmethod
    @check_arguments
    def create(
        cls,
        path: str | Path,
        *,
        disk: SkipValidation[Disk] = REAL,
        cache: bool = True,
        **options: Unpack[WriterOptions],
    ) -> Self:
        """Start a run, and create its directory if it is missing. Raises UsageError if the directory already has tapes.

        `options`, here and in `open`, are the options of `SegmentWriter`: `durability` (`step`, `tape` or `os`),
        `rotate_bytes`, `idle`, `max_age` and others. If `cache` is false, the index is kept only in memory.
        """
        path = Path(path)
        disk.make_folder(path / "tapes")
        if segment_names(disk.names(path / "tapes")):
            raise UsageError(
                f"{path} holds a run already: open it with Store.open(path, write=True), or choose another path"
            )
        return cls.open(path, write=True, disk=disk, cache=cache, **options)

    @classmethod
    @check_arguments
    def open(
        cls,
        path: str | Path,
        write: bool = False,
        *,
        disk: SkipValidation[Disk] = REAL,
        cache: bool = True,
        **options: Unpack[WriterOptions],
    ) -> Self:
        """Open a run. Opening for writing first recovers the segments of dead writers (`store.recovered`).

        Raises UsageError if `path` is not a run.
        """
        path = Path(path)
        try:
            disk.names(path / "tapes")
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{path} is not a run: it has no folder `tapes`; name the directory that a run was written to"
            ) from None
        store = cls(path, disk=disk, index=path / "tapes" / "index.sqlite" if cache else None)
        if write:
            store._writer, store.recovered = start_writer(store.folder, store.index, disk=disk, **options)
        elif options:
            raise TypeError(f"{sorted(options)} are options of a writer; give write=True as well")
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        failed = self._writer is not None and self._writer.failure is not None
        if error is not None and (failed or isinstance(error, LeaseLost)):
            self.abandon()  # `close` would raise the writer's failure and hide the error that is being raised
        else:
            self.close()

    def close(self) -> None:
        """Seal the segment and write all heads to the run's `pins.json`. Raises StoreFailed if either step fails."""
        try:
            if self._writer is not None:
                self._writer.close(sealed=self._write_pins)
        finally:
            self._close_index()

    def _write_pins(self) -> None:
        """Write the heads of all sealed segments. An unsealed segment may still lose lines, so it gets no pin."""
        try:
            # If two processes close at the same time, the one that writes last must write the heads of both.
            with FolderLock(self.disk, self.folder):
                self.refresh()
                heads = {segment.name: segment.head for segment in self.index.segments() if segment.sealed is not None}
                put_file(self.disk, self.path / PINS, to_json(heads, indent=2) + b"\n")
        except OSError as error:
            raise StoreFailed(
                f"{self.path / PINS} can't be written ({error}), but every record is written and sealed"
            ) from error

    def abandon(self) -> None:
        """Release the run without sealing the segment, as if the process had died."""
        if self._writer is not None:
            self._writer.abandon()
        self._close_index()

    def _close_index(self) -> None:
        if "index" in self.__dict__:
            # After a failed write, which is reported elsewhere, the index isn't kept: writing it would fail too.
            self.index.close(keep=self._writer is None or self._writer.failure is None)

    # Writing

    @property
    def writer(self) -> SegmentWriter:
        """The journal of this process. Raises StoreFailed if the store is open for reading only."""
        if self._writer is None:
            raise StoreFailed(f"{self.path} is open for reading; open it with write=True to write")
        return self._writer

    def append_layer(self, record: Record) -> None:
        """Queue a record that follows the end of its tape or belongs to no tape (`use`, `void`, `publish`).

        If this process leads the run, the epoch of its lease is added to a `use`, `void` or `publish` record. If the
        process has lost the lease, this raises LeaseLost instead.
        """
        if self.lease is not None and isinstance(record, Use | Void | Publish):
            self.check_lead()
            record = record.model_copy(update={"lead": self.lease.epoch})
        self.writer.append(record.body())

    def record_files(self, *paths: Path, open: bool = False) -> None:
        """Queue a record with the digests of these files. Later, `verify` and a resumed run compare the files with it.
        Files that are missing or outside the run are left out.

        If `open` is true, the files may still change or appear before the run is closed, so they are recorded without
        digests. Raises LeaseLost if this process has lost its lease, because another process may then have written the
        files.
        """
        self.check_lead()
        found = {
            path.relative_to(self.path).as_posix(): None if open else file_digest(path)
            for path in paths
            if path.is_relative_to(self.path) and (open or path.is_file())
        }
        if found:
            self.writer.append(Files(files=found, at=time.time()).body())

    @property
    def files(self) -> dict[str, str | None]:
        """The last recorded digest of each file, by its path below the run. None if the file may still change."""
        found: dict[str, str | None] = {}
        for stored in self.run_records("files"):
            found |= cast(Files, stored.record).files
        return found

    def damage(self, folder: Path) -> list[str] | None:
        """Return a sentence for each file below `folder` that differs from its recorded digest, is missing, or was
        added. Return None if no file below the folder has a recorded digest."""
        known = {self.path / name: digest for name, digest in self.files.items() if digest is not None}
        mine = {path: digest for path, digest in known.items() if path.is_relative_to(folder)}
        return damage(folder, mine) if mine else None

    def edited(self) -> list[str]:
        """Return a sentence for each file that was changed or removed after the run was closed. The files are the
        configuration, results, metrics and recipes. The list is empty while the run is open and after a crash."""
        mine = {name: digest for name, digest in self.files.items() if digest is not None and "/" not in name}
        return [text for name, digest in mine.items() if (text := changed(self.path / name, digest)) is not None]

    def take_lead(self, lease: Lease) -> None:
        """Use this lease for all records from now on. The `lead` record is durable when this returns. Raises LeaseLost
        if the store already has a `lead` record with this epoch or a later one."""
        self.lease, self.writer.guard, holder = lease, lease.check, lease.holder
        self._check_recorded(lease)
        self.writer.append(Lead(epoch=holder.epoch, host=holder.host, pid=holder.pid, at=holder.began).body())
        self.writer.sync()
        # Without file locks, another process may have recorded the same epoch meanwhile. Then neither process leads.
        self._check_recorded(lease)

    def check_lead(self) -> None:
        """Raise LeaseLost if this process has lost its lease. Call this before writing one of the run's files."""
        if self.lease is not None:
            self.lease.check()
            self._check_recorded(self.lease)

    def _check_recorded(self, lease: Lease) -> None:
        # Another process records its lead in a segment of its own. To read this process's records again would take time
        # at each update.
        self._refresh(skip=self.writer.segment)
        mine = lease.holder
        later = [
            lead
            for lead, _ in recorded_leads(self.index)
            if lead.epoch >= mine.epoch and (lead.host, lead.pid, lead.began) != (mine.host, mine.pid, mine.began)
        ]
        if later:
            raise lease.lost(later[-1])

    def check_counted(self) -> None:
        """Raise LeaseLost if an update that this process recorded doesn't count, because another process had already
        taken the run over."""
        self.writer.sync()  # `lineages` reads only records that are already in the file
        mine = [one for one in self.lineages().refused if self.lease is not None and one.lead == self.lease.epoch]
        if mine:
            raise LeaseLost(
                f"{len(mine)} records of lead {mine[0].lead} don't count, since a later lead took {self.path} over; "
                f"the first is of update {mine[0].update} of lineage {mine[0].lineage}"
            )

    def record_weights(self, *publishes: Publish) -> None:
        """Queue these `publish` records, except for versions of the weights that already have a record in the store.

        A version must have only one digest. If it had two records, a reader couldn't tell which digest is right.
        """
        known = self.published
        for publish in publishes:
            if publish.version not in known:
                self.append_layer(publish)
                known[publish.version] = publish

    @property
    def published(self) -> dict[str, Publish]:
        """The `publish` record of each version of the weights. If two leads recorded a version, the later lead's record
        counts."""
        found: dict[str, Publish] = {}
        for stored in self.run_records("publish"):
            publish = cast(Publish, stored.record)
            if publish.version not in found or (publish.lead or 0) > (found[publish.version].lead or 0):
                found[publish.version] = publish
        return found

    # Reading

    @cached_property
    def index(self) -> Index:
        """The index, which `tapes` and `tape` use to look up tapes. For other queries, use `index.tapes(where,
        values)`."""
        return Index(self.folder, disk=self.disk, path=self._index_path)

    def refresh(self) -> dict[str, Break]:
        """Read the lines that were written since the last refresh. Return a `Break` for each segment with a torn tail,
        by segment name. Raises Corrupt if durable bytes changed and the store is strict."""
        return self._refresh()

    def _refresh(self, skip: str | None = None) -> dict[str, Break]:
        breaks = self.index.refresh(skip=skip)
        for broken in breaks.values():
            if self.strict and broken.verdict == "corrupt":
                raise broken.error()
        return breaks

    @check_arguments
    def summaries(self, **where: Unpack[Where]) -> list[Summary]:
        """Return summaries of the matching tapes in the order in which they began. Only the index is read.

        `version` selects tapes with a call that this policy version sampled. `closed=True` selects tapes with an end,
        and `closed=False` tapes that are still open. A value of None is the same as a missing key.
        Raises BadArgument for an unknown status.
        """
        status = where.get("status")
        if status is not None and status not in tuple(Status):
            raise BadArgument(f"status is {status!r:.80}: it is one of {', '.join(Status)}")
        self.refresh()
        # SQLite accepts no integer of more than 64 bits, so rewards are passed as floats.
        chosen = {_CLAUSES[k]: float(cast(float, v)) if "reward" in k else v for k, v in where.items() if v is not None}
        return self.index.tapes(" and ".join(chosen) or "1", chosen.values())

    def rescored(self, layer: str, found: Sequence[Summary]) -> list[Summary]:
        """Return the summaries with the rewards of the later scoring `layer`. Each tape is read. A tape that the layer
        doesn't score has no reward. Raises UsageError if no tape has this layer."""
        scored = {s.id: self.tape(s.id, refresh=False).layer_rewards for s in found}
        names = sorted({name for rewards in scored.values() for name in rewards})
        if layer not in names:
            raise UsageError(f"no tape has the layer {layer!r}; the layers are {', '.join(names) or 'none'}")
        return [s._replace(reward=scored[s.id].get(layer)) for s in found]

    def tapes(self, **where: Unpack[Where]) -> Iterator[Tape]:
        """Yield the matching tapes. Each one is read when it is reached. `where` is the same as for `summaries`."""
        for summary in self.summaries(**where):
            yield self.tape(summary.id, refresh=False)

    @check_arguments
    def tape(self, tape: str, *, refresh: bool = True) -> Tape:
        """Return the tape with this id, including its layers. The start of an id is enough if only one id starts with
        it. Raises NoSuchTape if no id or several ids match."""
        if refresh:
            self.refresh()
        return self._tape(self._resolve(tape))

    def _resolve(self, tape: str) -> str:
        found = self.index.ids(tape)
        if tape in found:
            return tape
        if len(found) != 1:
            how = "no tape starts with" if not found else f"{', '.join(found)} … all start with"
            raise NoSuchTape(f"{how} {tape!r} in {self.path}")
        return found[0]

    def _tape(self, tape: str) -> Tape:
        """Return the tape. A fork starts with the first records of its parent, which may itself be a fork.

        No further records of the parent are read, because the parent may have grown after the fork.
        """
        line = [self._read(tape, None)]
        seen = {tape}
        while (above := cast(Begin, read_record(line[-1][0][0], "record 0")).parent) is not None:
            if above.tape in seen:
                raise NotATape(f"tape {tape} is said to be a fork of itself, by way of {above.tape}")
            if above.tape not in self.index.ids(above.tape):
                raise NotATape(
                    f"tape {tape} was forked from tape {above.tape}, which is not in {self.path}; bring the "
                    "run that holds it here, or read the fork there"
                )
            seen.add(above.tape)
            line.append(self._read(above.tape, above.records))
        found: Tape | None = None
        for bodies, layers in reversed(line):
            found = Tape.of(bodies, layers=layers, parent=found, file=lambda name: self.media.get(f"media:{name}"))
        assert found is not None
        return found

    def _read(self, tape: str, records: int | None) -> tuple[list[bytes], list[Record]]:
        """Return the bodies of the tape's own records, and its layers. If `records` is given, return only that many
        bodies and no layers."""
        places = self.index.places(tape)
        ended = next((k for k, place in enumerate(places) if place.t == "end"), len(places))
        inside = [place for k, place in enumerate(places) if k <= ended and place.t in IN_TAPE]
        if not inside[:records] or inside[0].t != "begin":
            raise NotATape(f"tape {tape!r} has records but no begin in {self.path}")
        layers = sorted(set(places) - set(inside)) if records is None else []
        return list(self.bodies(inside[:records])), [parse_record(body) for body in self.bodies(layers)]

    def bodies(self, places: Sequence[Place]) -> Iterator[bytes]:
        """Yield the bodies of the records at these places of the index, in that order."""
        return self.index.bodies(places)

    def records(self) -> Iterator[Stored]:
        """Yield every record, segment by segment. Torn tails are skipped. Raises Corrupt if durable bytes changed."""
        return self._read_on({})

    def _read_on(self, readers: dict[str, SegmentReader]) -> Iterator[Stored]:
        """Yield the records that `readers` haven't read yet. `readers` has one reader for each segment, by name. A
        reader for each new segment is added."""
        for name, size in segment_sizes(self.folder, self.disk).items():
            reader = readers.setdefault(name, SegmentReader(self.folder, name, disk=self.disk))
            reader.end = size
            for _, line, _ in reader:
                yield Stored(name, line.n, *peek(line.body), line.body)
            broken = reader.broken()
            if broken is not None and broken.verdict == "corrupt":
                raise broken.error()

    def run_records(self, *kinds: str) -> Iterator[Stored]:
        """Yield the records without a tape (`use`, `void`, `publish`, `lead`, `files`, `open`, `commit`, `seal`). If
        `kinds` are given, yield only the records of these kinds."""
        self.refresh()
        places = [place for place in self.index.places("") if not kinds or place.t in kinds]
        for place, body in zip(places, self.bodies(places), strict=True):
            yield Stored(place.segment, place.n, place.t, None, body)

    def lineages(self) -> Lineages:
        """Return the lineages, folded from every `use` and `void` record."""
        return Lineages(cast(Use | Void, stored.record) for stored in self.run_records("use", "void"))

    def ledger(self, lineage: str) -> Ledger:
        """Return what this lineage has trained on: its redo log, its next update, and the tapes in its updates."""
        return self.lineages().ledger(lineage)

    def books(self) -> Books:
        """Return the accounting of every token and episode so far. Only records added since the last call are read."""
        with self._books_lock:
            for stored in self._read_on(self._books_readers):
                self._books_fold.add(stored.body)
            return self._books_fold.books()

    @cached_property
    def media(self) -> Media:
        """The run's media files."""
        return Media(self.folder / "media", disk=self.disk)


def check_folder(folder: str | Path) -> None:
    """Raise Corrupt if `folder` is a checkpoint of a run and a file in it differs from the run's records. Any other
    folder passes."""
    path = Path(os.path.realpath(folder))  # `resolve` raises RuntimeError for a link to itself
    run = next((above.parent for above in path.parents if above.name == "checkpoints"), None)
    if run is not None and (run / "tapes").is_dir():
        with Store.open(run) as store:
            if broken := store.damage(path):
                raise Corrupt(f"{broken[0]}. The model in {folder} is not the one that was trained: restore the file")
