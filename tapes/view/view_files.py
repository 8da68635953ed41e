"""The static files of the viewer, their Content-Security-Policy, and the media types that are shown as images.

The files are plain HTML, JavaScript and CSS without a build step. They load nothing from another host.
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


def static_files() -> dict[str, tuple[str, bytes]]:
    """Name -> (content type, bytes) of every file of the page."""
    names = ("index.html", "style.css", "icon.svg", *SCRIPTS, WORKER)
    folder = files(__name__.rpartition(".")[0]) / "static"
    return {name: (_KINDS[name[name.rindex(".") :]], (folder / name).read_bytes()) for name in names}
