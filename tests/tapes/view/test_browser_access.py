"""axe-core finds no serious or critical fault on any page of the viewer, in light and dark, on a screen and a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.cli.look.view import _compare
from tapereel.tapes.view import Runs

from ...contract.npm_mcp import AXE
from .library import library_folder
from .serving import serving_view

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
PAGES = {
    "overview": "#/overview",
    "tapes": "#/?cols=question,expected,given,reward,status,turns,split,begun,id,group,version,tokens",
    "no tape fits": "#/?status=error&split=eval",
    "call": "#/tape/u5g0a0/call/u5g0a0.1",
    "answer": "#/tape/u5g0a0/step/6",
    "failure": "#/tape/broken",
    "group": "#/group/3%2FDune",
    "curve": "#/curve",
}
FAULTS = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)], ids=["screen", "phone"])
def test_no_page_has_a_serious_fault(
    chromium: Any, library: Any, scheme: Any, size: tuple[int, int], tmp_path: Path
) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: python -m tests.contract.npm_mcp")
    width, height = size
    viewport = {"width": width, "height": height}
    # The page's policy refuses scripts of others, so axe needs a context without it.
    context = chromium.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    page = context.new_page()
    page.goto(library.url)
    page.wait_for_function("() => T.app.rows.length > 0")
    page.evaluate(AXE.read_text())
    found = {}
    for name, where in PAGES.items():
        page.evaluate(f"location.hash = {where!r}")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(300)
        if width < 720 and name == "call":
            page.keyboard.press("i")
        if faults := page.evaluate(FAULTS):
            found[name] = faults
    page.keyboard.press("?")
    if faults := page.evaluate(FAULTS):
        found["keys"] = faults
    with serving_view(lambda: Runs(library_folder(tmp_path / "runs"), compare=_compare)) as runs:
        page.goto(runs.url)
        page.locator("tr[data-run=library] .r-state .chip").wait_for()
        page.evaluate(AXE.read_text())
        if faults := page.evaluate(FAULTS):
            found["runs"] = faults
        page.evaluate("T.app.go('#/compare/' + T.app.overview.runs.map((one) => one.key).join('/'))")
        page.wait_for_selector("table.scores")
        if faults := page.evaluate(FAULTS):
            found["compared"] = faults
    context.close()
    assert found == {}


def test_axe_sees_a_fault(chromium: Any) -> None:
    """A control: a page with a fault is not passed."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: python -m tests.contract.npm_mcp")
    page = chromium.new_page()
    page.set_content("<html lang='en'><title>x</title><main><button></button><p style='color:#bbb'>pale</p></main>")
    page.evaluate(AXE.read_text())
    assert {fault.partition(":")[0] for fault in page.evaluate(FAULTS)} == {"button-name", "color-contrast"}
    page.close()
