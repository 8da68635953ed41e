"""The report in one file: its data can't act on the page, and its policy names its own script and style only."""

from __future__ import annotations

import base64
import hashlib
import math
from html.parser import HTMLParser
from pathlib import Path

from tapereel.tapes.store import Store
from tapereel.tapes.view import Overview, overview_of
from tapereel.tapes.view.bundle import not_explained, write_report

from ...front.making import run_of
from ...front.pages import EVIL, data_of, empty_run, overview_in, overview_with, words_of


class _Page(HTMLParser):
    """The tags of a page, each with its attributes, and the text inside each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append("")
        self.open = True

    def handle_data(self, data: str) -> None:
        if self.inside and self.open:
            self.inside[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.open = False


def report(path: Path, overview: Overview) -> str:
    write_report(path / "report.html", empty_run(path / "run"), overview)
    return (path / "report.html").read_text(encoding="utf-8")


def test_all_of_the_overview_is_in_the_file(tmp_path: Path) -> None:
    overview = overview_with("unmistakable")
    report(tmp_path, overview)
    found = overview_in(tmp_path / "report.html")
    assert found["plots"][0]["curves"][0]["y"] == [0.25, 0.5, "NaN", 0.75]
    for plot in found["plots"]:
        plot["curves"][0]["y"][2] = math.nan
    assert Overview.model_validate(found).model_dump_json() == overview.model_dump_json()


def test_text_of_others_can_not_act_on_the_page(tmp_path: Path) -> None:
    plain = _Page(report(tmp_path / "plain", overview_with("x")))
    evil = _Page(report(tmp_path / "evil", overview_with(EVIL)))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert EVIL.split()[0] in words_of(tmp_path / "evil" / "report.html")
    text = (tmp_path / "evil" / "report.html").read_text(encoding="utf-8")
    block = text[text.index('id="data">') + len('id="data">') :]
    assert "<" not in block[: block.index("</script>")]
    assert block.isascii() or "\u202e" not in block


def test_the_policy_names_the_script_and_the_style_of_the_page_and_nothing_else(tmp_path: Path) -> None:
    page = _Page(report(tmp_path, overview_with("x")))
    (policy,) = [a["content"] or "" for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    bodies = {tag if not a else a.get("type", tag): text for (tag, a), text in zip(page.tags, page.inside, strict=True)}

    def digest(text: str) -> str:
        return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{digest(bodies['script'])}';" in policy
    assert f"style-src '{digest(bodies['style'])}';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert [a for tag, a in page.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    links = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href", "action")]
    assert [link for link in links if not (link or "").startswith("#")] == []


def test_a_report_holds_the_tapes_that_it_proposes_and_says_which_it_lacks(tmp_path: Path) -> None:
    played = run_of(tmp_path / "run", [("train", ["7"]), ("train", ["9", "x"]), ("train", ["8", "7"])])
    with Store.open(tmp_path / "run") as store:
        found = overview_of(store)
    assert found.tapes[0].tape == played[0].id, "the best"
    assert {one.tape for one in found.tapes} <= {tape.id for tape in played}
    write_report(tmp_path / "r.html", tmp_path / "run", found.model_copy(update={"tapes": found.tapes[:1]}), chr)
    data = data_of(tmp_path / "r.html")
    assert data["table-0"]["id"] == [found.tapes[0].tape]
    assert [line.split()[:5] for line in data["run"]["left_out"]] == [["1", "of", "the", "run's", "3"]]
    assert data["run"]["integrity"]["holes"] == []
    assert data[f"{found.tapes[0].tape}/explain"]["missing"] == not_explained()


def test_a_run_without_training_has_an_overview(tmp_path: Path) -> None:
    run_of(tmp_path / "run", [("train", ["7"]), ("train", ["x"])])
    with Store.open(tmp_path / "run") as store:
        found = overview_of(store)
    assert found.plots == ()
    assert found.scores == ()
    assert [fault.error.split(":")[0] for fault in found.faults] == ["ValueError"]
    assert [line.split()[1] for line in found.checks] == ["verify", "audit"]
    assert "of the tapes to train on" in found.tapes[0].caption
