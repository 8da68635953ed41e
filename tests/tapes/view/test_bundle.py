"""The view as one file: what it holds of the tapes, honest about what it is, and inert."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView, bundle, overview_of, write_view
from tapereel.tapes.view.bundle import report_of

from ...front.pages import data_of
from .lab import Recording, hostile_run, long_run


def written(run: Path, page: Path, *tapes: str) -> dict[str, Any]:
    with RunView(run) as view:
        write_view(view, page, tapes=tapes)
    return data_of(page)


def test_a_page_holds_every_answer_of_the_server(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    words = [word for tape in ("g0a0", "g0a1", "brok") for word in ("--tape", tape)]
    assert main(["view", str(run), "--out", str(page), *words, "--json"]) == Exit.HOLDS
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(page), "tapes": 3, "bytes": page.stat().st_size}
    data = data_of(page)
    assert set(data["table-0"]["id"]) == {"g0a0", "g0a1", "broken"}
    with RunView(run) as view:
        view.overview()
        assert data["g0a1/items-0"] == json.loads(json.dumps(view.items("g0a1", 0)))
        assert data["g0a1/calls-0"]["g0a1.2"]["text"] == "41"
        assert data["g0a1/head"]["call_pages"] == [["g0a1.1", "g0a1.2", "g0a1.3"]]
        assert data["curve"] == view.curve()
    assert data["behind/0"]["tapes"] == ["g0a0", "g0a1"]
    assert data["run"]["tapes"] == 3
    assert data["run"]["integrity"]["holes"] == []
    assert [line.split()[:5] for line in data["run"]["left_out"]] == [["3", "of", "the", "run's", "13"]]


def test_a_page_without_chosen_tapes_holds_those_that_the_overview_proposes(run: Path, tmp_path: Path):
    data = written(run, tmp_path / "page.html")
    proposed = {one["tape"] for one in data["report"]["tapes"]}
    assert proposed
    assert set(data["table-0"]["id"]) == proposed


def test_a_page_for_which_nothing_is_proposed_holds_the_newest_tapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Same(tr.Environment):
        async def reset(self, task: int) -> str:
            return str(task)

        async def step(self, action: tr.Action) -> tr.Outcome:
            return tr.Outcome("so", reward=0.0, terminated=True)

    monkeypatch.setattr(bundle, "NEWEST", 3)
    made = tr.run(tr.ChatAgent(), Same, range(4), ["a"], out=tmp_path / "run")
    data = written(made.path, tmp_path / "page.html")
    assert not data["report"]["tapes"]
    assert set(data["table-0"]["id"]) == {tape.id for tape in made.tapes()[-3:]}


def test_what_is_there_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.html").write_text("keep")
    for out in (tmp_path / "mine.html", tmp_path, tmp_path / "page"):
        assert main(["view", str(run), "--out", str(out)]) == Exit.USAGE
        assert str(out) in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["keep"]


def test_hostile_text_is_a_string_in_a_string(tmp_path: Path):
    with RunView(hostile_run(tmp_path / "run")) as view:
        view.overview()
        page = report_of(view, overview_of(view.store), view.store.index.tapes())
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    data = data_of(tmp_path / "page.html")
    assert len([item for item in data["hostile/items-0"]["items"] if item["t"] == "hole"]) == 3
    block = page[page.index('id="data">') + len('id="data">') :]
    assert "<" not in block[: block.index("</script>")]


def test_a_long_tape_is_cut_into_pages(tmp_path: Path):
    data = written(long_run(tmp_path / "run", 700), tmp_path / "page.html", "long")
    assert len([key for key in data if key.startswith("long/items-")]) == 22
    assert len(data["long/items-21"]["items"]) == 2


def test_a_tape_named_like_a_path_writes_nowhere_else(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "../../../escaped")
        made.see("x")
        made.end()
    assert "../../../escaped/head" in written(tmp_path / "run", tmp_path / "page.html", "../../../escaped")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_small_pictures_are_in_the_page_and_it_says_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "EMBEDDED", 100)
    with Store.create(tmp_path / "run") as store:
        small, large, other = b"\x89PNG", b"\x89PNG" * 100, b"more"
        names = [store.media.put(small, ".png"), store.media.put(large, ".png"), store.media.put(other, ".bin")]
        made = Recording(store, "t")
        made.look(*names)
        made.end()
    data = written(tmp_path / "run", tmp_path / "page.html", "t")
    assert [key for key in data if key.startswith("media/")] == [f"media/{names[0][6:]}"]
    assert base64.b64decode(data[f"media/{names[0][6:]}"].partition("base64,")[2]) == small
    assert data["run"]["integrity"]["holes"] == [], "a file that was left out is not missing"
    assert [line.split()[:4] for line in data["run"]["left_out"]] == [["1", "of", "their", "3"]]
    (tmp_path / "run" / "tapes" / "media" / names[2][6:]).unlink()
    holes = written(tmp_path / "run", tmp_path / "again.html", "t")["run"]["integrity"]["holes"]
    assert [names[2][6:] in hole for hole in holes] == [True]
