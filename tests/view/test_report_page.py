"""The report in a real browser: it fits a screen and a telephone, and nothing that was written into it acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.report.report import write_report

from ..front.pages import EVIL, report_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("text", [EVIL, "w" * 200])
def test_the_page_fits_and_nothing_in_it_acts(page: Any, width: int, text: str, tmp_path: Path):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.set_viewport_size({"width": width, "height": 900})
    write_report(tmp_path / "report.html", report_of(text))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert asked == [(tmp_path / "report.html").as_uri()]
    assert page.locator("script").count() == 0
    assert page.locator("figure svg").count() == 2
    page.locator("details").last.locator("summary").click()
    page.locator("details[open] pre").wait_for()
