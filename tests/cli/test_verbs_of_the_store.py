"""`tapereel verify` and `tapereel audit`: verdicts, exit codes, and what they print of a run that holds or doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store

from ..front.making import run_of, sampled_tape


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    run_of(path, [("train", ["7"]), ("train", ["5", "x"])])
    with Store.open(path, write=True) as store:
        for body in sampled_tape("42", logprobs=[-0.5, -0.25, -0.125], spans=(("a:1", 0, 3),)).bodies:
            store.writer.append(body)
    return path


def _json(capsys: pytest.CaptureFixture[str], code: Exit, *words: str) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_sound_run_is_verified_and_its_head_is_a_pin(run: Path, capsys: pytest.CaptureFixture[str]):
    report = _json(capsys, Exit.HOLDS, "verify", str(run))
    assert (report["verdict"], report["episodes"], report["broken"]) == ("holds", 3, [])
    assert _json(capsys, Exit.HOLDS, "verify", str(run), "--pin", report["head"])["broken"] == []
    assert main(["verify", str(run)]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert f"{run}: holds" in shown
    assert report["head"] in shown
    assert "not checked: what agents, environments, models and training did" in shown


def test_an_edited_byte_breaks_both_verdicts(run: Path, capsys: pytest.CaptureFixture[str]):
    segment = sorted((run / "tapes").glob("*.jsonl"))[0]
    segment.write_bytes(segment.read_bytes().replace(b"from 1 to 9", b"from 1 to 8", 1))
    report = _json(capsys, Exit.BROKEN, "verify", str(run))
    assert report["verdict"] == "broken"
    assert main(["verify", str(run)]) == Exit.BROKEN
    shown = capsys.readouterr().out
    assert f"broken: segment {segment.stem}" in shown
    assert "head " not in shown, "the head of a broken run is no pin to keep"
    assert main(["audit", str(run)]) == Exit.BROKEN
    assert "corrupt" in capsys.readouterr().err


def test_a_pin_that_is_not_met_and_one_that_is_none(run: Path, capsys: pytest.CaptureFixture[str]):
    report = _json(capsys, Exit.BROKEN, "verify", str(run), "--pin", "0" * 64)
    assert any("0" * 64 in text for text in report["broken"])
    (run / "bad.json").write_text("[1]")
    for none in ("zz", "", str(run / "bad.json"), str(run / "results.json")):
        assert main(["verify", str(run), "--pin", none]) == Exit.USAGE, none
    assert main(["verify", str(run / "none")]) == Exit.USAGE


def test_a_torn_tail_can_not_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run"
    run_of(path, [("train", ["7"])])
    store = Store.open(path, write=True)
    store.abandon()
    segment = sorted((path / "tapes").glob("*.jsonl"))[-1]
    with segment.open("ab") as file:
        file.write(b'{"n":1,"c":0,"p":"')
    report = _json(capsys, Exit.UNVERIFIABLE, "verify", str(path))
    assert report["verdict"] == "undecided"
    assert len(report["torn"]) == 1


def test_the_books_of_a_run_are_printed_and_close(run: Path, capsys: pytest.CaptureFixture[str]):
    books = _json(capsys, Exit.HOLDS, "audit", str(run))
    assert (books["closes"], books["sampled"], books["sum"]) == (True, 3, 3)
    assert books["tokens"]["held_out"] == 3
    assert (books["begun"], books["ended"], books["open"]) == (3, 3, 0)
    assert main(["audit", str(run)]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "every token is accounted for" in shown
    assert "held out" in shown
    assert "error (agent)" in shown


def test_books_that_do_not_close_are_broken(run: Path, capsys: pytest.CaptureFixture[str]):
    with Store.open(run, write=True) as store:
        tape = store.tape(sampled_tape("42", logprobs=[-0.5, -0.25, -0.125]).id)
        store.append_layer(Use(lineage="a", update=1, items=((tape.id, f"{tape.id}.1", 0, 2, 1.0),)))
    books = _json(capsys, Exit.BROKEN, "audit", str(run))
    assert books["closes"] is False
    assert books["findings"]
    assert main(["audit", str(run)]) == Exit.BROKEN
    assert "some tokens are NOT accounted for" in capsys.readouterr().out
