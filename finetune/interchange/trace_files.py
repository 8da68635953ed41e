"""Reads records from files and writes them to files. Input files are not trusted.

The sizes of a line, a file and an unpacked archive are bounded; an error names the line and the limit. Archives are
read in place and never unpacked to disk. A member that is a link, is encrypted, or whose name leaves the archive's
folder is refused. The JSON parser runs no code and bounds the depth. The formats' modules interpret the records.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from pydantic_core import from_json, to_json

from ...tapes.errors import MissingExtra, TapereelError, UsageError

MEMBERS = 1000
"""Largest number of members of an archive."""
PARQUET_ROWS = 16
"""Rows that are decoded at once. Their size is known only after decoding, so the number bounds the memory."""


class BadImport(UsageError):
    """An invalid file, or one above the limits; the message names the place and the cause."""


class NothingToExport(TapereelError, ValueError):
    """No tape has a record in the format, so no file was written; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on the unpacked size of an import."""

    line: int = 64 * 2**20
    """Most bytes of one record."""
    total: int = 16 * 2**30
    """Most bytes of all records."""


def records(path: Path, bounds: Bounds) -> Iterator[tuple[str, dict[str, object]]]:
    """(place for error messages, record) of a .jsonl or .parquet file, a .gz or .zip of .jsonl files, or
    `results.jsonl` in a folder. BadImport for an invalid file, UsageError for a missing one."""
    if path.is_dir():
        path = path / "results.jsonl"
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if path.suffix == ".parquet":
        yield from _parquet(path, bounds)
    elif path.suffix == ".zip":
        yield from _zip(path, bounds)
    elif path.suffix in (".jsonl", ".json", ".gz"):
        with _unpacking(str(path)), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from _lines(cast(IO[bytes], file), str(path), bounds, [0])
    else:
        raise UsageError(f"{path}: records are read from .jsonl, .jsonl.gz, .zip or .parquet files")


def check_new(path: Path, endings: Sequence[str], format: str) -> None:
    """UsageError if `path` exists, or has an ending that the format doesn't accept. The ending '' is a folder."""
    if path.exists():
        raise UsageError(f"{path} exists already; name another file, or remove it first")
    if path.suffix not in endings:
        named = " or ".join(ending or "a folder" for ending in endings)
        raise UsageError(f"{path}: the format {format} is written to {named}")


@contextmanager
def completed(path: Path) -> Iterator[Path]:
    """`NAME.partial`, a place to write to, which is renamed to `path` at the end of the block.

    No partial file has the final name, even after a crash.
    """
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    yield partial
    partial.rename(path)


def write_records(made: Iterable[Mapping[str, object]], path: Path) -> int:
    """Write records to a new .jsonl or .parquet file; return their number. Without a record, write no file."""
    records = iter(made)
    first = next(records, None)
    if first is None:
        return 0
    with completed(path) as partial:
        if path.suffix == ".parquet":
            return _write_parquet([first, *records], partial)
        n = 0
        with partial.open("wb") as file:
            for record in itertools.chain([first], records):
                file.write(to_json(record, inf_nan_mode="null") + b"\n")
                n += 1
    return n


def nothing(path: Path, tapes: int, left_out: Mapping[str, int]) -> NothingToExport:
    """The error for the case that none of the tapes has a record. left_out: reason -> number of tapes."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in left_out.items() if n)
    why = f"of {tapes:,} tapes all are left out: {reasons}" if tapes else "no closed tape fits"
    return NothingToExport(f"nothing to export, and {path} was not written: {why}")


def _lines(file: IO[bytes], name: str, bounds: Bounds, read: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    # Read one byte more than the limit: a longer line is then detected before all of it is in memory.
    while line := file.readline(bounds.line + 1):
        number += 1
        place = f"{name}, line {number}"
        read[0] += len(line)
        if len(line) > bounds.line:
            raise BadImport(
                f"{place} is longer than {bounds.line:,} bytes; is it one record per line? --max-line allows more"
            )
        if read[0] > bounds.total:
            raise BadImport(f"{place}: more than {bounds.total:,} bytes, unpacked; --max-total allows more")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = from_json(line)
        except ValueError as error:
            raise BadImport(f"{place} is no JSON: {error}") from None
        if not isinstance(record, dict):
            raise BadImport(f"{place} is a {type(record).__name__}, and a record is an object")
        yield place, record


def _zip(path: Path, bounds: Bounds) -> Iterator[tuple[str, dict[str, Any]]]:
    read = [0]
    with _unpacking(str(path)), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MEMBERS:
            raise BadImport(f"{path} has {len(members):,} members, at most {MEMBERS:,} are read")
        for member in members:
            _check_member(path, member)
        wanted = [m for m in members if m.filename.endswith(".jsonl")]
        if not wanted:
            raise BadImport(f"{path} holds no .jsonl file")
        for member in wanted:
            with archive.open(member) as file:
                yield from _lines(file, f"{path}: {member.filename}", bounds, read)


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    name = PurePosixPath(member.filename)
    odd = name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename
    if odd or stat.S_ISLNK(member.external_attr >> 16):
        raise BadImport(f"{path}: the member {member.filename!r} leaves the archive's folder, or is a link")
    if member.flag_bits & 1:
        raise BadImport(f"{path}: the member {member.filename!r} is encrypted")


@contextmanager
def _unpacking(name: str) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise BadImport(f"{name} can't be unpacked: {error}") from error


def _parquet(path: Path, bounds: Bounds) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "train", f"reading {path.name}") from error
    read, number = 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            shared = [field.name for field in file.schema_arrow if _has_dictionary(field.type)]
            if shared:
                raise BadImport(
                    f"{path}: the column {shared[0]!r} is of a dictionary type, where a few bytes stand "
                    "for long values; write it as plain ones"
                )
            # The footer states sizes that a hostile file may falsify, so `read` below also counts decoded bytes.
            size = sum(file.metadata.row_group(k).total_byte_size for k in range(file.metadata.num_row_groups))
            if size > bounds.total:
                raise BadImport(
                    f"{path} unpacks to {size:,} bytes, the limit is {bounds.total:,}; --max-total allows more"
                )
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                read += batch.nbytes
                if batch.nbytes > bounds.line * PARQUET_ROWS or read > bounds.total:
                    raise BadImport(
                        f"{path}: the rows from {number} on are more than the limits allow "
                        f"({batch.nbytes:,} bytes in {batch.num_rows} rows)"
                    )
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _without_none(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadImport(f"{path} can't be read as Parquet: {error}") from error


def _has_dictionary(kind: Any) -> bool:
    import pyarrow

    inside = (kind.field(k).type for k in range(kind.num_fields))
    return pyarrow.types.is_dictionary(kind) or any(_has_dictionary(one) for one in inside)


def _without_none(value: Any) -> Any:
    """The value without None fields: Parquet adds a field to every object of a column if one object has it."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _write_parquet(made: list[Mapping[str, object]], path: Path) -> int:
    try:
        from datasets import Dataset, Image, List, disable_progress_bars
    except ImportError as error:
        raise MissingExtra("datasets", "train", "writing Parquet") from error
    disable_progress_bars()
    try:
        found = Dataset.from_list([dict(record) for record in made])
        (found.cast_column("images", List(Image())) if "images" in made[0] else found).to_parquet(str(path))
    except ValueError as error:  # ArrowInvalid, as for contents that are text in one message and parts in another
        raise UsageError(
            f"{path.name}: a column of Parquet has one type, and messages with pictures have parts where others have "
            f"text ({error}): write it with images=True"
        ) from error
    return len(made)
