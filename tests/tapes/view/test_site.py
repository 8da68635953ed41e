"""The site of the documentation in a real browser: on a screen and a phone, in light and dark, with its search."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ...contract.npm_mcp import AXE
from .test_browser_access import FAULTS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
HTML = ROOT / "build" / "site" / "html"
PAGES = (
    "",
    "docs/",
    "docs/tutorials/hello/",
    "docs/how-to/gateway/",
    "docs/how-to/faq/",
    "docs/concepts/objective/",
    "docs/reference/settings/",
    "docs/reference/api/tapereel/",
    "docs/project/measurements/",
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the built site. CI builds it before."""
    if not (HTML / "index.html").exists():
        subprocess.run([ROOT / ".contract" / "site" / "bin" / "python", ROOT / "docs" / "build.py"], check=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(HTML))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)], ids=["screen", "phone"])
def test_pages_fit_have_no_serious_fault_and_load_nothing_from_elsewhere(
    chromium: Any, site: str, scheme: Any, size: tuple[int, int]
) -> None:
    width, height = size
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True)
    page, elsewhere, found = context.new_page(), list[str](), dict[str, Any]()
    page.on(
        "request", lambda request: None if request.url.startswith((site, "data:")) else elsewhere.append(request.url)
    )
    for where in PAGES:
        page.goto(site + where)
        page.wait_for_load_state("networkidle")
        page.evaluate(AXE.read_text())
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        if faults := [*page.evaluate(FAULTS), *([f"{wide} pixels too wide"] if wide > 0 else [])]:
            found[where] = faults
    context.close()
    assert (found, elsewhere) == ({}, [])


def test_a_word_is_found_by_the_search(chromium: Any, site: str) -> None:
    page = chromium.new_page()
    page.goto(site)
    page.get_by_role("button", name="Search").click()
    page.get_by_role("combobox", name="Search").fill("sequence_parallel")
    page.get_by_role("option").filter(has_text="Several GPUs and machines").first.wait_for()
    page.close()
