"""The static files of the viewer, the policy they live under, and the types that media are sent as.

They are plain HTML, JavaScript and CSS, as they are written here: nothing is built, nothing is fetched from elsewhere.
"""

from __future__ import annotations

from importlib.resources import files

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
"""Runs patterns away from the page, so that one that never ends can be stopped."""

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
"""That of a bundle. Opened from a disk its files have no origin, and a worker must be made of a blob."""

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
"""Media that are shown, by suffix; all others are only offered to be kept (an SVG can hold a script)."""

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def static_files() -> dict[str, tuple[str, bytes]]:
    """Name -> (content type, bytes) of every file that the page is made of."""
    names = ("index.html", "style.css", "icon.svg", *SCRIPTS, WORKER)
    folder = files(__name__.rpartition(".")[0]) / "static"
    return {name: (_KINDS[name[name.rindex(".") :]], (folder / name).read_bytes()) for name in names}
