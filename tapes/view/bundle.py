"""Writes the viewer without a server: as a folder of files for a disk or a static host, or as one file, `report.html`.

The page is plain HTML, JavaScript and CSS without a build step, and loads nothing from another host.

In a folder, data are scripts that pass JSON as text, since a page opened from a disk may load scripts and nothing else.
Shards of data load when the page needs them; a long tape has its own files. Writing verifies the run, and the bundle
says so.

`report.html` opens at the overview page. It holds the overview and the tapes that the overview proposes to read. Its
policy allows only its own script and style, each named by its hash. Everything that a model, a task or a file name
wrote is JSON in a block that no browser runs, and the scripts show it as text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from ..common.progress import Progress, silent
from ..common.text import logger
from ..errors import TapereelError, UsageError
from ..store.disk import REAL, put_file
from ..store.store import Store
from ..store.summary import Summary
from .items import SHARD
from .overview import Overview, overview_of
from .run_view import PAGE, RunFacts, RunView

log = logger("view")

SCRIPTS = (
    "dom.js",
    "source.js",
    "rows.js",
    "list.js",
    "search.js",
    "table.js",
    "curve.js",
    "overview.js",
    "group.js",
    "tokens.js",
    "inspector.js",
    "tape.js",
    "app.js",
)
"""In the order in which the page loads them."""
WORKER = "worker.js"
"""Runs search patterns in a worker, so that the page can stop a pattern that never ends."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types tapereel"
)
"""Content-Security-Policy of the server."""
BUNDLE_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file:; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types tapereel"
)
"""The same for a bundle. Files opened from a disk have no origin, so `file:` is named and the worker is a blob."""

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
"""Media shown as images, by suffix. All others are downloads: an SVG, for example, can hold a script."""

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

SHARD_BYTES = 512 * 1024
"""Size at which a shard of tapes is closed."""
LONG = 2_000
"""Items above which a tape gets its own files."""
CALLS = 50
"""Calls in one part."""
NOT_EXPLAINED = "left out of a report; `tapereel explain` and `tapereel view` show it"
EXPLAINED = 200
"""Tapes above which a bundle leaves out what only the training code computes, and says so: it costs seconds a tape."""


Put = Callable[[str, dict[str, object]], object]
"""Keeps values: (name of a file, key -> value)."""


def static_files() -> dict[str, tuple[str, bytes]]:
    """Name -> (content type, bytes) of every file of the page."""
    names = ("index.html", "style.css", "icon.svg", *SCRIPTS, WORKER)
    folder = files(__name__.rpartition(".")[0]) / "static"
    return {name: (_KINDS[name[name.rindex(".") :]], (folder / name).read_bytes()) for name in names}


def write_bundle(
    view: RunView, out: Path, *, tapes: Sequence[str] = (), last: int | None = None, progress: Progress = silent
) -> dict[str, object]:
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
    out_files = _Files(out)
    for name, (_, body) in static_files().items():
        out_files.write(name, _with_policy(body) if name == "index.html" else body)
    about: RunFacts = {**overview, "rev": None, "tapes": len(rows), "integrity": integrity, "made": time.time()}
    media = write_data(view, out_files.put, rows, about, overview_of(view.store), progress)
    for name in sorted(media):
        try:
            out_files.write(f"media/{name}", view.store.media.get(f"media:{name}"))
        except (TapereelError, OSError) as error:  # the page shows a hole, and `verify` names the file
            log.warning("%s", error)
    return {
        "index": str(out / "index.html"),
        "tapes": len(rows),
        "files": out_files.count,
        "bytes": out_files.bytes,
        "verdict": integrity["verdict"],
    }


def write_data(
    view: RunView,
    put: Put,
    rows: Sequence[Summary],
    about: RunFacts,
    overview: Overview,
    progress: Progress = silent,
) -> set[str]:
    """Put every answer that the page may ask for about these tapes. Gives the names of the media that they refer to.

    about: `RunView.overview`, as it holds for these tapes.
    """
    put("run", {"run": about})
    put("report", {"report": overview.model_dump()})
    put("worker", {"worker": static_files()[WORKER][1].decode()})
    for k in range(0, len(rows), SHARD):
        part = rows[k : k + SHARD]
        put(f"table-{k // SHARD}", {"table": view.columns(part)})
    _write_curve(view, put, {row.id for row in rows})
    return _write_tapes(view, put, rows, progress)


def json_texts(values: dict[str, object]) -> dict[str, str]:
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

    def put(self, name: str, values: dict[str, object]) -> None:
        """A script that hands over these values, each as JSON in a string, so that it is read and never run."""
        self.write(f"data/{name}.js", b"T.take(" + json.dumps(json_texts(values)).encode() + b");\n")


def write_report(
    path: str | PathLike[str], run: str | Path, overview: Overview, decode: Callable[[int], str] | None = None
) -> None:
    """Write the page with the tapes that the overview names, replacing an earlier page at once.

    decode: gives the text of a token id; None shows the ids.
    """
    with RunView(run, insight=lambda store: _Decoder(store, decode)) as view:
        data: dict[str, dict[str, str]] = {}
        about = view.overview()  # reads the records that the index lacks
        rows = view.store.index.among([one.tape for one in overview.tapes])
        integrity = about["integrity"]
        integrity["not_checked"].append("this file itself: it can be edited, and nothing here would show it")
        if len(rows) < about["tapes"]:
            integrity["holes"].append(f"{about['tapes'] - len(rows):,} of the run's tapes are not in this file")
        about["rev"], about["tapes"], about["made"] = None, len(rows), time.time()
        media = write_data(view, lambda name, values: data.update({name: json_texts(values)}), rows, about, overview)
        if media:
            integrity["holes"].append(f"{len(media)} media files are not in this file")
            data["run"] = json_texts({"run": about})
    put_file(REAL, Path(path), one_file(data).encode())


def one_file(data: dict[str, dict[str, str]]) -> str:
    """The viewer with these data in one page."""
    static = {name: body.decode() for name, (_, body) in static_files().items()}
    style = static["style.css"]
    script = "\n".join(static[name] for name in SCRIPTS)
    # `<` is escaped, so no text of the data can end the block or begin a comment.
    block = json.dumps(data).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; worker-src blob:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types tapereel"
    )
    charset = '<meta charset="utf-8">'
    head, body = static["index.html"].split("</head>")
    head = head[: head.index('<link rel="icon"')].replace('<html lang="en">', '<html lang="en" data-report>')
    head = head.replace(charset, f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">')
    body = body.replace("</body>", "")
    return (
        f"{head}<style>{style}</style>\n</head>{body[: body.index('</html>')]}"
        f'<script type="application/json" id="data">{block}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class _Decoder:
    """Decodes tokens, and explains nothing: a report is written each minute, and an explanation reads the ledger."""

    def __init__(self, store: Store, decode: Callable[[int], str] | None) -> None:
        self.decode = decode

    def explain(self, tape: str) -> dict[str, object]:
        """Names the verbs that explain."""
        return {"missing": NOT_EXPLAINED}

    def forget(self) -> None:
        """Nothing is kept."""


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


def _write_curve(view: RunView, put: Put, here: set[str]) -> None:
    points = view.curve()["points"]
    put("curve", {"curve": {"points": points}})
    for first in range(0, len(points), 50):
        part = range(first, min(first + 50, len(points)))
        behind = {k: [tape for tape in view.behind(k)["tapes"] if tape in here] for k in part}
        put(f"behind-{first // 50}", {f"behind/{k}": {"tapes": tapes} for k, tapes in behind.items()})


def _write_tapes(view: RunView, put: Put, rows: Sequence[Summary], progress: Progress) -> set[str]:
    """Gives the names of the media that the tapes refer to."""
    where: dict[str, str] = {}
    shard: dict[str, object] = {}
    size, number, long = 0, 0, 0
    media: set[str] = set()
    for k, row in enumerate(rows):
        parts = dict(_parts(view, row, explained=len(rows) <= EXPLAINED))
        media |= view.media(row.id)
        if len(view.map(row.id).items) > LONG:
            where[row.id], long = f"long-{long}/", long + 1
            for part, value in parts.items():
                put(f"{where[row.id]}{part}", {f"{row.id}/{part}": value})
        else:
            where[row.id] = f"tapes-{number}"
            shard.update({f"{row.id}/{part}": value for part, value in parts.items()})
            size += sum(len(to_json(value)) for value in parts.values())
        if shard and (size >= SHARD_BYTES or k == len(rows) - 1):
            put(f"tapes-{number}", shard)
            shard, size, number = {}, 0, number + 1
        progress("writing tapes", k + 1, len(rows), "")
    if shard:
        put(f"tapes-{number}", shard)
    put("shards", {"shards": where})
    return media


def _parts(view: RunView, row: Summary, *, explained: bool) -> Iterator[tuple[str, Any]]:
    """(name, answer) for every question about one tape."""
    tape = row.id
    tape_map = view.map(tape)
    calls = [call for call, record in tape_map.calls.items()]
    pages = [calls[k : k + CALLS] for k in range(0, len(calls), CALLS)]
    yield "head", {**view.head(tape), "call_pages": pages}
    for page in range(-(-len(tape_map.items) // PAGE)):
        yield f"items-{page}", view.items(tape, page)
    for page in range(max(1, -(-row.actions // PAGE))):
        yield f"turns-{page}", view.turns(tape, page)
    reason = f"left out of bundles of more than {EXPLAINED} tapes; `tapereel view` on the run shows it"
    yield "explain", view.explain(tape) if explained else {"missing": reason}
    for page, names in enumerate(pages):
        yield f"calls-{page}", {call: view.call(tape, call) for call in names}
