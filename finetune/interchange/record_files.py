"""Reads records from JSONL and Parquet files, and writes records to new files. Reading a file runs no code."""

from __future__ import annotations

import codecs
import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic_core import from_json, to_json

from ...tapes.errors import MissingExtra, TapereelError, UsageError

PARQUET_ROWS = 100
"""Number of rows that are decoded from a Parquet file at once."""


class BadImport(UsageError):
    """Raised if a file to import is invalid. The message names the place and the cause."""


class NothingToExport(TapereelError, ValueError):
    """Raised if no tape can be converted to a record, so that no file is written. The message gives the reasons."""


def records(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (place, record) for each record in a .jsonl or .parquet file. The place is for error messages. Raises
    BadImport if the file is invalid, and UsageError if it doesn't exist or has another ending."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: rows are read from .jsonl or .parquet files")
    for place, record in _parquet(path) if path.suffix == ".parquet" else _lines(path):
        if not isinstance(record, dict):
            raise BadImport(f"{place} is a {type(record).__name__}, and a record is an object")
        yield place, record


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", from_json(line)
            except ValueError as error:
                raise BadImport(f"{path}, line {number} isn't valid JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "train", f"reading {path.name}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _without_none(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadImport(f"{path} can't be read as Parquet: {error}") from error


def _without_none(value: object) -> object:
    """Return the value without None fields. In a Parquet column, a field that only one object needs is None in all
    others."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def check_new(path: Path, endings: Sequence[str], format: str) -> None:
    """Raise UsageError if `path` exists or has none of these endings. The ending '' stands for a folder."""
    if path.exists():
        raise UsageError(f"{path} exists already; name another file, or remove it first")
    if path.suffix not in endings:
        named = " or ".join(ending or "a folder" for ending in endings)
        raise UsageError(f"{path}: the format {format} is written to {named}")


@contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Return a context that gives a temporary path (`NAME.partial`) to write to. At the end, the file is renamed to
    `path`.

    So an incomplete file never has the final name, even after a crash.
    """
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    yield partial
    partial.rename(path)


def write_records(made: Iterable[Mapping[str, object]], path: Path) -> int:
    """Write records to a new .jsonl or .parquet file, and return their number. Without records, no file is written."""
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


def write_folders(made: Iterable[tuple[str, Mapping[str, bytes]]], path: Path) -> int:
    """Write a folder with a folder for each (name, files), and return their number. Without any, nothing is
    written. Raises UsageError if a name comes twice."""
    folders = iter(made)
    first = next(folders, None)
    if first is None:
        return 0
    n = 0
    with completed(path) as partial:
        shutil.rmtree(partial, ignore_errors=True)  # an earlier export that was killed may have left it
        for name, files in itertools.chain([first], folders):
            n += 1
            if (partial / name).exists():
                raise UsageError(f"two tapes have the name {name!r}, and a folder has one of them: leave one out")
            for file, data in files.items():
                (partial / name / file).parent.mkdir(parents=True, exist_ok=True)
                (partial / name / file).write_bytes(data)
    return n


def _write_parquet(made: list[Mapping[str, object]], path: Path) -> int:
    try:
        from datasets import Dataset, Image, List, disable_progress_bars
    except ImportError as error:
        raise MissingExtra("datasets", "train", "writing Parquet") from error
    disable_progress_bars()
    try:
        found = Dataset.from_list([dict(record) for record in made])
        (found.cast_column("images", List(Image())) if "images" in made[0] else found).to_parquet(str(path))
    except ValueError as error:  # ArrowInvalid, for example if a content is text in one message and parts in another
        raise UsageError(
            f"{path.name}: a column of Parquet has one type, and messages with pictures have parts where others have "
            f"text ({error}): write it with images=True"
        ) from error
    return len(made)


def nothing(path: Path | None, tapes: int, left_out: Mapping[str, int], where: str = "") -> NothingToExport:
    """Return the error to raise if no tape has a record. `left_out` has the number of tapes that were left out, by
    reason. `where` are the conditions that no tape meets. `path` is the file that was to be written, if any."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in left_out.items() if n)
    none = f"no closed tape has {where}" if where else "no closed tape fits"
    why = f"of {tapes:,} tapes all are left out: {reasons}" if tapes else none
    lost = "" if path is None else f", and {path} was not written"
    return NothingToExport(f"nothing to export{lost}: {why}")
