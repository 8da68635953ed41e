"""Each page of the viewer on a screen and on a phone, in light and dark: no error, and a picture next to the docs.

`TAPEREEL_SCREENS=1 python -m pytest -m browser tests/tapes/view/test_screens.py` writes the pictures again.
Without it, the pages are only opened, and each must have its pictures.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tapereel.cli.look.view import _compare
from tapereel.tapes.view import Runs

from .conftest import WATCH
from .library import library_folder
from .serving import served, serving_view

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]
SCREENS = Path(__file__).resolve().parents[3] / "docs" / "screens"
SIZES = {"wide": (1440, 900), "phone": (390, 844)}
PAGES = {
    "overview": ("#/overview", ".figure"),
    "tapes": ("#/", ".trow .c-question span[title]"),
    "tape": ("#/tape/u5g0a0/step/6", "article.end"),
    "failed": ("#/tape/u0g0a1/step/5", ".fragment.failed"),
    "group": ("#/group/3%2FDune", "table.attempts"),
    "curve": ("#/curve", ".chart .dot"),
}
"""Name: address, and what is there once the page is complete."""
FOLDER = {"runs": ("#/", "tr[data-run=library] .r-state .chip"), "compared": ("#/compare/{}", "table.scores")}
"""The same for the pages of a folder of runs. `{}` stands for the keys of the two runs."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The servers of a run and of its folder. Their paths have no part that changes, because pages show them."""
    back = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("screens"))
    try:
        folder = library_folder(Path("runs"))
        with served(folder / "library") as run, serving_view(lambda: Runs(folder, compare=_compare)) as runs:
            yield run, runs
    finally:
        os.chdir(back)


def small(png: bytes) -> bytes:
    """The picture with a palette that keeps rare colours."""
    made = io.BytesIO()
    quiet = Image.open(io.BytesIO(png)).convert("RGB")
    quiet.quantize(200, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_renders_and_has_its_picture(chromium: Any, shown: Any, scheme: str, size: str) -> None:
    width, height = SIZES[size]
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, timezone_id="UTC", reduced_motion="reduce"
    )
    context.add_init_script(WATCH)
    page = context.new_page()
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    run, runs = shown
    for name, (where, ready) in {**PAGES, **FOLDER}.items():
        if name in ("overview", "runs"):
            page.goto((runs if name == "runs" else run).url)
            page.wait_for_function("() => T.app.overview")
        keys = page.evaluate("(T.app.overview.runs || []).map((one) => one.key).reverse().join('/')")
        page.evaluate(f"location.hash = {where.format(keys)!r}")
        page.locator(ready).first.wait_for()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        path = SCREENS / f"{name}-{size}-{scheme}.png"
        if os.environ.get("TAPEREEL_SCREENS"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(small(page.screenshot()))
        with Image.open(path) as picture:
            assert picture.size == (width, height), path
    violations = page.evaluate("window.violations")
    context.close()
    assert (trouble, violations) == ([], [])
