"""The formats of rows by name. `write` exports tapes to a file, and `read` imports a file as tapes.

`read` parses the whole file and checks every record before it writes the first tape. So an invalid record leaves the
run unchanged.
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
from . import sets
from .imported import Conversation, imported, write_tape
from .record_files import BadImport, check_new, nothing, records, write_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of rows."""

    name: str
    what: str
    loses: tuple[str, ...]
    """The parts of a tape that the format can't contain. Each is described by one text."""
    write: Callable[[Iterable[Tape]], Iterator[Mapping[str, object] | str]]
    """Converts tapes to records. If a tape has no record, it yields the reason as a string."""
    read: Callable[[Mapping[str, object], str], list[Conversation]]
    """Converts a record to conversations, given the stem of the file's name. Raises ValueError for a wrong record."""


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
    )
}


class Exchange(Value):
    """The result of an export or an import."""

    path: str
    """The file that was written, or the run into which a file was read."""
    format: str
    records: int
    tapes: int
    """Number of tapes that were exported or written."""
    there: int = 0
    """Number of conversations that an import left out, because the run already has a tape with the same content."""
    left_out: dict[str, int] = Field(default={})
    """Reason why tapes have no record -> number of tapes."""
    loses: tuple[str, ...] = ()
    """The parts of a tape that the format can't contain."""


def _format_of(name: str) -> Format:
    """Return the format with this name. Raises UsageError for an unknown name."""
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def write(tapes: Iterable[Tape], path: str | Path, format: str, *, images: bool = False) -> Exchange:
    """Write closed `tapes` to `path`. With `images`, the rows also have the tapes' pictures, in a column `images`. The
    pictures are `datasets.Image` in Parquet and data URLs in JSONL.

    Raises UsageError if `path` exists or has an ending that the format doesn't accept, and NothingToExport if no tape
    has a record. Then no file is written.
    """
    chosen, path = _format_of(format), Path(path)
    check_new(path, ENDINGS, format)
    left_out: dict[str, int] = {}
    seen, files = 0, dict[str, bytes]()

    def counted() -> Iterator[Tape]:
        nonlocal seen
        for tape in tapes:
            seen += 1
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

    n = write_records(kept(), path)
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
    """Read a file into the run directory `run`, which may exist.

    Raises BadImport if a record doesn't have the format. Then nothing is written. A conversation whose tape the run
    already has is left out, so reading a file again only adds new ones. `split` overrides the file's split.
    """
    chosen, path = _format_of(format), Path(path)
    # The first pass only checks. Otherwise an invalid record could be found after some tapes were written.
    checked = sum(len(made) for made in _conversations(chosen, path))
    if not checked:
        raise BadImport(f"{path} holds no record")
    run = Path(run)
    count = tapes = there = 0
    with Store.open(run, write=True) if (run / "tapes").is_dir() else Store.create(run) as store:
        known = imported(store)
        for made in _conversations(chosen, path):
            count += 1
            for one in made if split is None else (replace(one, split=split) for one in made):
                key = (one.content, one.status.value)
                # The tapes are counted, because a file may have the same row several times, and each becomes a tape.
                if known[key]:
                    known[key] -= 1
                    there += 1
                else:
                    write_tape(one, store.writer, format)
                    tapes += 1
        store.writer.sync()
    return Exchange(path=str(run), format=format, records=count, tapes=tapes, there=there)


def _conversations(chosen: Format, path: Path) -> Iterator[list[Conversation]]:
    for place, record in records(path):
        try:
            made = chosen.read(record, path.stem)
            for one in made:
                write_tape(one, None, chosen.name)  # writes nothing, but raises if it can't become a tape
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "record"
            raise BadImport(f"{place} is no {chosen.name} record: {where}: {first['msg']}") from None
        except (ValueError, OverflowError) as error:
            raise BadImport(f"{place} is no {chosen.name} record: {error}") from None
        yield made
