"""The formats for exchanging conversations. `write` exports tapes to a file, and `read` imports a file as tapes.

`read` checks every record in the file before it writes the first tape, so an invalid record leaves the run unchanged.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, ValidationError

from ...tapes import Tape
from ...tapes.errors import UsageError
from ...tapes.messages import image_parts
from ...tapes.store.store import Store
from ...tapes.value import Value
from . import atif, sets
from .imported import Conversation, imported, write_tape
from .record_files import BadImport, check_new, nothing, records, write_folders, write_records

Reader = Callable[[Mapping[str, object], str], list[Conversation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format for records in a file."""

    name: str
    what: str
    loses: tuple[str, ...]
    """Descriptions of the parts of a tape that the format can't contain."""
    write: Callable[[Iterable[Tape]], Iterator[Mapping[str, object] | str]]
    """Function that converts tapes to records. For a tape that can't be converted, it yields the reason as a string
    instead."""
    read: Reader | None = None
    """Function that converts a record to conversations. Its second argument is the stem of the file's name. It raises
    ValueError for an invalid record. None if the format can't be imported."""
    files: Callable[[Mapping[str, object], Callable[[str], bytes]], tuple[str, dict[str, bytes]]] | None = None
    """Function that returns the name of a record's folder, and its files by name. Its second argument returns the bytes
    of a picture, given the name of the picture's file. None if all records are in one file."""


ENDINGS = (".jsonl", ".parquet")
FORMATS = {
    made.name: made
    for made in (
        Format(
            name="sft",
            what="conversations to imitate",
            loses=sets.SFT_LOSES,
            write=sets.write_sft,
            read=sets.read_sft,
        ),
        Format(
            name="preference",
            what="the best and the worst attempt of each group",
            loses=sets.PREFERENCE_LOSES,
            write=sets.write_preference,
            read=sets.read_preference,
        ),
        Format(
            name="atif",
            what="a folder of trajectories for Harbor's tools (export only)",
            loses=atif.LOSES,
            write=atif.write_atif,
            files=atif.atif_files,
        ),
    )
}
IMPORTS = tuple(name for name, made in FORMATS.items() if made.read is not None)
"""The formats that can be imported."""


class Exchange(Value):
    """The result of an export or an import."""

    path: str
    """The file that was written, or the run that a file was imported into."""
    format: str
    records: int
    tapes: int
    """Number of tapes that were exported or imported."""
    there: int = 0
    """Number of conversations that were not imported, because the run already has a tape with the same content."""
    left_out: dict[str, int] = Field(default={})
    """Number of tapes that were left out, by reason."""
    loses: tuple[str, ...] = ()
    """The parts of a tape that the format can't contain."""


def _format_of(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def write(tapes: Iterable[Tape], path: str | Path, format: str, *, images: bool = False) -> Exchange:
    """Write closed `tapes` to the file `path`, as records of `format`.

    If `images` is true, the records have the tapes' pictures too, in a column `images`: as `datasets.Image` in Parquet,
    and as data URLs in JSONL. For `atif`, `path` is a folder, and each tape has a folder in it. Its pictures are always
    files in this folder.

    Raises UsageError if `path` exists or has an ending that the format doesn't accept, and NothingToExport if no tape
    has a record. In both cases no file is written.
    """
    chosen, path = _format_of(format), Path(path)
    check_new(path, ENDINGS if chosen.files is None else ("",), format)
    images = images and chosen.files is None
    left_out: dict[str, int] = {}
    seen, files, newest = 0, dict[str, bytes](), list[Tape]()

    def counted() -> Iterator[Tape]:
        nonlocal seen
        for tape in tapes:
            seen += 1
            newest[:] = [tape]
            shown = image_parts([m for turn in sets.turns_of(tape) for m in turn.messages]) if images else ()
            files.update({name: tape.picture(name) for name in {str(p["media"]) for p in shown} - files.keys()})
            yield tape

    def image(name: str) -> object:
        if path.suffix == ".parquet":
            return {"bytes": files[name], "path": name}
        return f"data:image/png;base64,{base64.b64encode(files[name]).decode()}"

    def kept() -> Iterator[Mapping[str, object]]:
        for record in chosen.write(counted()):
            record = record if isinstance(record, str) or not images else sets.with_images(record, image)
            if isinstance(record, str):
                left_out[record] = left_out.get(record, 0) + 1
            else:
                yield record

    if chosen.files is None:
        n = write_records(kept(), path)
    else:
        of_record = chosen.files
        n = write_folders((of_record(record, newest[0].picture) for record in kept()), path)
    if not n:
        raise nothing(path, seen, left_out)
    return Exchange(
        path=str(path),
        format=format,
        records=n,
        tapes=seen - sum(left_out.values()),
        left_out=left_out,
        loses=chosen.loses,
    )


def read(path: str | Path, run: str | Path, format: str, *, split: str | None = None) -> Exchange:
    """Import the file `path` into the run directory `run`, which may already exist.

    Each conversation becomes a tape. A conversation is left out if the run already has its tape, so importing a file
    again adds only new conversations. `split` replaces the split in the file. If a record doesn't have the format,
    BadImport is raised and nothing is written.
    """
    chosen, path = _format_of(format), Path(path)
    if chosen.read is None:
        raise UsageError(f"the format {format} can only be exported; import one of {', '.join(IMPORTS)}")
    # The first pass only checks the records, so that no tape is written if a later record is invalid.
    checked = sum(len(made) for made in _conversations(format, chosen.read, path))
    if not checked:
        raise BadImport(f"{path} holds no record")
    run = Path(run)
    count = tapes = there = 0
    with Store.open(run, write=True) if (run / "tapes").is_dir() else Store.create(run) as store:
        known = imported(store)
        for made in _conversations(format, chosen.read, path):
            count += 1
            for one in made if split is None else (replace(one, split=split) for one in made):
                key = (one.content, one.status.value)
                # A file may repeat a record, and each repetition becomes a tape. So the tapes that are there are
                # counted.
                if known[key]:
                    known[key] -= 1
                    there += 1
                else:
                    write_tape(one, store.writer, format)
                    tapes += 1
        store.writer.sync()
    return Exchange(path=str(run), format=format, records=count, tapes=tapes, there=there)


def _conversations(format: str, of_record: Reader, path: Path) -> Iterator[list[Conversation]]:
    for place, record in records(path):
        try:
            made = of_record(record, path.stem)
            for one in made:
                write_tape(one, None, format)  # writes nothing, but raises an error if `one` can't become a tape
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "record"
            raise BadImport(f"{place} is no {format} record: {where}: {first['msg']}") from None
        except (ValueError, OverflowError) as error:
            raise BadImport(f"{place} is no {format} record: {error}") from None
        yield made
