"""What looking costs: opening a run of many tapes in Chromium, mapping and paging a long tape, memory while scrolling.

    python benchmarks/view_open.py [--tapes 25000] [--turns 100000]

Needs `pip install "tapereel[browser]"` and a Chromium on the path.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tapereel.tapes import Answer, Status, Task, Text
from tapereel.tapes.records import Begin, End, Identity, Reward, StepRecord
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView


def record(store: Store, tape: str, turns: int) -> None:
    """One scored tape."""
    task, at = Task(id="count", public="count"), 1000.0
    put = store.writer.append
    put(
        Begin(
            tape=tape,
            task=task,
            task_hash=task.hash,
            agent=Identity(name="counter"),
            env=Identity(name="Numbers"),
            env_seed=0,
            seed=0,
            at=at,
        ).body()
    )
    for k in range(turns):
        put(StepRecord(tape=tape, by="env", role="observation", kind="text", content=Text(text=f"{k}"), at=at).body())
        put(
            StepRecord(
                tape=tape, by="counter", role="action", kind="answer", content=Answer(text=f"{k + 1}"), at=at
            ).body()
        )
        put(Reward(tape=tape, step=2 * k + 1, value=1.0).body())
    put(End(tape=tape, status=Status.FINISHED, at=at).body())


def timed(what: str, work: Callable[[], Any], times: int = 1) -> None:
    """The median of so many runs, in milliseconds."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    print(f"{what}: {1000 * statistics.median(taken):,.0f} ms")


def heap(page: Page) -> float:
    """MB of JavaScript values after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return found["JSHeapUsedSize"] / 1e6


def cpu(page: Page) -> float:
    """CPU seconds of the page's main thread since the page was opened again."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    page.wait_for_function("() => document.querySelector('.trow') && !document.querySelector('.rows .unread')")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return found["TaskDuration"]


def serve(run: Path) -> tuple[subprocess.Popen[str], str]:
    """`tapereel view`, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tapereel.cli", "view", str(run), "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def wide(page: Page, run: Path, tapes: int) -> None:
    with Store.create(run, durability="os") as store:
        for k in range(tapes):
            record(store, f"tape-{k:07d}", 2)
    with RunView(run) as view:
        view.overview()
        timed("overview", view.overview, 5)
        timed("first piece of the table", lambda: view.table(0), 5)
    process, address = serve(run)

    def open_run() -> None:
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_function("n => T.app.table.found.length === n", arg=tapes)

    timed(f"opening a run of {tapes:,} tapes until all are listed", open_run, 5)
    print(f"CPU time of the page's main thread for that: {1000 * cpu(page):,.0f} ms")
    process.terminate()
    process.wait()


def long(page: Page, run: Path, turns: int) -> None:
    with Store.create(run, durability="os") as store:
        record(store, "long", turns)
    with RunView(run) as view:
        view.overview()
        timed(f"mapping a tape of {3 * turns + 2:,} records", lambda: view.head("long"))
        timed("a page from its middle", lambda: view.items("long", turns // 100), 20)
    process, address = serve(run)
    page.goto(f"{address}#/tape/long")
    page.locator("article.step").first.wait_for(timeout=120_000)
    before = heap(page)
    for k in range(1, 201):
        page.evaluate(
            "share => { const place = document.querySelector('.transcript');"
            "place.scrollTop = share * (place.scrollHeight - place.clientHeight); }",
            k / 200,
        )
        page.wait_for_function("() => document.querySelector('article.item:not(.waiting)')")
    print(
        f"JavaScript heap: {before:.1f} MB at the top, {heap(page):.1f} MB after 200 places down to the end; "
        f"{page.locator('*').count()} elements"
    )
    process.terminate()
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tapes", type=int, default=25_000)
    parser.add_argument("--turns", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 860})
        wide(page, Path(folder) / "wide", args.tapes)
        long(page, Path(folder) / "long", args.turns)
        browser.close()


if __name__ == "__main__":
    main()
