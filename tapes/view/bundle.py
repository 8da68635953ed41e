"""Writes the viewer as one file that needs no server, such as a run's `report.html`.

The page is plain HTML, JavaScript and CSS without a build step, and loads nothing from another host. It opens at the
overview. It holds the tapes that were chosen or, by default, the tapes that the overview proposes to read. Its content
policy allows only its own script and style, each identified by a hash. Text from models, tasks and file names is JSON
in a block that browsers don't run, and the scripts show this text as text nodes.
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
from ..common.text import counted
from ..errors import TapereelError, UsageError, remedy
from ..store.disk import REAL, put_file
from ..store.store import Store
from ..store.summary import Summary
from .items import SHARD
from .overview import Overview, overview_of
from .run_view import PAGE, RunView

NEWEST = 20
"""If no tapes are chosen and the overview proposes none, a file holds this number of the newest tapes."""
SCRIPTS = (
    "dom.js",
    "source.js",
    "rows.js",
    "list.js",
    "rich.js",
    "search.js",
    "table.js",
    "curve.js",
    "overview.js",
    "group.js",
    "tokens.js",
    "inspector.js",
    "tape.js",
    "runs.js",
    "app.js",
)
"""The scripts in the order in which the page loads them."""
WORKER = "worker.js"
"""The script that runs search patterns in a worker, so that the page can stop a pattern that never ends."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types tapereel"
)
"""Content-Security-Policy of the server."""

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
"""File suffixes of media that are shown as images. All other files are offered as downloads, because some of them can
contain scripts, for example SVGs."""

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

EMBEDDED, EMBEDDED_TOGETHER = 500_000, 4_000_000
"""Maximum number of bytes of one picture in a file, and of all its pictures. Larger files are left out."""
CALLS = 50
"""Number of calls in one part of the page's data."""


def not_explained() -> str:
    """What a report shows instead of the training of a tape's tokens."""
    return f"left out of a report; {remedy('read whole', 'the run has it')}"


def static_files() -> dict[str, tuple[str, bytes]]:
    """Return (content type, bytes) of each file of the page, by name."""
    names = ("index.html", "style.css", "icon.svg", *SCRIPTS, WORKER)
    folder = files(__name__.rpartition(".")[0]) / "static"
    return {name: (_KINDS[name[name.rindex(".") :]], (folder / name).read_bytes()) for name in names}


def write_report(
    path: str | PathLike[str], run: str | Path, overview: Overview, decode: Callable[[int], str] | None = None
) -> None:
    """Write the page with the tapes that the overview names. An earlier page is replaced atomically.

    `decode` returns the text of a token id. If it is None, the page shows the ids.
    """
    with RunView(run, insight=lambda store: _Decoder(store, decode)) as view:
        view.overview()  # reads the records that the index lacks
        page = report_of(view, overview, view.store.index.among([one.tape for one in overview.tapes]))
    put_file(REAL, Path(path), page.encode())


def write_view(
    view: RunView, out: Path, *, tapes: Sequence[str] = (), progress: Progress = silent
) -> dict[str, object]:
    """Write the page to the new file `out`. The page holds `tapes`. By default, it holds the tapes that the overview
    proposes to read, or the newest tapes if the overview proposes none."""
    if out.exists():
        raise UsageError(f"{out} exists already: name another file, or remove it first")
    if out.suffix != ".html":
        raise UsageError(f"{out}: the view is written to one .html file")
    view.overview()  # reads the records that the index lacks
    overview = overview_of(view.store)
    chosen = [view.store.tape(tape, refresh=False).id for tape in tapes] or [one.tape for one in overview.tapes]
    chosen = chosen or [one.id for one in view.store.summaries()[-NEWEST:]]
    rows = view.store.index.among(chosen)
    body = report_of(view, overview, rows, progress).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    put_file(REAL, out, body)
    return {"page": str(out), "tapes": len(rows), "bytes": len(body)}


def report_of(view: RunView, overview: Overview, rows: Sequence[Summary], progress: Progress = silent) -> str:
    """Return the page with all answers that it may request about these tapes."""
    about = view.overview()
    integrity = about["integrity"]
    integrity["not_checked"].append("this file itself: it can be edited, and nothing here would show it")
    media = sorted(set[str]().union(*(view.media(row.id) for row in rows)))
    pictures, gone = _pictures(view.store, media)
    integrity["holes"] += gone
    about["left_out"] = []
    if len(rows) < about["tapes"]:
        about["left_out"].append(f"{len(rows):,} of the run's {about['tapes']:,} tapes are in this file.")
    if len(pictures) + len(gone) < len(media):
        about["left_out"].append(f"{len(pictures):,} of their {counted(len(media), 'media file')} are in this file.")
    about["rev"], about["tapes"], about["made"] = None, len(rows), time.time()
    data: dict[str, object] = {
        "run": about,
        "report": overview.model_dump(),
        "worker": static_files()[WORKER][1].decode(),
        **pictures,
    }
    data |= {f"table-{k // SHARD}": view.columns(rows[k : k + SHARD]) for k in range(0, len(rows), SHARD)}
    points, here = view.curve()["points"], {row.id for row in rows}
    data["curve"] = {"points": points}
    data["gists"] = view.gists([row.id for row in rows])
    for k in range(len(points)):
        data[f"behind/{k}"] = {"tapes": [tape for tape in view.behind(k)["tapes"] if tape in here]}
    for k, row in enumerate(rows):
        data |= {f"{row.id}/{part}": value for part, value in _parts(view, row)}
        progress("writing tapes", k + 1, len(rows), "")
    return one_file(json_texts(data))


def _pictures(store: Store, media: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the data URL of each picture that is small enough, by its address, and a sentence for each media file that
    is missing or has changed."""
    found, gone, left = dict[str, str](), list[str](), EMBEDDED_TOGETHER
    for name in media:
        try:
            body = store.media.get(f"media:{name}")
        except (TapereelError, OSError) as error:
            gone.append(str(error))
            continue
        if name[64:] in IMAGES and len(body) <= min(EMBEDDED, left):
            left -= len(body)
            found[f"media/{name}"] = f"data:{IMAGES[name[64:]]};base64,{base64.b64encode(body).decode()}"
    return found, gone


def json_texts(values: dict[str, object]) -> dict[str, str]:
    """Return each value as JSON text. NaN and infinity become strings, because JSON has neither."""
    return {key: to_json(value, inf_nan_mode="strings").decode() for key, value in values.items()}


def one_file(data: dict[str, str]) -> str:
    """Return the viewer with this data as one page."""
    static = {name: body.decode() for name, (_, body) in static_files().items()}
    style = static["style.css"]
    script = "\n".join(static[name] for name in SCRIPTS)
    # `<` is escaped, so that no text in the data can end the block or begin a comment.
    block = json.dumps(data).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "worker-src blob:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types tapereel"
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
    """Decodes tokens but explains nothing. Reports are written every minute, and an explanation has to read the
    ledger."""

    def __init__(self, store: Store, decode: Callable[[int], str] | None) -> None:
        self.decode = decode

    def explain(self, tape: str) -> dict[str, object]:
        """Name the commands that explain the tape."""
        return {"missing": not_explained()}

    def forget(self) -> None:
        """Do nothing, because nothing is kept."""


def _parts(view: RunView, row: Summary) -> Iterator[tuple[str, Any]]:
    """Yield (name, answer) for every question about one tape."""
    tape = row.id
    tape_map = view.map(tape)
    calls = [call for call, record in tape_map.calls.items()]
    pages = [calls[k : k + CALLS] for k in range(0, len(calls), CALLS)]
    yield "head", {**view.head(tape), "call_pages": pages}
    for page in range(-(-len(tape_map.items) // PAGE)):
        yield f"items-{page}", view.items(tape, page)
    for page in range(max(1, -(-row.actions // PAGE))):
        yield f"turns-{page}", view.turns(tape, page)
    yield "explain", view.explain(tape)
    for page, names in enumerate(pages):
        yield f"calls-{page}", {call: view.call(tape, call) for call in names}
