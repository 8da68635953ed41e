"""The view as files: whole, cut into shards, honest about what it is, and inert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.tapes.store.store import Store
from tapereel.tapes.view import RunView
from tapereel.tapes.view.bundle import static_files, write_bundle

from .lab import Recording, hostile_run, long_run


def _data(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / "data" / f"{name}.js").read_text(encoding="ascii")
    match = re.fullmatch(r"T\.take\((.*)\);\n", text)
    assert match, "one call with one literal, and nothing that could run"
    return {key: json.loads(value) for key, value in json.loads(match[1]).items()}


def test_a_bundle_holds_every_answer_of_the_server(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert main(["view", str(run), "--out", str(out), "--json"]) == Exit.HOLDS
    told = json.loads(capsys.readouterr().out)
    assert (told["tapes"], told["verdict"]) == (13, "holds")
    assert told["files"] == sum(path.is_file() for path in out.rglob("*"))
    assert told["bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shards, table = _data(out, "shards")["shards"], _data(out, "table-0")["table"]
    assert set(shards) == set(table["id"])
    tapes = _data(out, "tapes-0")
    with RunView(run) as view:
        view.overview()
        assert tapes["g0a1/items-0"] == json.loads(json.dumps(view.items("g0a1", 0)))
        assert tapes["g0a1/calls-0"]["g0a1.2"]["text"] == "41"
        assert tapes["g0a1/head"]["call_pages"] == [["g0a1.1", "g0a1.2", "g0a1.3"]]
        assert _data(out, "curve")["curve"] == view.curve()
    assert _data(out, "behind-0")["behind/1"]["tapes"] == [f"g1a{k}" for k in range(4)]
    assert _data(out, "run")["run"]["integrity"]["kind"] == "verify"


def test_a_bundle_of_some_tapes_says_that_others_are_not_in_it(run: Path, tmp_path: Path):
    with RunView(run) as view:
        assert write_bundle(view, tmp_path / "last", last=3)["tapes"] == 3
        assert write_bundle(view, tmp_path / "two", tapes=["g0a0", "brok"])["tapes"] == 2
    overview = _data(tmp_path / "two", "run")["run"]
    assert overview["tapes"] == 2
    assert any("11 of the run's 13 tapes are not in this bundle" in hole for hole in overview["integrity"]["holes"])
    assert any("this bundle itself" in line for line in overview["integrity"]["not_checked"])
    assert set(_data(tmp_path / "two", "shards")["shards"]) == {"g0a0", "broken"}
    assert _data(tmp_path / "two", "behind-0")["behind/0"]["tapes"] == ["g0a0"]


def test_a_folder_that_holds_something_is_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["view", str(run), "--out", str(tmp_path)]) == Exit.USAGE
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert main(["view", str(run), "--out", str(tmp_path / "x"), "--last", "0"]) == Exit.USAGE


def test_the_page_of_a_bundle_has_its_policy_in_it(run: Path, tmp_path: Path):
    with RunView(run) as view:
        write_bundle(view, tmp_path / "out", last=1)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert '<html lang="en" data-bundle>' in page
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy.startswith("default-src 'none'; script-src 'self' file:;")
    assert "unsafe" not in policy
    assert page.index("Content-Security-Policy") < page.index("<script")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*static_files(), "data"}


def test_hostile_text_is_a_string_in_a_string(tmp_path: Path):
    with RunView(hostile_run(tmp_path / "run")) as view:
        write_bundle(view, tmp_path / "out")
    for path in (tmp_path / "out" / "data").rglob("*.js"):
        assert path.read_bytes().isascii()
        assert path.read_bytes().count(b"\n") == 1
    parts = _data(tmp_path / "out", "tapes-0")
    assert "hostile/head" in parts
    assert len([item for item in parts["hostile/items-0"]["items"] if item["t"] == "hole"]) == 3


def test_a_long_tape_has_files_of_its_own_and_none_is_named_by_the_tape(tmp_path: Path):
    with RunView(long_run(tmp_path / "run", 700)) as view:
        write_bundle(view, tmp_path / "out")
    assert _data(tmp_path / "out", "shards")["shards"] == {"long": "long-0/"}
    assert len(list((tmp_path / "out" / "data" / "long-0").glob("items-*.js"))) == 22
    assert len(_data(tmp_path / "out", "long-0/items-21")["long/items-21"]["items"]) == 2


def test_a_tape_named_like_a_path_writes_nowhere_else(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "../../../escaped")
        made.see("x")
        made.end()
    with RunView(tmp_path / "run") as view:
        write_bundle(view, tmp_path / "out")
    assert _data(tmp_path / "out", "shards")["shards"] == {"../../../escaped": "tapes-0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_media_go_with_the_bundle_and_one_that_is_gone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with Store.create(tmp_path / "run") as store:
        kept, lost = store.media.put(b"\x89PNG", ".png"), store.media.put(b"gone", ".bin")
        made = Recording(store, "t")
        made.look(kept, lost)
        made.end()
    (tmp_path / "run" / "tapes" / "media" / lost[6:]).unlink()
    with RunView(tmp_path / "run") as view:
        assert write_bundle(view, tmp_path / "out")["verdict"] == "broken"
    assert [path.name for path in (tmp_path / "out" / "media").iterdir()] == [kept[6:]]
    assert "is missing, but a record names it" in caplog.text
