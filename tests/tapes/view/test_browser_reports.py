"""The report in a browser and on paper: no warning without a reason, pictures in their places, and nothing cut off."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.tapes import Observation, Picture
from tapereel.tapes.records import StepRecord
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView, run_view, write_view

from .lab import Recording, episode, long_run, training_run
from .serving import served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.py"
OVERLAPS = """() => {
    const rows = [...document.querySelectorAll('.transcript .row')].map((row) => [row, row.getBoundingClientRect()]);
    const wrong = rows.filter(([, box], k) => k && box.top < rows[k - 1][1].bottom - 0.5).map(([row]) => row.dataset.k);
    for (const [row, box] of rows) for (const image of row.querySelectorAll('img')) {
        const own = image.getBoundingClientRect();
        const inside = own.bottom <= box.bottom && own.right <= box.right && own.height <= 162;
        if (!inside) wrong.push(`image of ${row.dataset.k}`);
    }
    return wrong;
}"""


class LabViews(Observation):
    """An observation with recorded pictures."""

    pictures: tuple[Picture, ...]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of seven updates, evaluated every third one."""
    folder = tmp_path_factory.mktemp("digits")
    load_named(f"{DIGITS}:save_model")(str(folder / "model"))
    scene = [word for part in ("agent player", "env Digits", "tasks tasks") for word in _named(*part.split())]
    settings = ("loop.updates=7", "loop.groups=2", "loop.group_size=4", "loop.sampling.max_tokens=1")
    settings += ("evaluation.every=3", "evaluation.fraction=0.2", "evaluation.limit=4")
    words = [word for one in settings for word in ("--set", one)]
    main(["train", *scene, "--model", str(folder / "model"), "--out", str(folder / "run"), *words])
    return folder / "run"


def _named(option: str, name: str) -> tuple[str, str]:
    return f"--{option}", f"{DIGITS}:{name}"


def test_the_report_of_a_finished_run_has_no_warning(page: Any, trained: Path) -> None:
    page.goto((trained / "report.html").as_uri())
    page.wait_for_selector(".overview-view .left-out")
    assert page.locator(".badge").get_attribute("class") == "badge plain"
    page.locator(".badge summary").click()
    told = page.locator(".badge").inner_text()
    for alarm in ("Broken", "Hole", "Not sealed", "Not verified"):
        assert alarm not in told, alarm
    dots = page.locator(".figure").first.locator("circle.fill2")
    assert [round(float(x)) for x in dots.evaluate_all("all => all.map((one) => one.getAttribute('cx'))")] == [
        56,
        455,
        853,
        986,
    ], "before, updates 3 and 6, and the end"


def test_a_training_run_opens_at_its_overview_and_another_run_at_its_tapes(page: Any, server: Any, tmp_path: Path):
    page.goto(server.url)
    page.wait_for_selector(".overview-view .title")
    with Store.create(tmp_path / "run") as store:
        episode(store, "only", ["42"], 1.0)
    with served(tmp_path / "run") as other:
        page.goto(other.url)
        page.wait_for_selector(".trow[data-tape=only]")


def _pictures(folder: Path) -> Path:
    """A tape with tall, wide and missing pictures. Some have their size on the tape."""
    with Store.create(folder) as store:
        made = Recording(store, "t")
        for k in range(40):
            shape = ((2000, 20), (20, 3000), (300, 400), (1, 1), (90, 1200))[k % 5]
            pictures = [Picture.of(np.full((*shape, 3), 40 + 5 * k + i, "uint8")) for i in range(1 + k % 4)]
            for one in pictures:
                assert one.data is not None
                store.media.put(one.data, ".png")
            if k % 2:
                made.look(*(one.media for one in pictures))
            else:
                content = LabViews(pictures=tuple(pictures))
                step = StepRecord(tape="t", by="env", role="observation", kind=content.kind, content=content, at=1.0)
                store.writer.append(step.body())
            if k % 8 == 7:
                (folder / "tapes" / "media" / pictures[0].name).unlink()
        made.end()
    return folder


def test_pictures_never_overlap_other_rows(page: Any, tmp_path: Path) -> None:
    run = _pictures(tmp_path / "run")
    with RunView(run) as view:
        view.overview()
        write_view(view, tmp_path / "page.html", tapes=["t"])
    with served(run) as server:
        for width, address in ((1440, f"{server.url}#/tape/t"), (390, f"{server.url}#/tape/t"), (1440, "file")):
            page.set_viewport_size({"width": width, "height": 860})
            page.goto("about:blank")
            page.goto((tmp_path / "page.html").as_uri() + "#/tape/t" if address == "file" else address)
            page.wait_for_selector(".transcript figure")
            seen = set()
            for _ in range(25):
                # A row that has just grown moves the others before the next frame is painted.
                page.wait_for_function(f"() => ({OVERLAPS})().length === 0", timeout=5_000)
                page.wait_for_timeout(60)
                page.wait_for_function(f"() => ({OVERLAPS})().length === 0", timeout=5_000)
                rows = page.locator(".transcript .row").evaluate_all("rows => rows.map((row) => row.dataset.k)")
                seen |= set(rows)
                page.evaluate("document.querySelector('.transcript').scrollTop += 500")
            assert len(seen) > 30
            assert page.locator(".transcript figure img").count() > 0
    page.trouble[:] = [text for text in page.trouble if "404" not in text]


def test_a_row_that_grows_moves_the_rows_below_it(page: Any, server: Any) -> None:
    page.goto(f"{server.url}#/tape/g0a1")
    page.wait_for_selector("article.step")
    page.evaluate("document.querySelector('article.step .body').append(document.createElement('p'), 'x'.repeat(4000))")
    page.wait_for_function(f"() => ({OVERLAPS})().length === 0")
    assert page.locator("article.step").first.bounding_box()["height"] > 200


def _titles(pdf: bytes) -> list[str]:
    return [one.decode() for one in re.findall(rb"/Title \(([^\n]*)\)", pdf)]


def _pages(pdf: bytes) -> int:
    return len(re.findall(rb"/Type /Page\b", pdf))


def test_a_report_prints_completely(page: Any, trained: Path, tmp_path: Path) -> None:
    page.goto((trained / "report.html").as_uri())
    page.wait_for_selector(".overview-view .left-out")
    headings = page.locator(".overview-view h2, .overview-view h3").all_inner_texts()
    pdf = page.pdf(outline=True, tagged=True)
    assert {"Configuration", "Held-out tasks", "Versions", "Loss"} <= set(headings)
    assert set(headings) <= set(_titles(pdf))
    assert _pages(pdf) > 4, "the configuration alone fills pages"
    assert not page.locator(".overview-view details").first.evaluate("one => one.open"), "as it was"
    with RunView(long_run(tmp_path / "run", 100)) as view:
        write_view(view, tmp_path / "long.html", tapes=["long"])
    page.goto((tmp_path / "long.html").as_uri() + "#/tape/long")
    page.wait_for_selector("article.step")
    assert _pages(page.pdf()) > 5
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function("() => document.querySelectorAll('article.item:not(.waiting)').length === 302")
    assert page.evaluate("document.documentElement.scrollHeight") > 302 * 30, "nothing is cut off"
    assert page.evaluate(OVERLAPS) == []
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function("() => document.querySelectorAll('article.item').length < 60")
    page.goto((tmp_path / "long.html").as_uri() + "#/")
    page.wait_for_selector(".trow[data-tape]")


def test_what_is_still_loading_is_said_to_be_loading(page: Any, run: Path) -> None:
    ready = threading.Event()

    class Slow:
        decode = staticmethod(lambda token: f"<{chr(token)}>")

        def __init__(self, store: Store) -> None:
            ready.wait(60)

        def explain(self, tape: str) -> dict[str, Any]:
            return {"advantages": {"g0a0.1": [-1.5, 0.0]}, "rows": []}

        def forget(self) -> None:
            pass

    with served(run, insight=Slow) as server:
        page.goto(f"{server.url}#/tape/g0a0/call/g0a0.1")
        page.get_by_role("tab", name="Tokens").click()
        page.locator(".token-pane .note", has_text="Loading the tokenizer").wait_for()
        assert "no tokenizer" not in page.locator(".inspector").inner_text()
        assert "none here" not in page.locator(".token-pane option[value=advantage]").inner_text()
        ready.set()
        page.locator(".tok", has_text="<4>").wait_for()
        assert page.locator(".token-pane > .note").count() == 0


def test_a_page_that_waits_for_the_table_shows_no_value_of_a_part_of_it(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "SHARD", 4)
    with Store.create(tmp_path / "run") as store:
        for k in range(22):
            episode(store, f"t{k:02d}", ["42"], 1.0 - k / 100, group="late" if k > 20 else None, at=1000.0 + k)
    with served(tmp_path / "run") as server:
        held = threading.Event()

        def later(route: Any) -> None:
            if held.is_set():
                route.continue_()
            else:
                waiting.append(route)

        for where, wrong, shown in (
            ("#/curve", "No point yet", ".chart .dot"),
            ("#/group/late", "No such group", "table.attempts"),
        ):
            waiting: list[Any] = []
            held.clear()
            page.route("**/api/table/5", later)
            page.goto("about:blank")
            page.goto(f"{server.url}{where}")
            page.locator(".loading").wait_for()
            page.wait_for_function("() => T.app.rows.length === 20")
            assert wrong not in page.locator("main").inner_text()
            held.set()
            for route in waiting:
                route.continue_()
            page.wait_for_selector(shown)
        page.goto("about:blank")
        page.goto(f"{server.url}#/")
        page.wait_for_function("() => T.app.table.found.length === 22")
        assert page.locator(".trow.chosen").get_attribute("data-tape") == "t21", (
            "the first row, not the first to arrive"
        )


def test_what_was_chosen_survives_a_reload(page: Any, server: Any) -> None:
    page.goto(f"{server.url}#/?split=train")
    page.wait_for_selector(".trow[data-tape]")
    page.keyboard.press("j")
    page.keyboard.press("j")
    chosen = page.locator(".trow.chosen").get_attribute("data-tape")
    page.wait_for_function("row => location.hash === `#/?split=train&row=${row}`", arg=chosen)
    page.reload()
    page.wait_for_selector(f".trow.chosen[data-tape={chosen}]")
    page.locator(f".trow[data-tape={chosen}]").click()
    page.wait_for_selector("article.item")
    page.go_back()
    page.wait_for_selector(f".trow.chosen[data-tape={chosen}]")
    page.evaluate("location.hash = '#/group/group-0'")
    page.wait_for_selector("table.attempts")
    page.keyboard.press("j")
    page.reload()
    page.locator("th.chosen", has_text="#1").wait_for()
    page.evaluate("location.hash = '#/curve'")
    page.locator(".chart").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.reload()
    page.locator(".curve-view .note", has_text="update 1 of lineage main").wait_for()


def test_the_report_shows_its_small_pictures(page: Any, tmp_path: Path) -> None:
    run = training_run(tmp_path / "run")
    with Store.open(run, write=True) as store:
        made = Recording(store, "seen", at=3000.0)
        picture = Picture.of(np.zeros((30, 40, 3), "uint8"))
        assert picture.data is not None
        made.look(store.media.put(picture.data, ".png"), store.media.put(b"x" * 600_000, ".png"))
        made.end()
    with RunView(run) as view:
        write_view(view, tmp_path / "page.html", tapes=["seen"])
    page.goto((tmp_path / "page.html").as_uri() + "#/tape/seen")
    image = page.locator("article.observation img")
    image.wait_for()
    assert image.evaluate("one => one.decode().then(() => one.naturalWidth)") == 40
    page.locator("article.observation .note", has_text="is not in this file").wait_for()
