"""Builds the site of these pages into build/site/html, and checks that it needs no other host.

    python docs/build.py            build and check, as CI does; needs `pip install -c constraints.txt ".[docs]"`
    python docs/build.py --serve    show it on http://localhost:8000 and build it again after each change of a page

The pages are plain Markdown with relative links, which hold on GitHub, in a wheel and here. So the site has the folders
of a checkout: README.md is its home page, and a page that links to a test or an example finds the file.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "site"
HTML = BUILD / "html"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "docs/**/*.png", "docs/site.*", "examples/*.*")
PACKAGE = ("__init__.py", "tapes", "envs", "agents", "finetune")
LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}
"""Tag and attribute of everything that a browser fetches by itself."""


def stage() -> None:
    """Link the pages, the files that they link to, and the package under its name, into build/site."""
    shutil.rmtree(BUILD, ignore_errors=True)
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    for path in [*pages, *(file for page in pages if page.suffix == ".md" for file in _linked(page))]:
        place = BUILD / "pages" / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(path)
    package = BUILD / "package" / "tapereel"
    package.mkdir(parents=True)
    for part in PACKAGE:
        (package / part).symlink_to(ROOT / part)


def _linked(page: Path) -> Iterator[Path]:
    """The files of the checkout, other than pages, that a page links to."""
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and path.suffix != ".md" and ROOT in path.parents:
            yield path


class _Page(HTMLParser):
    """(tag, attribute, address) of all links of a built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [(tag, name, value) for name, value in attrs if name in ("href", "src") and value]


def problems(html: Path) -> list[str]:
    """What a built site fetches from other hosts, and links to files that it doesn't have, one sentence each."""
    found = []
    for page in sorted(html.rglob("*.html")):
        name = page.relative_to(html).as_posix()
        for tag, attribute, link in _Page(page.read_text(encoding="utf-8")).links:
            address = urlsplit(link)
            if address.scheme == "data" or (address.scheme and (tag, attribute) not in LOADED):
                continue
            if address.scheme or address.netloc:
                found.append(f"{name}: <{tag}> fetches {link} from another host")
            elif address.path and not _exists(html, page, unquote(address.path)):
                found.append(f"{name}: <{tag}> leads to {link}, which isn't there")
    for sheet in sorted(html.rglob("*.css")):
        links = re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", sheet.read_text("utf-8"))
        found += [f"{sheet.relative_to(html).as_posix()}: fetches {link} from another host" for link in links]
    return found


def _exists(html: Path, page: Path, path: str) -> bool:
    target = html / path.lstrip("/") if path.startswith("/") else page.parent / path
    return target.is_file() or (target / "index.html").is_file()


def main() -> int:
    """Build, check, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="show the site and follow changes")
    serve = parser.parse_args().serve
    stage()
    words = ["serve"] if serve else ["build", "--clean", "--strict"]
    config = ["--config-file", str(ROOT / "zensical.toml")]
    code = subprocess.run([sys.executable, "-m", "zensical", *words, *config], cwd=ROOT, env=os.environ).returncode
    if serve or code:
        return code
    wrong = problems(HTML)
    print(*wrong, f"{len(list(HTML.rglob('index.html')))} pages in {HTML}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
