"""Writes `report.html`: the viewer as one self-contained file that opens at the overview page of a run.

The file holds the viewer's scripts, its style and, as JSON, the overview and the tapes that the overview proposes to
read. It loads nothing: its policy allows only its own script and style, each named by its hash. Everything that a
model, a task or a file name wrote is JSON in a block that no browser runs, and the scripts show it as text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from ..store.disk import REAL, put_file
from ..store.store import Store
from .bundle import json_texts, write_data
from .overview import Overview
from .run_view import RunView
from .view_files import SCRIPTS, static_files

NOT_EXPLAINED = "left out of a report; `tapereel explain` and `tapereel view` show it"


def write_report(
    path: str | PathLike[str], run: str | Path, overview: Overview, decode: Callable[[int], str] | None = None
) -> None:
    """Write the page with the tapes that the overview names, replacing an earlier page at once.

    decode: gives the text of a token id; None shows the ids.
    """
    with RunView(run, insight=lambda store: _Decoder(store, decode)) as view:
        data = _Collected()
        rows = view.store.index.among([one.tape for one in overview.tapes])
        about = view.overview()
        integrity = about["integrity"]
        integrity["not_checked"].append("this file itself: it can be edited, and nothing here would show it")
        if len(rows) < about["tapes"]:
            integrity["holes"].append(f"{about['tapes'] - len(rows):,} of the run's tapes are not in this file")
        about = {**about, "rev": None, "tapes": len(rows), "integrity": integrity, "made": time.time()}
        media = write_data(view, data, rows, about, overview)
        if media:
            integrity["holes"].append(f"{len(media)} media files are not in this file")
            data.put("run", {"run": about})
    put_file(REAL, Path(path), one_file(data.files).encode())


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


class _Collected:
    """Keeps the values in memory: name of the file -> key -> JSON text."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, str]] = {}

    def put(self, name: str, values: dict[str, Any]) -> None:
        self.files[name] = json_texts(values)


class _Decoder:
    """Decodes tokens, and explains nothing: a report is written each minute, and an explanation reads the ledger."""

    def __init__(self, store: Store, decode: Callable[[int], str] | None) -> None:
        self.decode = decode

    def explain(self, tape: str) -> dict[str, Any]:
        """Names the verbs that explain."""
        return {"missing": NOT_EXPLAINED}

    def forget(self) -> None:
        """Nothing is kept."""
