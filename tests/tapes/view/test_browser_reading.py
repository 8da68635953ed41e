"""What a person reads in the browser: tool calls, JSON, Markdown, the outline and the list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli.look.view import _compare
from tapereel.tapes.store import Store
from tapereel.tapes.view import Runs, RunView

from .lab import HOSTILE, Recording, episode, wide_run
from .library import Librarian, library_folder
from .serving import served, serving_view, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
PHONE = {"width": 390, "height": 844}


def _step(page: Any, step: int) -> Any:
    """The row of a step in the transcript."""
    return page.locator("article.step", has=page.locator(f"a.step >> text='step {step}'"))


@contextmanager
def _saying(tmp_path: Path, *texts: str) -> Iterator[Any]:
    """The server of a run with one tape, whose observations are these texts."""
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "t")
        for text in texts:
            made.see(text)
        made.end()
    with served(tmp_path / "run") as server:
        yield server


def test_a_tool_call_reads_as_code_with_its_result(page, library):
    show(page, library, "#/tape/u0g0a1")
    assert _step(page, 4).locator(".body").inner_text() == 'count(shelf="92")'
    failed = _step(page, 5)
    assert failed.locator(".body").inner_text() == "KeyError: '92'"
    assert "failed" in failed.get_attribute("class").split()
    colour = "one => getComputedStyle(one).color"
    assert failed.locator(".fragment").evaluate(colour) == failed.locator(".chip.bad").evaluate(colour), "red"
    assert "{" not in _step(page, 2).inner_text()


def test_the_outline_tells_each_turn_in_a_phrase(page, library):
    show(page, library, "#/tape/u0g0a1")
    page.locator(".turn .what > span").nth(3).wait_for()
    assert page.locator(".turn .what > span").all_inner_texts() == [
        'find(title="Dune")',
        '→ {"title": "Dune", "shelf": 92, "room": "B"}',
        'count(shelf="92")',
        "→ KeyError: '92'",
        "I don't know.",
    ]
    assert page.locator(".turn .bad").all_inner_texts() == ["→ KeyError: '92'"]


def test_the_head_of_a_tape_has_its_question_its_answers_and_why_it_failed(page, library):
    lines = "all => all.map(one => one.innerText.split('\\n'))"
    show(page, library, "#/tape/u0g0a1")
    page.locator(".gist dd").first.wait_for()
    assert page.eval_on_selector_all(".gist > div", lines) == [
        ["Question", "How many copies of Dune does the library have?"],
        ["Expected", "86"],
        ["Given", "I don't know."],
    ]
    page.evaluate("location.hash = '#/tape/broken'")
    page.locator(".gist .bad", has_text="TooManyParseErrors: 4 answers were no call").wait_for()


def test_json_is_a_tree_that_unfolds(page, library):
    show(page, library, "#/tape/u5g0a0")
    tree = _step(page, 3).locator(".tree").first
    tree.locator("summary").first.wait_for()
    assert _step(page, 3).locator(".entries .entries").count() == 1
    assert _step(page, 3).locator(".entries .entries > div").count() == 0, "built when it is unfolded"
    _step(page, 3).locator(".entries summary").first.click()
    _step(page, 3).locator(".entries .entries > div").nth(3).wait_for()
    _step(page, 3).locator(".entries .entries summary").first.click()
    _step(page, 3).locator(".entries .entries .entries", has_text="year: 1965").wait_for()
    page.keyboard.press("m")
    assert _step(page, 3).locator(".body").inner_text().startswith('{"title": "Emma", "shelf": 17')
    page.keyboard.press("m")
    tree.wait_for()


@pytest.mark.parametrize(
    "text",
    [
        '{"seed": 12345678901234567890, "rate": 1.50}',
        '{"__proto__": {"polluted": 1}, "constructor": "x"}',
        "[" * 60_000 + "]" * 60_000,
        json.dumps({"x": HOSTILE, HOSTILE: [HOSTILE]}),
        json.dumps(list(range(5000))),
        '{"cut": ',
    ],
    ids=["digits", "prototype", "deep", "hostile", "many", "torn"],
)
def test_json_shows_what_was_written_and_stays_small(page, tmp_path: Path, text: str):
    with _saying(tmp_path, text) as server:
        show(page, server, "#/tape/t/step/0")
        body = _step(page, 0).locator(".body")
        body.wait_for()
        if len(text) > 4000:
            page.keyboard.press("l")
            page.wait_for_function("() => T.app.tape.whole.size === 1")
        shown = body.inner_text()
        assert page.locator("article *").count() < 1000
        for word in {'{"seed': ("12345678901234567890", "1.50"), '{"__pro': ("__proto__", "constructor")}.get(
            text[:7], ()
        ):
            assert word in shown
        assert page.evaluate("[window.pwned, ({}).polluted]") == [None, None]
        assert not any(c in shown for c in "\u202e\u202c\x1b\u200b\ufeff")


def test_markdown_is_formatted_and_one_key_shows_the_raw_text(page, library):
    show(page, library, "#/tape/u5g0a0/step/6")
    answer = _step(page, 6)
    answer.locator(".heading2 em", has_text="Emma").wait_for()
    assert answer.locator("strong", has_text="3 copies").count() == 1
    assert answer.locator("pre.code").inner_text() == "assert count(shelf=17) == 3"
    assert answer.locator(".entry").all_inner_texts() == ["1.\nfind names the shelf", "2.\ncount counts its books"]
    assert answer.locator(".address").inner_text() == "the catalogue (https://library.example/17)"
    assert answer.locator(".body a").count() == 0
    page.keyboard.press("m")
    assert answer.locator(".body").inner_text().startswith("## Copies of *Emma*\n\nThe catalogue says **3 copies**")
    page.reload()
    assert "## Copies" in answer.locator(".body").inner_text(), "the choice is kept"
    page.get_by_role("button", name="Raw").click()
    answer.locator(".heading2").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("**3 copies**")
    page.keyboard.press("Enter")
    assert answer.locator("mark").inner_text() == "**3 copies**", "a match is marked in the raw text"


@pytest.mark.parametrize(
    "text",
    [
        "2*3*4 = 24 and snake_case_name",
        "# @ $ #\n#. . #\n# # #",
        "- - X\n- O -",
        "* * *",
        "5 > 3",
        "a | b",
        "1) \n2) ",
        "x" * 1_000_000,
    ],
)
def test_text_without_markup_stays_as_it_is(page, tmp_path: Path, text: str):
    with _saying(tmp_path, text) as server:
        show(page, server, "#/tape/t/step/0")
        _step(page, 0).locator(".body").wait_for()
        assert _step(page, 0).locator(".body").evaluate("one => one.textContent") == text[:4000]
        assert _step(page, 0).locator(".rich").count() == 0


def test_hostile_markdown_stays_text(page, tmp_path: Path):
    text = (
        f"# {HOSTILE}\n- {HOSTILE}\n> {HOSTILE}\n**{HOSTILE}**\n```<script>\n{HOSTILE}\n```\n|{HOSTILE}|\n"
        "[x](javascript:window.pwned=1) ![y](data:text/html,z) <javascript:window.pwned=1>\n" + "[" * 3000 + "*_`" * 900
    )
    with _saying(tmp_path, text, "`" * 9000, "\u202e" * 2000 + "**b**") as server:
        show(page, server, "#/tape/t/step/0")
        body = _step(page, 0).locator(".body")
        body.locator(".address", has_text="javascript:window.pwned=1").first.wait_for()
        allowed = {"DIV", "P", "SPAN", "CODE", "PRE", "STRONG", "EM", "BLOCKQUOTE"}
        assert set(body.evaluate("one => [...one.querySelectorAll('*')].map((each) => each.tagName)")) <= allowed
        assert body.evaluate("one => one.querySelectorAll('[href], [src]').length") == 0
        assert page.evaluate("window.pwned") is None
        assert not any(c in page.locator("main").evaluate("one => one.textContent") for c in "\u202e\u202c\x1b\u200b")


def test_long_arguments_and_results_fold(page, tmp_path: Path):
    code = "\n".join(f"print({k})" for k in range(100))
    with Store.create(tmp_path / "run") as store:
        made = Librarian(store, "t")
        made.call("run", code=code, limits={"seconds": 3})
        made.result("\n".join(map(str, range(3000))))
        made.end()
    with served(tmp_path / "run") as server:
        show(page, server, "#/tape/t/step/1")
        call = _step(page, 0)
        call.locator("details.fragment").wait_for()
        assert call.locator(".given").is_hidden()
        call.locator("summary").first.click()
        assert call.locator(".given pre").inner_text() == code
        result = _step(page, 1)
        assert "clamped" in result.locator(".body").get_attribute("class")
        page.keyboard.press("l")
        result.get_by_role("button", name="show less").wait_for()
        assert result.locator(".body").inner_text().endswith("\n2999"), "the rest of a text that was cut is read"
        page.keyboard.press("l")
        result.get_by_role("button", name="show more").wait_for()


def test_a_group_wraps_at_punctuation_and_never_within_a_name(page, library):
    page.set_viewport_size(PHONE)
    show(page, library, "#/group/3%2FDune")
    cells = page.locator("table.attempts td .act")
    cells.first.wait_for()
    assert 'find(title="Dune")' in cells.nth(1).inner_text()
    assert page.locator("table.attempts .result.bad").all_inner_texts() == ["→ KeyError: '92'"]
    broken = """all => all.flatMap((one) => {
        const found = [];
        const walk = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
        for (let node = walk.nextNode(); node; node = walk.nextNode())
          for (const word of node.data.matchAll(/[\\w']+/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
        }
        return found;
    })"""
    assert page.eval_on_selector_all("table.attempts td .act, table.attempts td .result", broken) == []


# The list


def _cells(page: Any, tape: str, *names: str) -> list[str]:
    row = page.locator(f'.trow[data-tape="{tape}"]')
    row.locator(".unread").first.wait_for(state="detached")
    return [row.locator(f".c-{name}").inner_text() for name in names]


def test_the_list_shows_question_expected_and_given_answer_reward_and_end(page, library):
    show(page, library)
    assert page.locator(".headings > span").all_inner_texts() == [
        "Question", "Expected", "Given", "Reward", "Ended", "Turns", "Split", "Began",
    ]  # fmt: skip
    shown = "question", "expected", "given", "reward", "status", "turns", "split"
    assert _cells(page, "u5g1a3", *shown) == [
        "How many copies of Ulysses does the library have?", "12", "13", "0", "finished", "3", "train",
    ]  # fmt: skip
    assert _cells(page, "broken", *shown)[2:5] == ["–", "–", "error · agent"]
    order = page.evaluate("T.app.table.found.map((row) => T.app.rows.ids[row])")
    assert order[:2] == ["broken", "endless"]
    assert {tape[:4] for tape in order[-5:]} == {"demo"}, "demonstrations without a reward come last"


def test_an_empty_answer_is_not_a_missing_one(page, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        episode(store, "said nothing", [" "], 0.0)
        made = Recording(store, "did nothing", public={"question": "?"})
        made.end()
    with served(tmp_path / "run") as server:
        show(page, server)
        assert [_cells(page, tape, "given") for tape in ("said nothing", "did nothing")] == [["(empty)"], ["–"]]
        page.evaluate("location.hash = '#/tape/said%20nothing'")
        page.locator(".gist dd", has_text="(empty)").wait_for()


def _scroll(page, share: float) -> None:
    """Scroll to this share of the list, and wait until its rows are drawn."""
    page.evaluate(
        """async (share) => {
            const one = document.querySelector('.rows');
            one.scrollTop = share * one.scrollHeight;
            for (let k = 0; k < 3; k += 1) await new Promise(requestAnimationFrame);
        }""",
        share,
    )


def test_questions_and_answers_are_read_for_rows_in_view_only(page, tmp_path: Path):
    with served(wide_run(tmp_path / "run", 3000)) as server:
        asked: list[int] = []
        page.on("request", lambda one: asked.append(one.url.count(",") + 1) if "/api/gists" in one.url else None)
        held: list[Any] = []
        page.route("**/api/gists?**", lambda route: held.append(route))
        show(page, server)
        row = page.locator(".trow").nth(3)
        row.locator(".c-question .unread").wait_for()
        assert row.locator(".c-given").inner_text() == "", "no value is shown while it loads"
        for route in held:
            route.continue_()
        page.unroute("**/api/gists?**")
        row.locator(".c-question", has_text="What is 6 * 7?").wait_for()
        assert sum(asked) < 70
        for share in (0.3, 0.6, 0.9):
            _scroll(page, share)
            page.wait_for_function("() => !document.querySelector('.rows .unread')")
        assert sum(asked) < 300
        held.clear()
        page.route("**/api/gists?**", lambda route: held.append(route))
        _scroll(page, 0.4)
        while not held:
            page.wait_for_timeout(10)
        _scroll(page, 0.8)  # these rows are drawn before the answer comes
        held[0].abort()
        page.locator(".trow .c-question", has_text="not read").first.wait_for()
    page.trouble.clear()


def test_columns_are_chosen_and_kept_in_the_address(page, library):
    show(page, library)
    page.keyboard.press("c")
    page.get_by_label("column Tape", exact=True).check()
    page.get_by_label("column Began", exact=True).uncheck()
    page.wait_for_function("() => location.hash.includes('cols=question,expected,given,reward,status,turns,split,id')")
    page.reload()
    page.wait_for_selector(".headings .c-id")
    assert page.locator(".headings .c-begun").count() == 0
    assert _cells(page, "u5g1a3", "id") == ["u5g1a3"]
    page.goto(f"{library.url}#/?cols=constructor&sort=constructor")
    page.wait_for_selector(".headings .c-begun")


def test_the_chosen_row_survives_a_reload_and_can_be_linked(page, library):
    show(page, library, "#/?split=train")
    for _ in range(30):
        page.keyboard.press("j")
    chosen = page.locator(".trow.chosen").get_attribute("data-tape")
    page.wait_for_function("id => location.hash === `#/?split=train&row=${id}`", arg=chosen)
    page.reload()
    page.locator(f'.trow.chosen[data-tape="{chosen}"]').wait_for()
    page.wait_for_function(
        "() => { const at = document.querySelector('.trow.chosen').getBoundingClientRect();"
        "return at.top > document.querySelector('.rows').getBoundingClientRect().top && at.bottom < innerHeight; }"
    )
    page.keyboard.press("Enter")
    page.locator("h1", has_text=chosen).wait_for()
    page.keyboard.press("]")
    page.wait_for_function("id => T.app.tape.id !== id && T.app.tape.head", arg=chosen)
    after = page.evaluate("T.app.tape.id")
    page.keyboard.press("u")
    page.locator(f'.trow.chosen[data-tape="{after}"]').wait_for()
    assert page.url.endswith(f"#/?split=train&row={after}")


def test_the_first_row_is_chosen_until_the_user_moves_while_rows_arrive(page, tmp_path: Path):
    run = wide_run(tmp_path / "run", 9000)
    with Store.open(run, write=True) as store:
        episode(store, "failed", ["1"], 0.0, at=1e9)
    held: list[Any] = []
    page.route("**/api/table/1", lambda route: held.append(route))
    with served(run) as server:
        page.goto(server.url)
        page.wait_for_function("() => T.app.rows.length === 8192")
        page.evaluate("T.app.route()")
        page.locator(".trow.chosen").wait_for()
        for route in held:
            route.continue_()
        page.wait_for_function("() => T.app.rows.length === 9001")
        page.locator('.trow.chosen[data-k="0"][data-tape="failed"]').wait_for()


# The phone


def test_on_a_phone_the_content_has_two_thirds_of_the_height(page, library):
    page.set_viewport_size(PHONE)
    show(page, library)
    rows = page.locator(".rows").bounding_box()
    assert rows["y"] <= PHONE["height"] / 3
    assert page.locator(".fields").first.is_hidden(), "the filters are folded"
    row = page.locator('.trow[data-tape="u5g1a3"]')
    row.locator(".c-given", has_text="13").wait_for()
    assert (
        len(
            {
                round(one["y"] / 20)
                for one in (row.locator(f".c-{name}").bounding_box() for name in ("question", "given"))
            }
        )
        == 2
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.keyboard.press("f")
    page.get_by_label("Split", exact=True).select_option("eval")
    page.wait_for_function("() => T.app.table.found.length === 4")


def test_on_a_phone_the_inspector_opens_by_a_tap_and_closes_by_key_and_button(page, library):
    page.set_viewport_size(PHONE)
    show(page, library, "#/tape/u0g0a1")
    inspector = page.locator(".inspector")
    _step(page, 2).wait_for()
    assert inspector.is_hidden()
    assert page.locator(".transcript").bounding_box()["y"] <= PHONE["height"] / 3
    _step(page, 2).locator(".body").click()
    inspector.get_by_role("tab", name="Request").wait_for()
    page.keyboard.press("i")
    assert inspector.is_hidden()
    page.keyboard.press("Enter")
    inspector.get_by_role("button", name="Close the inspector").click()
    assert inspector.is_hidden()
    _step(page, 3).wait_for()


# Keys


def test_every_button_has_a_key_and_help_lists_it(page, library, tmp_path: Path):
    show(page, library)
    page.keyboard.press("?")
    listed = set(page.locator("dialog kbd").all_inner_texts())
    page.keyboard.press("Escape")
    buttons = """all => all
        .filter((one) => one.checkVisibility() && !one.closest('.heading, .turn, .statuses'))
        .map((one) => [one.innerText || one.ariaLabel, one.getAttribute('aria-keyshortcuts')])"""
    for where in ("#/", "#/?status=error", "#/tape/u5g0a0/step/6", "#/group/3%2FDune", "#/overview", "#/curve"):
        page.evaluate(f"location.hash = {where!r}")
        page.wait_for_timeout(300)
        for name, keys in page.eval_on_selector_all("button, summary[aria-keyshortcuts]", buttons):
            assert keys, f"{where}: {name} has no key"
            assert keys in listed, f"{where}: {name}"
    with serving_view(lambda: Runs(library_folder(tmp_path / "runs"), compare=_compare)) as runs:
        page.goto(runs.url)
        page.locator("tr[data-run=library] .r-state .chip").wait_for()
        found = page.eval_on_selector_all("button", buttons)
        for key in "xjxc":
            page.keyboard.press(key)
        page.locator("h2.title", has_text="against").wait_for()
        found += page.eval_on_selector_all("button", buttons)
        assert {keys for _, keys in found} <= listed
        before = page.url
        page.keyboard.press("s")
        page.wait_for_function("before => location.href !== before", arg=before)


def test_keys_do_what_they_say(page, library):
    show(page, library, "#/?split=eval")
    page.keyboard.press("x")
    page.wait_for_function("() => T.app.table.found.length === 59")
    page.keyboard.press("b")
    page.evaluate("location.hash = '#/tape/u5g0a0/step/2'")
    page.get_by_role("tab", name="Tokens").wait_for()
    for key, name in zip("1234", ("Request", "Changes", "Tokens", "Training"), strict=True):
        page.keyboard.press(key)
        assert page.get_by_role("tab", name=name).get_attribute("aria-selected") == "true"
    page.keyboard.press("i")
    assert page.locator(".inspector").is_hidden()
    page.keyboard.press("2")
    page.locator(".inspector").get_by_role("tab", name="Changes").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.wait_for_url(re.compile(r"#/group/5%2FEmma$"))


def test_a_report_has_the_gists_of_its_tapes(page, library, tmp_path: Path):
    from tapereel.tapes.view.bundle import write_view

    with RunView(library.view.store.path) as view:
        write_view(view, tmp_path / "page.html", tapes=["u0g0a1", "u5g0a0"])
    page.goto((tmp_path / "page.html").as_uri() + "#/")
    page.wait_for_function("() => T.app.rows.length === 2")
    assert _cells(page, "u0g0a1", "expected", "given") == ["86", "I don't know."]
    page.evaluate("location.hash = '#/tape/u0g0a1'")
    page.locator(".gist dd", has_text="86").wait_for()


def test_paper_shows_every_level_of_a_tree_and_every_column(page, library):
    show(page, library, "#/tape/u5g0a0/step/3")
    _step(page, 3).locator(".tree").first.wait_for()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert _step(page, 3).locator(".string, .number", has_text="1968").count() == 1
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.evaluate("location.hash = '#/'")
    page.locator(".trow .c-given", has_text="13").first.wait_for()
    page.set_viewport_size({"width": 700, "height": 1000})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # paper doesn't scroll, so all rows are drawn
    page.emulate_media(media="print")  # which applies a moment after this call
    assert page.locator(".trow").count() == 60
    page.wait_for_function(
        "() => [...document.querySelectorAll('.trow > span')].map((one) => one.getBoundingClientRect())"
        ".every((box) => box.right <= innerWidth && box.width >= 20)"
    )
