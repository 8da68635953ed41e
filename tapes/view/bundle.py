"""Writes the viewer as a folder of files that opens from a disk or from any static host, without a server.

Data are scripts that pass JSON as text, since a page opened from a disk may load scripts and nothing else. Shards of
data load when the page needs them; a long tape has its own files. Writing verifies the run, and the bundle says so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import to_json

from ..common.progress import Progress, silent
from ..errors import TapereelError, UsageError
from ..store.summary import Summary
from .overview import Overview, overview_of
from .run_view import PAGE, RunView
from .table import SHARD
from .view_files import BUNDLE_POLICY, WORKER, static_files

log = logging.getLogger("tapereel.view")

SHARD_BYTES = 512 * 1024
"""Size at which a shard of tapes is closed."""
LONG = 2_000
"""Items above which a tape gets its own files."""
CALLS = 50
"""Calls in one part."""
EXPLAINED = 200
"""Tapes above which a bundle leaves out what only the training code computes, and says so: it costs seconds a tape."""


def write_bundle(
    view: RunView, out: Path, *, tapes: Sequence[str] = (), last: int | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """Write the viewer with all tapes, with `tapes`, or with the newest `last`, to the new or empty folder `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: --out needs a new or an empty folder")
    overview = view.overview()
    rows = _chosen(view, tapes, last)
    progress("verifying", 0, len(rows), "")
    integrity = view.verify()
    if len(rows) < overview["tapes"]:
        left = overview["tapes"] - len(rows)
        integrity["holes"].append(
            f"{left:,} of the run's {overview['tapes']:,} tapes are not in this bundle; curves "
            "and groups show those that are"
        )
    integrity["not_checked"].append("this bundle itself: its files can be edited, and nothing here would show it")
    files = _Files(out)
    for name, (_, body) in static_files().items():
        files.write(name, _with_policy(body) if name == "index.html" else body)
    about = {**overview, "rev": None, "tapes": len(rows), "integrity": integrity, "made": time.time()}
    media = write_data(view, files, rows, about, overview_of(view.store), progress)
    for name in sorted(media):
        try:
            files.write(f"media/{name}", view.store.media.get(f"media:{name}"))
        except (TapereelError, OSError) as error:  # the page shows a hole, and `verify` names the file
            log.warning("%s", error)
    return {
        "index": str(out / "index.html"),
        "tapes": len(rows),
        "files": files.count,
        "bytes": files.bytes,
        "verdict": integrity["verdict"],
    }


def write_data(
    view: RunView,
    files: DataFiles,
    rows: Sequence[Summary],
    about: dict[str, Any],
    overview: Overview,
    progress: Progress = silent,
) -> set[str]:
    """Put every answer that the page may ask for about these tapes. Gives the names of the media that they refer to.

    about: `RunView.overview`, as it holds for these tapes.
    """
    files.put("run", {"run": about})
    files.put("report", {"report": overview.model_dump()})
    files.put("worker", {"worker": static_files()[WORKER][1].decode()})
    for k in range(0, len(rows), SHARD):
        part = rows[k : k + SHARD]
        files.put(f"table-{k // SHARD}", {"table": view.columns(part)})
    _write_curve(view, files, {row.id for row in rows})
    return _write_tapes(view, files, rows, progress)


class DataFiles(Protocol):
    """Takes the data of a page: `put(name of the file, key -> value)`."""

    def put(self, name: str, values: dict[str, Any]) -> None:
        """Keep these values under this name."""
        ...


def json_texts(values: dict[str, Any]) -> dict[str, str]:
    """Each value as JSON text. NaN and infinity become strings, since JSON has neither."""
    return {key: to_json(value, inf_nan_mode="strings").decode() for key, value in values.items()}


class _Files:
    """Files below the folder `out`."""

    def __init__(self, out: Path) -> None:
        self.out, self.count, self.bytes = out, 0, 0

    def write(self, name: str, body: bytes) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        self.count += 1
        self.bytes += len(body)

    def put(self, name: str, values: dict[str, Any]) -> None:
        """A script that hands over these values, each as JSON in a string, so that it is read and never run."""
        self.write(f"data/{name}.js", b"T.take(" + json.dumps(json_texts(values)).encode() + b");\n")


def _with_policy(page: bytes) -> bytes:
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{BUNDLE_POLICY}">'
    return page.replace(b'<html lang="en">', b'<html lang="en" data-bundle>').replace(
        b'<meta charset="utf-8">', meta.encode()
    )


def _chosen(view: RunView, tapes: Sequence[str], last: int | None) -> list[Summary]:
    if last is not None and last < 1:
        raise UsageError(f"--last is {last}; it must be 1 or more")
    index = view.store.index
    if tapes:
        return index.among([view.store.tape(tape, refresh=False).id for tape in tapes])
    rows = index.tapes()
    return rows[-last:] if last is not None else rows


def _write_curve(view: RunView, files: DataFiles, here: set[str]) -> None:
    points = view.curve()["points"]
    files.put("curve", {"curve": {"points": points}})
    for first in range(0, len(points), 50):
        part = range(first, min(first + 50, len(points)))
        behind = {k: [tape for tape in view.behind(k)["tapes"] if tape in here] for k in part}
        files.put(f"behind-{first // 50}", {f"behind/{k}": {"tapes": tapes} for k, tapes in behind.items()})


def _write_tapes(view: RunView, files: DataFiles, rows: Sequence[Summary], progress: Progress) -> set[str]:
    """Gives the names of the media that the tapes refer to."""
    where: dict[str, str] = {}
    shard: dict[str, Any] = {}
    size, number, long = 0, 0, 0
    media: set[str] = set()
    for k, row in enumerate(rows):
        parts = dict(_parts(view, row.id, explained=len(rows) <= EXPLAINED, media=media))
        if parts["head"]["items"] > LONG:
            where[row.id], long = f"long-{long}/", long + 1
            for part, value in parts.items():
                files.put(f"{where[row.id]}{part}", {f"{row.id}/{part}": value})
        else:
            where[row.id] = f"tapes-{number}"
            shard.update({f"{row.id}/{part}": value for part, value in parts.items()})
            size += sum(len(to_json(value)) for value in parts.values())
        if shard and (size >= SHARD_BYTES or k == len(rows) - 1):
            files.put(f"tapes-{number}", shard)
            shard, size, number = {}, 0, number + 1
        progress("writing tapes", k + 1, len(rows), "")
    if shard:
        files.put(f"tapes-{number}", shard)
    files.put("shards", {"shards": where})
    return media


def _parts(view: RunView, tape: str, *, explained: bool, media: set[str]) -> Iterator[tuple[str, Any]]:
    """(name, answer) for every question about one tape."""
    head = view.head(tape)
    calls = [call for call, record in view.map(tape).calls.items()]
    pages = [calls[k : k + CALLS] for k in range(0, len(calls), CALLS)]
    yield "head", {**head, "call_pages": pages}
    for page in range(-(-head["items"] // PAGE)):
        found = view.items(tape, page)
        media.update(name for item in found["items"] for name in item.get("media", ()))
        yield f"items-{page}", found
    for page in range(max(1, -(-head["turns"] // PAGE))):
        yield f"turns-{page}", view.turns(tape, page)
    reason = f"left out of bundles of more than {EXPLAINED} tapes; `tapereel view` on the run shows it"
    yield "explain", view.explain(tape) if explained else {"missing": reason}
    for page, names in enumerate(pages):
        yield f"calls-{page}", {call: view.call(tape, call) for call in names}
