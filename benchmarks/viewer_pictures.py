"""The curve of the demo in the documentation, from the report of a run of the demo in Chromium.

    tapereel demo --out runs/demo
    python benchmarks/viewer_pictures.py runs/demo --docs docs

Needs `pip install "tapereel[browser,demo]"` and a Chromium on the path. `tests/tapes/view/test_screens.py` makes the
pictures of the viewer's pages.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 700})
        page.goto((args.run.resolve() / "report.html").as_uri())
        page.locator("figure").first.screenshot(path=args.docs / "demo-curve.png")
        browser.close()


if __name__ == "__main__":
    main()
