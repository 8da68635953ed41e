"""The pictures of the documentation: pages of the viewer in Chromium, on a run of the demo.

    tapereel demo --out runs/demo
    python benchmarks/viewer_pictures.py runs/demo --docs docs

Needs `pip install "tapereel[browser,demo,http]"` and a Chromium on the path. The tape of the pictures is one whose
agent called the calculator and solved its task, in a group of which about half did.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from playwright.sync_api import Page, sync_playwright

from tapereel.tapes.store.store import Store
from tapereel.tapes.store.summary import Summary

VIEW = [sys.executable, "-m", "tapereel.cli", "view"]


def group_of(run: Path) -> tuple[Summary, list[str]]:
    """(the tape of the pictures, the ids of its group)."""
    with Store.open(run) as store:
        rows = store.summaries(split="train", closed=True)
    groups = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    rate = {name: fmean(row.reward or 0.0 for row in members) for name, members in groups.items()}
    told = [row for row in rows if row.reward == 1 and row.actions == 2 and 0.3 < rate[row.group] < 0.7]
    if not told:
        sys.exit(f"{run} has no group of which about half solved the task with one call")
    return told[-1], [row.id for row in groups[told[-1].group]]


def photograph(page: Page, link: str, places: Mapping[Path, str]) -> None:
    """Save a picture of each place in the viewer at `link`."""
    page.goto(link)
    page.wait_for_function("() => T.app.rows.length > 0")
    for path, place in places.items():
        page.evaluate(f"location.hash = {place!r}")
        page.wait_for_timeout(4000)  # a place loads what it shows
        page.screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    args = parser.parse_args()
    tape, members = group_of(args.run)
    last, group = 2 * tape.actions - 1, (tape.group or "").replace("/", "%2F")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        file = Path(scratch) / "view.html"
        chosen = [word for member in members for word in ("--tape", member)]
        subprocess.run([*VIEW, str(args.run), "--out", str(file), *chosen], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 780}).new_page()
        page.set_default_timeout(120_000)
        places = {
            args.docs / "viewer-tape.png": f"#/tape/{tape.id}/step/{last}",
            args.docs / "viewer-group.png": f"#/group/{group}",
        }
        photograph(page, file.as_uri(), places)
        with subprocess.Popen([*VIEW, str(args.run), "--no-browser"], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                link = next(line for line in server.stdout if "http://" in line).strip()
                places = {args.docs / "viewer-tapes.png": "#/?split=train", args.docs / "viewer-curve.png": "#/curve"}
                photograph(page, link, places)
            finally:
                server.terminate()
        page.set_viewport_size({"width": 900, "height": 700})
        page.goto((args.run.resolve() / "report.html").as_uri())
        page.locator("figure").first.screenshot(path=args.docs / "demo-curve.png")
        browser.close()


if __name__ == "__main__":
    main()
