"""Every pane of the viewer in a real browser, on a small training run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.tapes import Picture, Task, Video
from tapereel.tapes.audit import verified
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.store import Store

from ...agents.episode.test_seeing import Player, played
from ...agents.episode.test_seeing_tokens import Babbler
from ...agents.picture_worlds import Cinema, Corners, square
from .lab import HOSTILE, Recording, episode, growing, training_run
from .serving import served, show
from .test_checks import other, said_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


def _tapes(page: Any) -> list[str]:
    page.wait_for_selector(".trow[data-tape]")
    return page.eval_on_selector_all(".trow[data-tape]", "rows => rows.map(row => row.dataset.tape)")


def _note(page: Any, text: str) -> None:
    page.locator(".table-view > .note", has_text=text).wait_for()


def _transcript(page: Any) -> list[str]:
    page.wait_for_selector("article.item:not(.waiting)")
    return page.eval_on_selector_all("article.item", "rows => rows.map(row => row.className)")


def _shades(page: Any) -> list[str]:
    tokens = page.locator(".token-pane .tokens .tok").evaluate_all("all => all.map(one => one.className)")
    return [name.split()[1] for name in tokens]


def test_the_table_lists_failures_first(page, server):
    show(page, server)
    assert _tapes(page) == [
        "broken",
        "slow",
        "running",
        "g1a0",
        "g0a0",
        "forked",
        "g1a3",
        "g1a2",
        "g1a1",
        "g0a3",
        "g0a2",
        "g0a1",
        "held",
    ], "a finished tape without a reward has not failed"
    row = page.locator('[data-tape="g1a0"]')
    row.locator(".c-given", has_text="47").wait_for()
    for word in ("What is 6 * 7?", "42", "finished", "train"):
        assert word in row.inner_text()
    assert "–" in page.locator('[data-tape="held"] .c-reward').inner_text(), "not scored is not zero"
    assert page.locator('[data-tape="g0a0"] .c-reward').inner_text() == "0"


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("status=error", {"broken"}),
        ("status=running", {"running"}),
        ("group=group-1", {"g1a0", "g1a1", "g1a2", "g1a3"}),
        ("min=0&max=0.5", {"g0a0", "g1a0"}),
        ("task=zero", {"broken"}),
        ("version=main%3A1&status=finished&max=0", {"g1a0"}),
        ("split=eval", {"held"}),
        ("unscored=1", {"broken", "running", "held", "slow"}),
        ("agent=solver&task=open", {"running"}),
        ("text=TooManyParseErrors", {"broken"}),
        ("text=go+on", {"running"}),
        ("text=%5EturN%20%5Cd&re=1", set()),
        ("text=%5E4%5B01%5D%24&re=1", {"g0a1", "g1a1", "forked"}),
    ],
)
def test_a_filter_is_an_address(page, server, query: str, fits: set[str]):
    show(page, server, f"#/?{query}")
    if "text=" in query:
        _note(page, "searched ")
    if fits:
        page.wait_for_function("n => T.app.table.found.length === n", arg=len(fits))
        assert set(_tapes(page)) == fits
    else:
        page.get_by_text("No tape fits these filters.").wait_for()
        page.locator(".state").get_by_role("button", name="Clear filters").click()
        page.wait_for_function("() => T.app.table.found.length === 13")


def test_filters_are_set_by_hand(page, server):
    show(page, server)
    page.locator(".status-filter", has_text="error").click()
    assert _tapes(page) == ["broken"]
    assert page.url.endswith("#/?status=error")
    page.locator(".status-filter", has_text="all").click()
    page.get_by_label("Split", exact=True).select_option("eval")
    page.wait_for_function("() => T.app.table.found.length === 1")
    page.get_by_role("button", name="Clear filters").click()
    page.wait_for_function("() => T.app.table.found.length === 13")
    page.get_by_label("group", exact=True).fill("group-0")
    page.keyboard.press("Enter")
    page.wait_for_function("() => T.app.table.found.length === 4")
    _note(page, "4 of 13 tapes · mean reward 0.75 over 4 scored")


def test_a_pattern_that_never_ends_is_stopped_and_the_page_lives(page, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "t")
        made.see("a" * 60 + "!")
        made.end()
    with served(tmp_path / "run") as server:
        show(page, server, "#/?text=%28a%2B%29%2B%24&re=1")
        _note(page, "the pattern took more than 3 s")
        page.evaluate("location.hash = '#/tape/t'")
        page.wait_for_selector("article.item.observation")
        page.get_by_label("Find in this tape").fill("(a|aa)+$")
        page.locator("#find-regex").check()
        page.get_by_label("Find in this tape").press("Enter")
        page.locator("#bar .note", has_text="was stopped").wait_for()
        page.get_by_label("Find in this tape").fill("([")
        page.get_by_label("Find in this tape").press("Enter")
        page.locator("#bar .note", has_text="invalid pattern").wait_for()
        page.get_by_label("Find in this tape").fill("a!")
        page.locator("#find-regex").uncheck()
        page.get_by_label("Find in this tape").press("Enter")
        page.locator("#bar .note", has_text="1 match").wait_for()
        assert page.locator("article mark").inner_text() == "a!"


def test_a_tape_has_an_outline_a_transcript_and_an_inspector(page, server):
    show(page, server, "#/tape/g0a1")
    kinds = _transcript(page)
    assert len(kinds) == 11
    assert "begin" in kinds[0]
    assert "end" in kinds[-1]
    page.wait_for_selector(".turn[data-turn='2']")
    turns = [text.split() for text in page.locator(".turn").all_inner_texts()]
    assert turns == [["0", "40", "→", "no,", "again"], ["1", "41", "→", "no,", "again"], ["2", "42", "1"]]
    page.locator(".turn[data-turn='1']").click()
    page.wait_for_url(re.compile("#/tape/g0a1/call/g0a1.2$"))
    inspector = page.locator(".inspector")
    inspector.get_by_role("tab", name="Request").wait_for()
    assert inspector.locator(".message .body").all_inner_texts() == [
        "turn 0: what is 6 * 7?",
        "40",
        "turn 1: what is 6 * 7?",
        "41",
    ]
    assert str(2**62 + 5) in inspector.inner_text(), "a seed keeps all its digits"
    inspector.get_by_role("tab", name="Changes").click()
    assert "1 message unchanged, 0 gone, 2 new" in inspector.inner_text()
    page.locator("article.step.action").nth(2).click()
    page.wait_for_url(re.compile("#/tape/g0a1/step/5$"))
    assert "reward right 1" in " ".join(inspector.inner_text().split())


def test_what_a_rewritten_history_lost_is_shown(page, server):
    show(page, server, "#/tape/broken/call/broken.2")
    page.get_by_role("tab", name="Changes").click()
    assert page.locator(".message.gone .body").all_inner_texts() == ["Be exact.", "1 / 0?"]
    assert page.locator(".message.fresh .body").all_inner_texts() == ["write a number"]
    assert "history was rewritten" in page.locator(".inspector").inner_text()
    assert page.locator("article.call .chip.hole").inner_text() == "1 log-probs unknown"
    assert page.locator("article.call .chip.bad").inner_text() == "1 error"


def test_tokens_are_shaded_by_what_is_asked_for(page, server):
    show(page, server, "#/tape/broken/call/broken.1")
    page.get_by_role("tab", name="Tokens").click()
    tokens = page.locator(".token-pane .tokens .tok")
    assert _shades(page) == ["p0", "unknown", "p5", "p0"]
    tokens.nth(2).hover()
    assert "log-prob −3 (4.98 %)" in page.locator(".details").inner_text()
    tokens.nth(1).hover()
    assert "log-prob unknown" in page.locator(".details").inner_text()
    page.evaluate("location.hash = '#/tape/g0a0/call/g0a0.1'")
    page.locator("h1", has_text="g0a0").wait_for()
    page.get_by_label("Colour tokens by").select_option("label")
    assert _shades(page) == ["trained", "trained", "unused"]
    page.get_by_label("Colour tokens by").select_option("version")
    assert "main:0" in page.locator(".legend").inner_text()
    for missing in ("advantage", "ratio"):
        page.get_by_label("Colour tokens by").select_option(missing)
        assert page.locator(".token-pane .hole").count() == 1, "what is not known is said to be missing"
        assert "unknown" in tokens.first.get_attribute("class")


def test_advantages_come_from_whoever_knows_training(page, run: Path):
    class Insight:
        decode = staticmethod(lambda token: f"<{chr(token)}>")

        def __init__(self, store: Store) -> None:
            pass

        def explain(self, tape: str) -> dict[str, Any]:
            return {
                "verdict": f"trained on: {tape}",
                "notes": ["a note"],
                "advantages": {"g0a0.1": [-1.5, 0.0]},
                "ratios": {"g0a0.1": [1.4, 1.0, 0.7]},
                "rows": [{"begins": "g0a0.1", "split": None, "repeated": 0, "own": 3, "tokens": 9}],
            }

        def forget(self) -> None:
            pass

    with served(run, insight=Insight) as server:
        show(page, server, "#/tape/g0a0/call/g0a0.1")
        page.get_by_role("tab", name="Tokens").click()
        page.locator(".tok", has_text="<4>").wait_for()
        for colour, expected in (("advantage", ["down3", "p0", "unknown"]), ("ratio", ["up4", "p0", "down4"])):
            page.get_by_label("Colour tokens by").select_option(colour)
            assert _shades(page) == expected
        page.get_by_role("tab", name="Training").click()
        told = page.locator(".inspector").inner_text()
        assert "trained on: g0a0" in told
        assert "a note" in told
        assert "rl update 0 of main" in told


def test_the_attempts_of_a_group_stand_side_by_side(page, server):
    show(page, server, "#/?cols=question,group")
    page.locator('[data-tape="g0a1"] .c-group a').click()
    page.wait_for_selector("table.attempts")
    cells = "rows => rows.map(row => [...row.children].map(cell => cell.innerText.trim()))"
    rows = {row[0]: row[1:] for row in page.eval_on_selector_all("table.attempts tr", cells)}
    assert rows["Attempt"] == ["#0", "#1", "#2", "#3"]
    assert rows["right"] == ["0", "1", "1", "1"]
    assert rows["brevity metric"] == ["0.5"] * 4
    assert rows["against the mean"] == ["−0.75", "0.25", "0.25", "0.25"]
    assert [cell.split()[0] for cell in rows["turn 0"]] == ["47", "40", "42", "42"]
    assert rows["turn 1"] == ["ended", "41\n→ no, again", "ended", "ended"]
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/tape/g0a1"))


def test_a_point_of_the_curve_leads_to_its_tapes(page, server):
    show(page, server, "#/curve")
    page.wait_for_selector(".chart .dot")
    assert page.locator(".chart .dot").count() == 2
    page.locator(".chart").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = page.locator(".curve-view").inner_text()
    assert page.locator(".chart .tick.middle").all_text_contents() == ["0", "1"], "as the sentences name them"
    assert "update 1 of lineage main: mean reward 0.75 over 4 scored, 4 tapes" in told
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"#/\?update=1$"))
    page.wait_for_function("() => T.app.table.found.length === 4")
    assert set(_tapes(page)) == {f"g1a{k}" for k in range(4)}


def test_a_run_without_training_has_a_curve_of_stretches(page, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        for k in range(3):
            episode(store, f"t{k}", ["42"], float(k), at=1000.0 + k)
    with served(tmp_path / "run") as server:
        show(page, server, "#/curve")
        page.wait_for_selector(".chart .dot")
        page.locator(".chart .dot").last.click()
        page.wait_for_function("() => T.app.table.found.length === 1 && location.hash === '#/?update=tapes-3-3'")
        assert _tapes(page) == ["t2"]
        page.reload()
        page.wait_for_function("() => T.app.table.found.length === 1")
        assert _tapes(page) == ["t2"], "the address alone names them"


def test_a_running_experiment_is_followed(page, tmp_path: Path):
    with growing(tmp_path / "run") as store, served(tmp_path / "run") as server:
        show(page, server)
        assert _tapes(page) == ["first"]
        made = Recording(store, "second", public="live")
        made.see("one")
        store.writer.sync()
        page.locator('[data-tape="second"]', has_text="running").wait_for()
        page.locator('[data-tape="second"]').click()
        page.locator(".hole", has_text="This tape has no end yet").wait_for()
        page.locator("article.observation", has_text="one").wait_for()
        made.act("two", made.ask("one", "two"))
        made.end()
        store.writer.sync()
        page.locator("article.action", has_text="two").wait_for()
        page.locator("article.end", has_text="finished").wait_for()
        assert page.locator(".tape-head .hole").count() == 0
        assert page.locator(".pulse").inner_text() == "live"


def test_an_empty_run_says_so_until_something_is_on_tape(page, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        store.writer.sync()
        with served(tmp_path / "run") as server:
            page.goto(server.url)
            page.locator(".state", has_text="No tape yet").wait_for()
            page.evaluate("location.hash = '#/curve'")
            page.locator(".state", has_text="No point yet").wait_for()
            page.evaluate("location.hash = '#/group/nobody'")
            page.locator(".state", has_text="No such group").wait_for()
            page.evaluate("location.hash = '#/'")
            episode(store, "first", ["42"], 1.0)
            store.writer.sync()
            page.locator('[data-tape="first"]').wait_for()
            assert page.locator(".table-view .state").count() == 0


def test_the_keyboard_goes_everywhere(page, server):
    show(page, server)
    page.keyboard.press("j")
    assert page.locator(".trow.chosen").get_attribute("data-tape") == "slow"
    page.keyboard.press("k")
    page.keyboard.press("N")
    page.keyboard.press("n")
    assert page.locator(".trow.chosen").get_attribute("data-tape") == "slow", "the next that failed"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="broken").wait_for()
    page.locator("article.item.chosen").wait_for()
    for k in (1, 2, 3):
        page.keyboard.press("j")
        page.wait_for_function("k => T.app.tape.at === k && T.app.tape.chosen?.record === k", arg=k)
    page.keyboard.press("]")
    page.locator("h1", has_text="slow").wait_for()
    page.keyboard.press("[")
    page.locator("h1", has_text="broken").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("number")
    page.keyboard.press("Enter")
    page.locator("#bar .note", has_text="2 matches").wait_for()
    first = page.evaluate("T.app.tape.at")
    page.keyboard.press("n")
    second = page.evaluate("T.app.tape.at")
    page.keyboard.press("N")
    assert (page.evaluate("T.app.tape.at"), second > first) == (first, True)
    page.keyboard.press("Escape")
    page.wait_for_function("() => T.app.tape.hits.size === 0")
    page.keyboard.press("?")
    assert "next and previous match" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url(re.compile("#/curve"))
    page.keyboard.press("u")
    page.wait_for_selector(".trow")
    page.keyboard.press("/")
    page.keyboard.type("jk?n")
    assert page.evaluate("document.activeElement.value") == "jk?n", "letters are letters where one writes"


def test_light_and_dark_follow_the_system_and_the_button(page, server):
    page.emulate_media(color_scheme="dark")
    show(page, server)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert light != dark
    page.keyboard.press("d")
    assert page.evaluate(ground) == dark
    page.reload()
    page.wait_for_function("() => T.app.rows.length > 0")
    assert page.evaluate(ground) == dark, "the choice is kept"


def test_a_telephone_has_all_of_it_within_its_width(page, server):
    page.set_viewport_size({"width": 390, "height": 844})
    for where, shown in (("#/", ".trow"), ("#/tape/g0a0", "#find"), ("#/curve", ".chart .tick")):
        show(page, server, where)
        page.locator(shown).first.wait_for(state="attached")
        beyond = "[...document.querySelectorAll('#bar *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
        assert page.evaluate(f"document.documentElement.scrollWidth <= innerWidth && {beyond}.length === 0"), where
        if where == "#/curve":
            assert page.locator(shown).first.bounding_box()["height"] >= 10, "numbers that can be read"


def test_a_link_holds_when_the_run_is_indexed_again(page, tmp_path: Path):
    run = training_run(tmp_path / "run")
    with served(run) as server:
        show(page, server, "#/tape/g0a1/step/3")
        page.locator("article.chosen", has_text="step 3").wait_for()
        address = page.url.split("#")[1]
    (run / "tapes" / "index.sqlite").unlink()
    with Store.open(run, write=True) as store:
        episode(store, "aaa-later", ["42"], 1.0)
    with served(run) as server:
        page.goto(f"{server.url}#{address}")
        chosen = page.locator("article.chosen", has_text="step 3")
        chosen.wait_for()
        assert "41" in chosen.inner_text()
        page.evaluate("location.hash = '#/tape/g0a1/step/99'")
        page.locator("#toast", has_text="has no step 99").wait_for()
        page.evaluate("location.hash = '#/tape/nobody'")
        page.locator(".state", has_text="no tape 'nobody'").wait_for()
    page.trouble[:] = [text for text in page.trouble if "404" not in text]


def test_a_badge_says_what_was_checked(page, server):
    show(page, server)
    badge = page.locator(".badge")
    assert badge.get_attribute("class") == "badge plain", "nothing is wrong"
    assert badge.bounding_box()["y"] + badge.bounding_box()["height"] <= page.locator("#bar").bounding_box()["height"]
    badge.locator("summary").click()
    assert (
        "pins, media files, the prefixes of forks and the accounting of tokens: verify checks them"
        in badge.inner_text()
    )
    badge.get_by_role("button", name="Verify every byte").click()
    badge.locator(".verdict", has_text="Verified").wait_for()
    assert badge.get_attribute("class") == "badge good"
    assert "what agents, environments, models and training did" in badge.inner_text()
    page.keyboard.press("Escape")
    assert not badge.evaluate("one => one.open")


def test_a_changed_byte_is_told_loudly(page, tmp_path: Path):
    run = training_run(tmp_path / "run")
    (segment,) = (run / "tapes").glob("*.jsonl")
    (run / "tapes" / "index.sqlite").unlink(missing_ok=True)
    data = segment.read_bytes()
    at = data.rfind(b"go on")
    segment.write_bytes(data[:at] + b"GO on" + data[at + 5 :])
    with served(run) as server:
        show(page, server)
        badge = page.locator(".badge.bad")
        assert "Broken" in badge.inner_text()
        badge.locator("summary").click()
        assert segment.stem in badge.inner_text()


def test_a_fork_shows_what_it_inherited_and_where_it_began(page, server):
    show(page, server, "#/tape/forked")
    assert sum("inherited" in kind for kind in _transcript(page)) == 5
    assert "forked here" in page.locator("article.begin").nth(1).inner_text()
    assert "second-look −1" in page.locator("article.reward").inner_text()
    page.locator(".tape-head a", has_text="forked from").click()
    page.locator("h1", has_text="g0a1").wait_for()
    page.locator(".tape-head a", has_text="forked").wait_for()


def test_a_server_that_went_away_is_said_to_be_gone(page, tmp_path: Path):
    with growing(tmp_path / "run"), served(tmp_path / "run") as server:
        show(page, server)
    page.locator(".pulse.bad", has_text="not connected").wait_for()


def test_what_checks_said_stands_in_the_table_and_on_the_tape(page, tmp_path: Path):
    run = training_run(tmp_path / "run")
    said_of(run, verified("requery", "g0a1"), other("g0a0", HOSTILE).model_copy(update={"verb": "requery"}))
    with served(run) as server:
        show(page, server)
        page.locator('[data-tape="g0a1"] .chip.good[title="requery verified"]', has_text="✓").wait_for()
        said_of(run, other("g0a1"), verified("replay", "g0a2"))
        said_of(run, verified("replay", "g0a1"), turn=1)
        both = '[data-tape="g0a1"] .chip.bad[title="replay diverged, requery verified"]'
        page.locator(both, has_text="✗ ✓").wait_for()
        page.get_by_label("Check", exact=True).select_option("replay diverged, requery verified")
        page.wait_for_function("() => T.app.table.found.length === 1")
        assert _tapes(page) == ["g0a1"]
        page.evaluate("location.hash = '#/tape/g0a1'")
        newest = page.locator(".tape-head > .checked", has_text="replay ✗")
        newest.get_by_text("the agent says 43").wait_for()
        newest.get_by_text("likely cause: code; action.text").click()
        assert newest.locator("pre").inner_text() == "-42\n+43"
        page.locator(".tape-head > .checked", has_text="requery ✓").wait_for()
        page.locator(".tape-head summary", has_text="1 other check").click()
        page.locator(".tape-head details .checked", has_text="turn 1 alone").wait_for()
        newest.get_by_role("link", name="go there").click()
        page.wait_for_selector("article.chosen.action")
        assert page.url.endswith("#/tape/g0a1/step/3")
        page.evaluate("location.hash = '#/tape/g0a0'")
        page.locator(".tape-head > .checked", has_text="<script>window.pwned = 1</script>").wait_for()
        said_of(run, verified("rescore", "g0a0"))
        page.locator(".tape-head > .checked .chip.good", has_text="rescore ✓").wait_for()
    assert page.evaluate("window.pwned") is None


def test_pictures_stand_in_their_steps(page: Any, tmp_path: Path):
    """A thumbnail with size and hash under each text; a click shows the file; a file that doesn't arrive is named."""
    with Store.create(tmp_path / "run") as store:
        tape = played(Corners, ScriptedEngine(["1", "2", "3"]), journal=store.writer)
    names = [picture.name for step in tape.observations for picture in pictures_of(step)]
    page.route(f"**/media/{names[1]}", lambda route: route.abort("connectionfailed"))
    with served(tmp_path / "run") as server:
        show(page, server, f"#/tape/{tape.id}")
        first = page.locator("article.item.observation").first
        first.locator("figcaption", has_text=f"40x30 {names[0][:12]}").wait_for()
        assert "[picture 40x30" in first.inner_text()
        assert first.locator("img").evaluate("one => [one.naturalWidth, one.naturalHeight]") == [40, 30]
        page.locator("p.hole", has_text=f"media file {names[1][:12]}").first.wait_for()
        with page.expect_popup() as opened:
            first.locator("figure a").click()
        opened.value.wait_for_load_state()
        assert opened.value.url.endswith(f"/media/{names[0]}")
        assert opened.value.locator("img").evaluate("one => one.naturalWidth") == 40


def test_pictures_and_frames_of_a_task_stand_in_its_beginning(page: Any, tmp_path: Path):
    film = Video.of([square(1), square(2)], fps=10, indices=(0, 5))
    task = Task(public={"film": film, "shown": Picture.of(square(3))}, private={"hidden": Picture.of(square(0))})

    class CornersOfATask(Corners):
        async def reset(self, task: Task) -> Any:
            return await super().reset(1)

    with Store.create(tmp_path / "run") as store:
        engine = ScriptedEngine(["1", "2", "3"])
        played_once = rollout(Player(), CornersOfATask(), task, engine=engine, journal=store.writer)
        tape = run_async(played_once)
    with served(tmp_path / "run") as server:
        show(page, server, f"#/tape/{tape.id}")
        first = page.locator("article.item.begin").first
        first.locator("figure").nth(3).locator("img").wait_for()
        said = first.locator("figcaption").all_inner_texts()
        assert [line.split()[:2] for line in said[:2]] == [["0.0", "s"], ["0.5", "s"]]
        assert all("s" not in line.split() for line in said[2:])


def test_frames_of_a_video_stand_in_a_row_with_their_times(page: Any, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tape = played(Cinema, ScriptedEngine(["1", "2"]), journal=store.writer)
    names = [picture.name for picture in pictures_of(tape[0])]
    with served(tmp_path / "run") as server:
        show(page, server, f"#/tape/{tape.id}")
        first = page.locator("article.item.observation").first
        first.locator("figcaption", has_text=f"2.5 s 40x30 {names[2][:12]}").wait_for()
        said = [f"{time} s 40x30 {name[:12]}" for time, name in zip(("0.0", "0.5", "2.5"), names, strict=True)]
        assert first.locator("figcaption").all_inner_texts() == said
        assert len({box["y"] for box in (one.bounding_box() for one in first.locator("img").all())}) == 1


def test_the_tokens_of_a_picture_are_one_chip(page: Any, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tape = played(Corners, Babbler(), journal=store.writer)
    (name,) = (picture.name for picture in pictures_of(tape[0]))
    call = tape.calls[0]
    with served(tmp_path / "run") as server:
        show(page, server, f"#/tape/{tape.id}")
        page.locator("article.item.call").first.click()
        page.locator("summary", has_text="New prompt tokens").click()
        chip = page.locator(".tokens .chip.picture")
        chip.wait_for()
        assert chip.count() == 1
        assert chip.inner_text() == "picture, 4 tokens"
        assert chip.get_attribute("title") == f"{name} 40x30 grid 1x4x4"
        assert page.locator(".tokens .tok.context").count() == len(call.new_prompt or ()) - 4
