"""The runs of a folder in a real browser: the list, a run of it, and two runs task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.cli.look.view import _compare
from tapereel.tapes.store import Store
from tapereel.tapes.view import Runs

from .lab import episode, growing, hostile_run, training_run
from .serving import serving_view
from .test_runs import loop_of, run_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("runs")
    loop_of(training_run(top / "trained"), 2, 2, (0.25, 0.75))
    training_run(top / "bare")
    run_of(top / "one", {"a": 1.0, "b": 0.0, "c": 1.0, "mine": 1.0})
    run_of(top / "other", {"a": 0.0, "b": 0.5, "c": 1.0, "theirs": 0.25})
    hostile_run(top / "<img src=x onerror='window.pwned=1'>")
    broken = training_run(top / "torn")
    (segment,) = (broken / "tapes").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"go on", b"GO on"))
    (broken / "tapes" / "index.sqlite").unlink(missing_ok=True)
    return top


@pytest.fixture
def runs(folder: Path) -> Any:
    with serving_view(lambda: Runs(folder, compare=_compare)) as server:
        yield server


def _names(page: Any) -> list[str]:
    page.wait_for_function("() => !document.querySelector('.runs-view td[colspan].none')")
    return page.eval_on_selector_all("tr[data-run]", "rows => rows.map((row) => row.dataset.run)")


def test_the_runs_of_a_folder_are_listed_and_opened(page: Any, runs: Any) -> None:
    page.goto(runs.url)
    names = ["<img src=x onerror='window.pwned=1'>", "bare", "one", "other", "torn", "trained"]
    page.wait_for_selector("tr[data-run=trained] .r-state .chip")
    assert _names(page) == names
    row = page.locator("tr[data-run=trained]").inner_text().split()
    assert row == ["trained", "finished", "models/tiny", "grpo", "13", "2", "of", "2", "0.5", "–"]
    assert page.locator("tr[data-run=torn] .chip.bad").inner_text() == "broken"
    assert "000001" in page.locator("tr.problems").last.inner_text(), "what is wrong with it"
    page.get_by_role("button", name="Reward").click()
    assert _names(page)[0] == names[0], "the best first"
    page.get_by_label("Name of a run").fill("o")
    assert set(_names(page)) == {names[0], "one", "other", "torn"}
    page.reload()
    assert set(_names(page)) == {names[0], "one", "other", "torn"}, "order and filter are in the address"
    page.goto(f"{runs.url}#/")
    page.locator("tr[data-run=trained] a").click()
    page.wait_for_selector(".overview-view .title")
    page.goto(page.url.split("#")[0] + "#/tape/g0a1")
    page.wait_for_selector("article.step")
    page.reload()
    page.wait_for_selector("article.step")
    page.locator("#bar nav a", has_text="Runs").click()
    page.wait_for_selector("tr[data-run=one]")
    page.locator("tr[data-run^='<img'] a").click()
    page.locator(".trow[data-tape=hostile]").wait_for()
    assert page.evaluate("window.pwned") is None


def test_two_chosen_runs_are_compared_task_by_task(page: Any, runs: Any) -> None:
    page.goto(runs.url)
    page.wait_for_selector("tr[data-run=other] .chip")
    assert page.get_by_role("button", name="Compare").is_disabled()
    page.get_by_label("Choose one").check()
    page.get_by_label("Choose other").check()
    page.reload()
    assert page.get_by_label("Choose other").is_checked(), "the choice survives a reload"
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("table.scores")
    assert page.locator("table.scores tr").nth(1).locator("td").last.inner_text().startswith("0.167 [")
    cells = "rows => rows.map((row) => [...row.children].map((cell) => cell.innerText))"
    tables = [one.evaluate(f"table => ({cells})([...table.tBodies[0].rows])") for one in page.locator(".tasks").all()]
    assert tables == [
        [["b", "0", "0.5", "−0.5"], ["a", "1", "0", "1"], ["c", "1", "1", "0"]],
        [["mine", "1", "–", "–"]],
        [["–" if cell is None else cell for cell in ("theirs", None, "0.25", None)]],
    ]
    headings = page.locator(".runs-view section h2").all_inner_texts()
    assert headings[-2:] == ["Only in one (1)", "Only in other (1)"]
    page.get_by_role("button", name="Swap").click()
    page.locator("h2.title", has_text="other against one").wait_for()
    page.get_by_label("Split of one").select_option("eval")
    page.wait_for_function("() => location.hash.includes('against=eval')")
    page.reload()
    page.wait_for_selector("table.scores")
    assert page.get_by_label("Split of one").input_value() == "eval"
    page.locator(".tasks a").first.click()
    page.wait_for_selector("article.item")
    assert "/run/" in page.url


def test_the_keyboard_lists_chooses_compares_and_returns(page: Any, runs: Any) -> None:
    page.goto(runs.url)
    page.wait_for_selector("tr[data-run=trained] .chip")
    for key in "jjxjx":
        page.keyboard.press(key)
    assert page.locator("tr.chosen").get_attribute("data-run") == "other"
    page.keyboard.press("c")
    page.wait_for_selector("table.scores")
    page.keyboard.press("u")
    page.wait_for_selector("tr[data-run=other].chosen")
    page.keyboard.press("Enter")
    page.locator(".trow.chosen").wait_for()
    page.keyboard.press("u")
    page.wait_for_selector("tr[data-run=other]")


@pytest.mark.parametrize("width", [1440, 390])
def test_the_list_fits(page: Any, runs: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(runs.url)
    page.wait_for_selector("tr[data-run=trained] .chip")
    _names(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.runs-view').scrollWidth") <= width


def test_a_folder_without_runs_says_so_until_one_begins(page: Any, tmp_path: Path) -> None:
    with serving_view(lambda: Runs(tmp_path)) as server:
        page.goto(server.url)
        page.locator(".state", has_text="No run yet").wait_for()
        run_of(tmp_path / "first", {"a": 1.0})
        page.locator("tr[data-run=first] .chip", has_text="finished").wait_for()
        page.goto(f"{server.url}#/compare/000000000000/000000000000")
        page.locator(".state", has_text="no run 000000000000").wait_for()
    page.trouble[:] = [text for text in page.trouble if "404" not in text]


def test_each_screen_says_what_is_wrong_and_shows_the_rest(page: Any, tmp_path: Path) -> None:
    broken = loop_of(training_run(tmp_path / "broken"), 2, 2, (0.25, 0.75))
    (segment,) = (broken / "tapes").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"go on", b"GO on"))
    (broken / "tapes" / "index.sqlite").unlink(missing_ok=True)
    dead = Store.create(tmp_path / "dead")
    episode(dead, "t", ["42"], 1.0)
    dead.writer.sync()
    dead.abandon()
    loop_of(training_run(tmp_path / "bare"), 3, 0)
    with growing(tmp_path / "growing"), serving_view(lambda: Runs(tmp_path, compare=_compare)) as server:
        page.goto(server.url)
        page.wait_for_selector("tr[data-run=growing] .chip")
        _names(page)
        chips = page.eval_on_selector_all("tr[data-run] .r-state .chip", "all => all.map((one) => one.innerText)")
        assert chips == ["finished", "broken", "died", "running"]
        for name, badge, note in (
            ("broken", "bad", segment.stem),
            ("dead", "warn", "is gone and has not closed it"),
            ("bare", "plain", "metrics.jsonl is missing"),
            ("growing", "plain", None),
        ):
            page.goto(f"{server.url}#/")
            page.locator(f"tr[data-run={name}] a").click()
            page.wait_for_selector(f".badge.{badge}")
            page.evaluate("location.hash = '#/overview'")
            page.wait_for_selector(".overview-view .card")
            told = page.locator(".overview-view").inner_text()
            assert note is None or note in told, name
            assert name == "dead" or "is gone and has not" not in told
            page.evaluate("location.hash = '#/'")
            page.locator(".trow[data-tape]").last.click()
            page.wait_for_selector("article.item:not(.waiting)")
