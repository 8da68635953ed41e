"""The index has the place of every record and a summary of each tape. It is an SQLite database in memory.

All content of the index comes from the segments. A refresh reads only the lines that were added, and checks their
hashes. A record that can't be read is listed in `unread`, and the other records of its tape are still indexed.

Between processes, the index is kept in a file that may be deleted at any time. The file has the database, followed by a
code (HMAC-SHA256) that only this user can compute. A file without the right code is ignored, so that other people can't
forge the numbers that this user publishes. The index is then rebuilt from the records, which only costs time.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import sqlite3
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_json

from ..common.access_token import state_folder
from ..common.text import logger
from ..records import IN_TAPE
from .disk import REAL, Disk, put_file, read_file
from .reader import Break, SegmentReader, segment_sizes
from .segment import BadLine, Line, parse_line, peek
from .summary import BEGUN, CallFacts, Summary, TapeFold, is_action, read_begin, read_facts

log = logger("index")

_FORMAT = b"tapereel index 9\n"
"""Name of the file's format. The file's code covers it, so a file in another format is ignored."""
_SCHEMA = """
create table if not exists segments (
    name text primary key, offset integer, last integer, n integer, first text, head text, frontier integer,
    sealed text, next text, pins text);
create table if not exists tapes (
    id text primary key, segment text, n integer, split text, task_hash text, task text, group_id text,
    attempt integer, agent text, env text, effect text, parent text, begun real, status text, cause text, ended real,
    reward real, calls integer, actions integer, sampled integer, cut integer, failed integer,
    parts text);
create table if not exists versions (version text, tape text, primary key (version, tape)) without rowid;
create table if not exists records (
    tape text, segment text, n integer, t text, offset integer, length integer,
    primary key (tape, segment, n)) without rowid;
create table if not exists unread (
    segment text, n integer, tape text, t text, why text, primary key (segment, n)) without rowid;
create table if not exists met (name text, head text, primary key (name, head)) without rowid;
create index if not exists tapes_by_status on tapes (status);
create index if not exists tapes_by_group on tapes (group_id);
create index if not exists tapes_by_task on tapes (task_hash);
"""
_BATCH = 20_000


class Segment(NamedTuple):
    """The part of one segment that is intact and indexed."""

    name: str
    offset: int
    """Size in bytes of the part that is indexed."""
    last: int
    """Byte offset of the last line that is indexed."""
    n: int
    """Number of lines that are indexed."""
    first: str
    """Hash of the segment's first line."""
    head: str
    frontier: int
    sealed: str | None
    """The reason in the segment's seal, or None if the segment has no seal."""
    next: str | None
    pins: str
    """The pins in the segment's `open` record, as JSON."""


class Place(NamedTuple):
    """The place of a record's line in its segment."""

    segment: str
    n: int
    t: str
    offset: int
    length: int


class Unread(NamedTuple):
    """A record whose hash is right but whose content can't be read. The summary of its tape lacks this record."""

    segment: str
    n: int
    tape: str
    t: str
    why: str

    def __str__(self) -> str:
        return f"record {self.n} of segment {self.segment} isn't a valid {self.t} of tape {self.tape}: {self.why}"


class Index:
    """The index of one folder. It is thread-safe."""

    def __init__(self, folder: Path, *, disk: Disk = REAL, path: Path | None = None) -> None:
        """`path` is the file that keeps the index for later processes. If it is None, the index isn't kept."""
        self.folder, self.disk = folder, disk
        self._path = path
        self._db = self._load()
        # Many callers never close a store. Since Python 3.13, garbage-collecting an open connection causes a warning.
        weakref.finalize(self, self._db.close)
        self._read_lines = 0
        """Number of lines that this process has read from the segments. The file at `path` lacks these lines."""
        self._tapes: dict[str, TapeFold] = {}
        """The sums of tapes with new records. `_flush` writes these sums to the database."""
        self._versions: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    def close(self, *, keep: bool = True) -> None:
        """Close the index. If `keep` is true and much of the index is new, it is written to its file first. A failed
        write raises no error, since the file is only a cache."""
        with self._lock:
            path, self._path = self._path, None
            if keep and path is not None and self._read_lines * 8 > sum(segment.n for segment in self.segments()):
                try:
                    data = self._db.serialize()
                    put_file(self.disk, path, data + _code(data))
                except (OSError, RuntimeError, sqlite3.Error) as error:
                    log.warning("%s can't be written (%s): the next process reads all records", path, error)
            self._db.close()

    def _load(self) -> sqlite3.Connection:
        """Return the database in the file, or an empty database if the file is missing or lacks this user's code."""
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            whole = b"" if self._path is None else read_file(self._path, self.disk)
            data, code = whole[:-_CODE], whole[-_CODE:]
            if data and hmac.compare_digest(code, _code(data)):
                # The database is copied, because a database that was read from bytes can't grow beyond 1 GiB.
                with contextlib.closing(sqlite3.connect(":memory:")) as kept:
                    kept.deserialize(data)
                    kept.backup(db)
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError, sqlite3.Error) as error:
            log.warning("%s can't be read (%s): the index is built again from the records", self._path, error)
        # Queries also sort in memory, because a query that needs a temporary file fails if it can't create one.
        db.executescript(f"pragma temp_store = memory; {_SCHEMA}")
        return db

    def refresh(self, *, skip: str | None = None) -> dict[str, Break]:
        """Read the lines that were added to the segments, except to the segment `skip`. Return a break for each
        segment with bytes after its last intact line. In a live segment, these bytes may be a line that is still being
        written."""
        with self._lock:
            # This is one transaction, because an error must not leave a segment's offset without its records.
            self._db.execute("begin")
            try:
                breaks = self._refresh(skip)
            except BaseException:
                self._tapes.clear()
                self._versions.clear()
                self._db.rollback()
                raise
            self._db.commit()
            return breaks

    def _refresh(self, skip: str | None) -> dict[str, Break]:
        known = {row.name: row for row in self.segments()}
        sizes = segment_sizes(self.folder, self.disk)
        # If a segment was cut by recovery, replaced from a copy or removed, no row can be trusted, so start over.
        if not all(name in sizes and self._still(row) for name, row in known.items()):
            for table in ("segments", "tapes", "versions", "records", "unread", "met"):
                self._db.execute(f"delete from {table}")
            known = {}
        breaks: dict[str, Break] = {}
        for name, size in sizes.items():
            found = self._read(name, size, known.get(name)) if name != skip else None
            if found is not None:
                breaks[found.segment] = found
        return breaks

    def _still(self, row: Segment) -> bool:
        """Return whether the last line that was indexed is still at its place in the segment.

        Comparing this one line is enough, because its hash depends on all lines before it.
        """
        try:
            with self.disk.open(self.folder / f"{row.name}.jsonl") as file:
                file.seek(row.last)
                return row.n == 0 or parse_line(file.read(row.offset - row.last)[:-1]).h.decode() == row.head
        except BadLine:
            return False

    def _read(self, name: str, size: int, row: Segment | None) -> Break | None:
        if row is not None and row.offset >= size:
            return None
        reader = SegmentReader(self.folder, name, end=size, disk=self.disk)
        chain, last = reader.chain, 0
        if row is not None:
            reader.offset, last = row.offset, row.last
            chain.n, chain.first, chain.head = row.n, row.first.encode(), row.head.encode()
            chain.frontier = row.frontier
            chain.sealed = {"reason": row.sealed, "next": row.next} if row.sealed is not None else None
        places: list[tuple[Any, ...]] = []
        for at, line, length in reader:
            last = at
            self._read_lines += 1
            places.append(self._note(name, line, at, length))
            if len(places) >= _BATCH:
                self._flush(places)
                places = []
        self._flush(places)
        if chain.n:
            sealed = chain.sealed or {}
            pins = read_pins(chain.opened) if chain.opened else (row.pins if row is not None else "{}")
            self._db.execute(
                "insert or replace into segments values (?,?,?,?,?,?,?,?,?,?)",
                (
                    name,
                    reader.offset,
                    last,
                    chain.n,
                    chain.first.decode(),
                    chain.head.decode(),
                    chain.frontier,
                    sealed.get("reason"),
                    sealed.get("next"),
                    pins,
                ),
            )
        return reader.broken()

    def _note(self, segment: str, line: Line, at: int, length: int) -> tuple[Any, ...]:
        t, tape = peek(line.body)
        if tape is not None and t in IN_TAPE:
            try:
                self._summarise(tape, t, line, segment)
            except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
                if t == "begin":
                    self._tapes[tape] = TapeFold(Summary(tape, segment, line.n))
                self._db.execute(
                    "insert or replace into unread values (?,?,?,?,?)",
                    (segment, line.n, tape, t, str(error).splitlines()[0][:300]),
                )
        return tape or "", segment, line.n, t, at, length

    def _summarise(self, tape: str, t: str, line: Line, segment: str) -> None:
        if t == "begin":
            self._tapes[tape] = TapeFold(_storable(read_begin(line.body, segment, line.n)))
            return
        fold = self._tapes.get(tape) or self._stored(tape)
        if fold is None:
            return  # the record belongs to a tape that never began, which `verify` reports
        self._tapes[tape] = fold
        if t == "step":
            fold.actions += is_action(line.body)
        elif (facts := read_facts(t, line.body)) is not None:
            fold.add(facts)
            if isinstance(facts, CallFacts):
                self._versions.update((str(version), tape) for version, _, _ in facts.spans)

    def _stored(self, tape: str) -> TapeFold | None:
        found = self._db.execute("select * from tapes where id = ?", (tape,)).fetchone()
        return TapeFold(Summary(*found[:-2]), bool(found[-2]), json.loads(found[-1])) if found else None

    def _flush(self, places: list[tuple[Any, ...]]) -> None:
        self._db.executemany("insert or replace into records values (?,?,?,?,?,?)", places)
        self._db.executemany("insert or ignore into versions values (?,?)", self._versions)
        marks = ",".join("?" * (len(Summary._fields) + 2))
        self._db.executemany(f"insert or replace into tapes values ({marks})", map(_row, self._tapes.values()))
        self._tapes.clear()
        self._versions.clear()

    # Queries

    def segments(self) -> list[Segment]:
        """Return the segments in the order of their creation."""
        return [Segment(*row) for row in self._ask("select * from segments order by name")]

    def tapes(
        self, where: str = "1", values: Iterable[object] = (), *, limit: int = -1, offset: int = 0
    ) -> list[Summary]:
        """Return at most `limit` summaries after skipping the first `offset`, in the order in which the tapes began."""
        return [
            Summary(*row[:-2])
            for row in self._ask(
                f"select tapes.* from tapes where {where} order by segment, n limit ? offset ?", *values, limit, offset
            )
        ]

    def among(self, tapes: Iterable[str]) -> list[Summary]:
        """Return summaries of the tapes with these ids in the order in which they began. Unknown ids are skipped."""
        return self.tapes("id in (select value from json_each(?))", [to_json(list(tapes)).decode()])

    def versions(self, tapes: Iterable[str]) -> dict[str, list[str]]:
        """Return the policy versions that sampled each of these tapes. A tape without versions is left out."""
        found: dict[str, list[str]] = {}
        for version, tape in self._ask(
            "select version, tape from versions where tape in (select value from json_each(?))",
            to_json(list(tapes)).decode(),
        ):
            found.setdefault(tape, []).append(version)
        return found

    def unread(self) -> list[Unread]:
        """Return the records that a summary needs but that can't be read."""
        return [Unread(*row) for row in self._ask("select * from unread order by segment, n")]

    def rewards(self) -> dict[str, float | None]:
        """Return the recorded reward of every tape. It is None if nothing was scored or a component failed."""
        return dict(self._ask("select id, reward from tapes"))

    def written(self, segment: str, since: int) -> set[tuple[str, str]]:
        """Return (tape, t) for a segment's records from line `since` on. Records without a tape have an empty id."""
        return {
            (tape, t)
            for tape, t in self._ask(
                "select distinct tape, t from records where segment = ? and n >= ?", segment, since
            )
        }

    def ids(self, prefix: str) -> list[str]:
        """Return at most 3 ids that start with `prefix`. This shows whether none, one or several match."""
        rows = self._ask(
            "select id from tapes where id >= ? and id < ? and substr(id, 1, ?) = ? order by id limit 3",
            prefix,
            prefix + chr(sys.maxunicode),
            len(prefix),
            prefix,
        )
        return [row[0] for row in rows]

    def places(self, tape: str, *, t: str | None = None, limit: int = -1, offset: int = 0) -> list[Place]:
        """Return the places of this tape's records in order. If `t` is given, return only records of this type. An
        empty `tape` stands for the records without a tape."""
        return [
            Place(*row)
            for row in self._ask(
                "select segment, n, t, offset, length from records where tape = ? and t = coalesce(?, t) "
                "order by segment, n limit ? offset ?",
                tape,
                t,
                limit,
                offset,
            )
        ]

    def bodies(self, places: Iterable[Place]) -> Iterator[bytes]:
        """Yield the bodies of the records at these places, in that order. Each line's hash is checked again, since the
        index is only a cache."""
        for name, group in groupby(places, lambda place: place.segment):
            with self.disk.open(self.folder / f"{name}.jsonl") as file:
                for place in group:
                    file.seek(place.offset)
                    yield parse_line(file.read(place.length)[:-1]).body

    def met(self) -> set[tuple[str, str]]:
        """Return the pins (segment, hash) that an earlier search found in their segments. Later searches skip them."""
        return {(name, head) for name, head in self._ask("select name, head from met")}

    def note_met(self, pins: Iterable[tuple[str, str]]) -> None:
        with self._lock:
            self._db.executemany("insert or ignore into met values (?, ?)", list(pins))

    def _ask(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def _storable(summary: Summary) -> Summary:
    """Return the summary unchanged. SQLite can hold None, text, floats and 64-bit integers. Raises a TypeError that
    names the first value of another kind."""
    for name, value in zip(Summary._fields, summary[:BEGUN], strict=False):
        if not (value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 63)):
            raise TypeError(f"its {name} is {value!r:.80}")
    return summary


def _row(fold: TapeFold) -> tuple[object, ...]:
    end = (fold.status, fold.cause, fold.ended)
    return (
        *fold.begun[:BEGUN],
        *end,
        fold.reward,
        fold.calls,
        fold.actions,
        fold.sampled,
        fold.cut,
        fold.failed,
        json.dumps(fold.parts),
    )


def read_pins(opened: Mapping[str, object]) -> str:
    """Return the pins in the body of an `open` record as JSON."""
    return to_json(opened.get("pins") or {}).decode()


_CODE = 32
"""Length of a code in bytes."""


def _code(data: bytes) -> bytes:
    """Return the code for an index with this content. Raises OSError or RuntimeError if the user has no folder for a
    secret."""
    return hmac.digest(_secret(), _FORMAT + data, "sha256")


def _secret() -> bytes:
    """Return 32 random bytes that only this user can read. They are created at the first use."""
    path = state_folder() / "index.key"
    with contextlib.suppress(FileNotFoundError):
        found = read_file(path)
        if len(found) == _CODE:
            return found
        raise OSError(f"{path} isn't a key of {_CODE} bytes: delete it, and a new one is made")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_CODE))
    try:
        with contextlib.suppress(FileExistsError):  # another process has just created it
            os.link(part, path)
    finally:
        part.unlink()
    return read_file(path)
