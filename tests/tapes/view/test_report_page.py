"""The report in a real browser: it fits a screen and a telephone, and no text that it shows acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.store import Store
from tapereel.tapes.view import overview_of
from tapereel.tapes.view.bundle import write_report

from ...front.pages import EVIL, empty_run, overview_with
from .lab import hostile_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


def watched(page: Any) -> list[str]:
    """The addresses that the page asks for. A dialog, which only a script of others would open, fails the test."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    return asked


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("text", [EVIL, "w" * 200])
def test_the_page_fits_and_nothing_in_it_acts(page: Any, width: int, text: str, tmp_path: Path) -> None:
    asked = watched(page)
    page.set_viewport_size({"width": width, "height": 900})
    write_report(tmp_path / "report.html", empty_run(tmp_path / "run"), overview_with(text))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".overview-view figure")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.overview-view').scrollWidth") <= width
    assert [url.partition("#")[0] for url in asked] == [(tmp_path / "report.html").as_uri()]
    assert page.locator("figure > svg").count() == 2
    page.locator(".overview-view details").last.locator("summary").click()
    page.locator(".overview-view details[open] pre").wait_for()


def test_a_tape_of_a_report_is_shown_with_its_tokens_and_runs_nothing(page: Any, tmp_path: Path) -> None:
    asked = watched(page)
    with Store.open(hostile_run(tmp_path / "run")) as store:
        found = overview_of(store)
    overview = overview_with("hostile", "hostile").model_copy(update={"facts": found.facts})
    write_report(tmp_path / "report.html", tmp_path / "run", overview, chr)
    page.goto((tmp_path / "report.html").as_uri())
    page.locator(".overview-view li a[href='#/tape/hostile']").click()
    page.wait_for_selector("article.item:not(.waiting)")
    page.goto((tmp_path / "report.html").as_uri() + "#/tape/hostile/call/hostile.1")
    page.wait_for_selector(".inspector")
    assert page.evaluate("window.pwned") is None
    assert {url.partition("#")[0] for url in asked} == {(tmp_path / "report.html").as_uri()}
