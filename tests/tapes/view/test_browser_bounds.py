"""What could go wrong in a browser: hostile text, large runs, long tapes, and pages without a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.records import Constraint
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView, write_view

from ...front.making import sampled_tape
from .lab import HOSTILE, hostile_run, long_run, training_run, wide_run
from .serving import served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]


def test_hostile_text_runs_nothing_and_breaks_nothing(page, tmp_path: Path):
    with served(hostile_run(tmp_path / "run")) as server:
        page.goto(f"{server.url}#/?cols=question,given,status,task")
        row = page.locator(".trow[data-tape=hostile]")
        for cell in (".c-task", ".c-question", ".c-given"):
            row.locator(cell, has_text="<script>window.pwned = 1</script>").wait_for()
        row.locator(".c-status").click()
        page.wait_for_selector("article.observation")
        for address in ("a (javascript:pwned)", "[a](javascript:pwned)"):
            whole = page.locator("article.observation").first.inner_text()
            assert f'<img src=x onerror="window.pwned = 1"> {address}' in whole
            for shown in ("U+202E", "U+202C", "␛", "U+200B", "U+FEFF", "U+E0041"):
                assert shown in whole, "what turns, hides or commands is spelled out"
            page.keyboard.press("m")
        kinds = []
        for k in range(page.evaluate("T.app.tape.head.items")):
            page.evaluate("k => T.app.tape.choose(k)", k)
            page.locator("article.chosen:not(.waiting)").wait_for()
            kinds.append(page.locator("article.chosen").get_attribute("class").split()[1])
            text = page.locator("main").evaluate("main => main.textContent")
            assert not any(c in text for c in "\u202e\u202c\x1b\u200b\ufeff\ud800")
        assert (kinds.count("hole"), kinds[-1]) == (3, "end")
        page.goto(f"{server.url}#/tape/unreadable")
        page.locator("article.hole", has_text="this record can't be read").wait_for()
        page.goto(f"{server.url}#/tape/hostile/call/hostile.1")
        for tab in ("Request", "Changes", "Tokens", "Training"):
            page.get_by_role("tab", name=tab).click()
        page.evaluate("T.app.go('#/group/' + encodeURIComponent('<script>g</script>/../..'))")
        page.wait_for_selector("table.attempts")
        page.goto(f"{server.url}#/?text=%3Cscript%3E")
        page.locator(".table-view > .note", has_text="searched").wait_for()
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("({}).polluted") is None
        assert page.evaluate("[...document.scripts].every(one => one.src.startsWith(location.origin))")
        outside = "links => links.every(one => one.getAttribute('href').startsWith('#'))"
        assert page.eval_on_selector_all("a", outside)


def test_a_line_of_ten_megabytes_is_read_in_pieces(page, tmp_path: Path):
    with served(hostile_run(tmp_path / "run")) as server:
        page.goto(f"{server.url}#/tape/hostile/step/1")
        page.locator(".inspector summary", has_text="The whole text: 10,000,000 characters").wait_for()
        page.get_by_role("button", name="Read on").click()
        page.locator(".inspector pre.box").last.wait_for()
        page.get_by_role("button", name="Read on").click()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.inspector pre.box')]"
            ".reduce((sum, box) => sum + box.textContent.length, 0) === 200000"
        )


def test_the_policy_refuses_what_the_test_above_looks_for(page, server):
    """A control: were hostile text ever markup, this is how it would show."""
    page.goto(server.url)
    page.wait_for_function("() => T.app.rows.length > 0")
    refused = page.evaluate("""() => {
        const script = document.createElement('script');
        try { script.textContent = 'window.pwned = 1'; document.body.append(script); }
        catch (error) { return error.name; }
    }""")
    html = page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }")
    assert refused == html == "TypeError"
    with pytest.raises(Exception, match=r"address.*javascript:window"):
        page.evaluate("T.h('a', { href: 'javascript:window.pwned = 1' })")
    with pytest.raises(Exception, match=r"script\b.*data/\.\./\.\./elsewhere\.js"):
        page.evaluate("T.policy.createScriptURL('data/../../elsewhere.js')")
    assert page.evaluate("window.pwned") is None
    page.wait_for_function("() => window.violations.length >= 2")
    page.evaluate("window.violations.length = 0")
    page.trouble.clear()


def _heap(page: Any) -> tuple[float, int]:
    """(MB of JavaScript values, DOM nodes) after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return found["JSHeapUsedSize"] / 1e6, int(found["Nodes"])


def test_a_tape_of_300_000_records_scrolls_with_flat_memory(page, tmp_path: Path):
    with served(long_run(tmp_path / "run", 100_000)) as server:
        page.goto(f"{server.url}#/tape/long")
        page.wait_for_selector("article.step", timeout=60_000)
        assert page.evaluate("T.app.tape.head.records") == 300_002
        heap, nodes = _heap(page)
        seen = set()
        for k in range(1, 41):
            page.evaluate(
                "share => { const place = document.querySelector('.transcript');"
                "place.scrollTop = share * (place.scrollHeight - place.clientHeight); }",
                k / 40,
            )
            page.wait_for_function(
                "share => { const list = T.app.tape.list;"
                "return Math.abs(list.top / (list.total - list.view) - share) < 2e-3; }",
                arg=k / 40,
            )
            page.wait_for_function("() => document.querySelector('article.item:not(.waiting)')")
            seen.add(page.evaluate("T.app.tape.list.at(T.app.tape.list.top)"))
        page.locator("article.end").wait_for()
        assert len(seen) == 40
        assert max(seen) > 299_900
        after, nodes_after = _heap(page)
        assert after < heap + 12, "what was scrolled by is let go"
        assert nodes_after < nodes + 2_500
        page.goto(f"{server.url}#/tape/long/step/150001")
        page.locator("article.chosen", has_text="after 50000 comes another").wait_for()
        drawn = page.locator("article.chosen").bounding_box()
        pane = page.locator(".transcript").bounding_box()
        assert pane["y"] <= drawn["y"] < pane["y"] + pane["height"], "a link into the middle is in view"
        before = page.evaluate("T.app.tape.list.top")
        page.locator(".transcript").hover()
        page.mouse.wheel(0, 300)
        page.wait_for_function("top => Math.abs(T.app.tape.list.top - top - 300) < 40", arg=before)


def test_a_run_of_10_000_tapes_is_a_few_requests_and_few_elements(page, tmp_path: Path):
    with served(wide_run(tmp_path / "run", 10_000)) as server:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        page.wait_for_function("() => T.app.table.found.length === 10000")
        assert len([url for url in asked if "/api/table/" in url]) == 2
        page.wait_for_function("() => !document.querySelector('.rows .unread')")
        assert len([url for url in asked if "/api/" in url and "/changes" not in url]) == 4, "one for all gists in view"
        assert page.locator("*").count() < 1_500
        page.evaluate("document.querySelector('.rows').scrollTop = 1e9")
        page.locator('[data-k="9999"]').wait_for()
        assert page.locator("*").count() < 1_500


def test_25_000_tapes_are_usable_within_two_seconds_of_cpu(page, tmp_path: Path):
    """CPU time of the page's main thread and of this process, which has the server, until the list and its questions
    are shown, the list is sorted again and a tape is open."""
    with served(wide_run(tmp_path / "run", 25_000)) as server:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = time.process_time()
        page.goto(server.url)
        page.wait_for_function(
            "() => T.app.table.found.length === 25000 && document.querySelector('.trow')"
            "&& !document.querySelector('.rows .unread')"
        )
        page.get_by_label("Order").select_option("newest")
        page.wait_for_function("() => T.app.table.base.sort === 'newest'")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.step")
        found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        assert found["TaskDuration"] + time.process_time() - before < 2


UNREAD = "document.querySelector('.rows .unread')"


def test_rows_that_are_drawn_while_others_are_read_are_read_too(page, tmp_path: Path):
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)
        if len(held) > 1:
            route.continue_()

    page.route("**/api/gists*", hold)
    with served(wide_run(tmp_path / "run", 2_000)) as server:
        with page.expect_request("**/api/gists*"):
            page.goto(server.url)
        page.get_by_label("Order").select_option("oldest")
        page.wait_for_function(f"() => T.app.table.base.sort === 'oldest' && {UNREAD}")
        held[0].continue_()
        page.wait_for_function(f"() => !{UNREAD}")
    assert len(held) > 1


def test_more_rows_than_are_read_at_once_are_all_read(page, tmp_path: Path):
    page.set_viewport_size({"width": 1440, "height": 4_000})
    with served(wide_run(tmp_path / "run", 500)) as server:
        page.goto(server.url)
        page.wait_for_function(f"() => document.querySelectorAll('.rows .trow').length > 80 && !{UNREAD}")


def test_a_page_shows_the_same_without_a_server(page, tmp_path: Path):
    file = tmp_path / "page.html"
    with RunView(training_run(tmp_path / "run")) as view:
        write_view(view, file, tapes=[row.id for row in view.store.index.tapes()])
    address = file.as_uri()
    page.goto(f"{address}#/")
    page.wait_for_function("() => T.app.table.found.length === 13")
    badge = page.locator(".badge.plain")
    badge.locator("summary").click()
    assert "Each line was checked as it was read" in badge.inner_text()
    assert badge.get_by_role("button").count() == 0
    page.goto(f"{address}#/tape/g0a1/call/g0a1.3")
    page.get_by_role("tab", name="Request").wait_for()
    assert page.locator(".inspector .message").count() == 6
    page.keyboard.press("/")
    page.keyboard.type("4[01]")
    page.locator("#find-regex").check()
    page.get_by_label("Find in this tape").press("Enter")
    page.locator("#bar .note", has_text="4 matches").wait_for()
    page.goto(f"{address}#/group/group-1")
    page.wait_for_selector("table.attempts")
    page.goto(f"{address}#/curve")
    page.locator(".chart .dot").first.click()
    page.wait_for_function("() => T.app.table.found.length === 4")
    page.goto(f"{address}#/?text=TooManyParseErrors")
    page.wait_for_function("() => T.app.table.found.length === 1")
    page.goto(f"{address}#/tape/nobody")
    page.locator(".state", has_text="no tape nobody is in this report").wait_for()


def test_the_form_that_a_request_demanded_is_shown(page, tmp_path: Path):
    tape = sampled_tape('{"n": 42}', logprobs=None)
    schema = {"type": "object", "title": HOSTILE}
    with Store.create(tmp_path / "run") as store:
        for body in tape.bodies:
            record = json.loads(body)
            if record["t"] == "call":
                form = Constraint(json_schema=schema, tools=("add",), enforced=True)
                body = json.dumps({**record, "constraint": form.model_dump(mode="json")}).encode()
            store.writer.append(body)
    with served(tmp_path / "run") as server:
        page.goto(f"{server.url}#/tape/{tape.id}/call/{tape.id}.1")
        page.get_by_role("tab", name="Request").wait_for()
        inspector = page.locator(".inspector")
        assert "JSON or add, enforced" in inspector.inner_text()
        inspector.get_by_text("Schema of the answer").click()
        assert HOSTILE[:10] in inspector.inner_text()
