"""What checks of a run left beside its tapes, and what the viewer makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.tapes.audit import Likely, Verdict, Verdicts, verified
from tapereel.tapes.audit.auditor import _replayed
from tapereel.tapes.audit.verdict import Divergence, diverged, unverifiable
from tapereel.tapes.audit.verdict_files import FOLDER, Checks, keep_verdicts
from tapereel.tapes.store import Store, verify
from tapereel.tapes.view import RunView, write_view

from ...cli.lab import NEXT, SCENE, answer_of, settings
from ...front.pages import data_of
from .lab import HOSTILE, training_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return training_run(tmp_path / "run")


def said_of(run: Path, *verdicts: Verdict, turn: int | None = None, given: Any = None) -> Path:
    """The file of one check."""
    with Store.open(run) as store:
        made = tuple(verdict.of(store.tape(verdict.tape)) for verdict in verdicts)
    kept = keep_verdicts(run, Verdicts(verb=verdicts[0].verb, run=str(run), verdicts=made, turn=turn), given or {})
    assert kept is not None
    return kept


def other(tape: str, text: str = "43", **more: Any) -> Verdict:
    return diverged(
        "replay",
        Divergence(
            tape=tape,
            turn=1,
            step=3,
            field="action.text",
            recorded="42",
            observed=text,
            cause=Likely.CODE,
            sentence=f"the agent says {text}",
            **more,
        ),
    )


def files(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and "index.sqlite" not in path.name
    }


def words(view: RunView, shard: dict[str, Any] | None = None) -> dict[str, str]:
    table = shard or view.table(0)
    coded = table["checks"]
    return dict(zip(table["id"], (coded["words"][at] for at in coded["at"]), strict=True))


def test_a_check_is_a_new_file_and_the_store_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    assert main(["run", *SCENE, "--out", str(run), *settings(f"engine.policy={NEXT}", "count=2")]) == 0
    capsys.readouterr()
    before = files(run)
    kept = [answer_of(capsys, "replay", "agent", str(run))["kept"] for _ in range(2)]
    assert answer_of(capsys, "replay", "agent", str(run), "--no-keep")["kept"] is None
    assert {name: data for name, data in files(run).items() if not name.startswith(FOLDER)} == before
    assert sorted(files(run).keys() - before.keys()) == sorted(str(Path(path).relative_to(run)) for path in kept)
    assert len(set(kept)) == 2, "none is written again"
    assert verify(run).exit_code == 0
    with RunView(run) as view:
        assert set(words(view).values()) == {"replay verified"}
        head = view.head(view.table(0)["id"][0])
    assert [(one["says"], one["fits"]) for one in head["checks"]] == [("verified", True)] * 2
    assert head["checks"][0]["checked"]["calls"] == 1


def test_where_nothing_can_be_written_it_is_said_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    assert main(["run", *SCENE, "--out", str(run), *settings(f"engine.policy={NEXT}", "count=2")]) == 0
    (run / FOLDER).write_text("in the way of a folder, as a disk that can't be written to")
    capsys.readouterr()
    assert main(["replay", "agent", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kept"] is None
    assert json.loads(out)["counts"]["verified"] == 2
    assert "`tapereel view`" in err
    assert str(run) in err


def test_the_newest_verdict_of_each_verb_stands_in_the_table(run: Path):
    with RunView(run) as view:
        rev = view.overview()["rev"]
        assert set(words(view).values()) == {""}
        said_of(run, other("g0a0"), verified("replay", "g0a1"))
        said_of(run, unverifiable("requery", "g0a0", "the weights are gone"))
        found = view.changes(rev)
        assert words(view, found) == {"g0a0": "replay diverged, requery unverifiable", "g0a1": "replay verified"}
        assert view.changes(found["rev"])["n"] == 0
        said_of(run, verified("replay", "g0a0"), given={"agent": "other.py:agent"})
        said_of(run, other("g0a1"), turn=1)
        assert words(view, view.changes(found["rev"])) == {
            "g0a0": "replay verified, requery unverifiable",
            "g0a1": "replay verified",
        }, "one turn is not the tape"
        first, *_, last = view.head("g0a0")["checks"]
    assert (first["verb"], first["given"], last["step"], last["diff"]) == (
        "replay",
        {"agent": "other.py:agent"},
        3,
        ["-42", "+43"],
    )


def test_a_tape_without_an_end_gets_no_verdict(run: Path):
    with Store.open(run) as store:
        (tape,) = store.summaries(closed=False)
        verdict = verified("replay", tape.id).of(store.tape(tape.id))
    assert verdict.digest is None
    assert keep_verdicts(run, Verdicts(verb="replay", run=str(run), verdicts=(verdict,)), {}) is None
    assert not (run / FOLDER).exists()


def test_what_is_not_as_it_was_written_is_not_shown_and_said(run: Path):
    changed, gone = said_of(run, other("g0a0")), said_of(run, verified("requery", "g0a0"))
    broken = run / FOLDER / "replay-20260101T000000Z-e3b0c44298fc1c14.jsonl"
    broken.write_bytes(b"")
    with RunView(run) as view:
        assert words(view)["g0a0"] == "replay diverged, requery verified"
        changed.write_bytes(changed.read_bytes().replace(b'"diverged"', b'"verified"'))
        gone.unlink()
        overview = view.overview()
        assert words(view)["g0a0"] == ""
    holes = [hole for hole in overview["integrity"]["holes"] if FOLDER in hole]
    assert len(holes) == 2
    assert any(changed.name in hole and "bytes" in hole for hole in holes)
    assert any(broken.name in hole for hole in holes)


def test_a_verdict_on_other_content_is_told_apart(run: Path, tmp_path: Path):
    said_of(run, verified("replay", "g0a0"))
    another = training_run(tmp_path / "another")
    shutil.copytree(run / FOLDER, another / FOLDER)
    with RunView(another) as view:
        assert view.head("g0a0")["checks"][0]["fits"] is True, "the same records are the same tape"
    checks = Checks(run)
    assert checks.refresh() == {"g0a0"}
    ((_, verdict),) = checks.of("g0a0")
    keep_verdicts(run, Verdicts(verb="replay", run="", verdicts=(verdict.model_copy(update={"digest": "0" * 64}),)), {})
    with RunView(run) as view:
        assert [one["fits"] for one in view.head("g0a0")["checks"]] == [False, True]


def test_texts_that_no_encoding_has_are_kept_all_the_same(run: Path):
    said_of(run, other("g0a0", "half a character \ud83d and \x1b[31m " + HOSTILE))
    with RunView(run) as view:
        (check,) = view.head("g0a0")["checks"]
    assert "half a character ? and" in check["says"]


def test_a_page_has_them_too(run: Path, tmp_path: Path):
    said_of(run, other("g0a0"))
    with RunView(run) as view:
        write_view(view, tmp_path / "page.html", tapes=["g0a0"])
    data = data_of(tmp_path / "page.html")
    assert "replay diverged" in str(data["table-0"])
    assert "the agent says 43" in str(data["g0a0/head"])


def test_the_audit_asks_for_the_newest_verdict_by_the_run_s_own_weights(run: Path):
    place = Divergence(
        tape="g0a0",
        turn=1,
        step=3,
        field="logprob",
        recorded=-1.0,
        observed=-2.0,
        cause=Likely.CODE,
        sentence="the log-prob differs",
    )
    assert _replayed(run) == {}
    said_of(run, diverged("requery", place), given={"model": "another"})
    assert _replayed(run) == {}
    said_of(run, diverged("requery", place))
    assert _replayed(run) == {"g0a0": "diverged"}
