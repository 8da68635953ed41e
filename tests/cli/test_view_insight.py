"""What the viewer is told of training is what `explain` says, by way of the command line too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.finetune.inspect import view_insight
from tapereel.finetune.inspect.view_insight import TrainingInsight
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView

from ..front.pages import data_of
from .lab import answer_of


def _told(run: Path, tape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the inspector gets: of training, and the first call once the tokenizer is here."""
    with RunView(run, insight=TrainingInsight) as view:
        view.overview()
        told = view.explain(tape)
        call = next(iter(view.map(tape).calls))
        return told, view.call(tape, call)


def _taken(run: Path) -> str:
    with Store.open(run) as store:
        use = [stored.record for stored in store.run_records("use")][-1]
    return use.items[0][0]


def test_advantages_verdict_and_rows_are_those_of_explain(trained: Path, capsys):
    name = _taken(trained)
    told, call = _told(trained, name)
    (found,) = answer_of(capsys, "explain", str(trained), name)["tapes"]
    own = [token for row in found["rows"] for token in row["tokens"] if token["call"] == call["call"]]
    assert told["advantages"][call["call"]] == [token["advantage"] for token in own]
    assert (told["verdict"], told["notes"]) == (found["verdict"], found["notes"])
    assert [(row["own"], row["repeated"], row["tokens"]) for row in told["rows"]] == [
        (row["own"], row["repeated"], len(row["tokens"])) for row in found["rows"]
    ]
    assert call["weights"] == [token["weight"] for token in own]
    assert call["fates"] == [token["fate"] for token in own]


def test_the_tokens_have_the_text_of_the_runs_tokenizer(trained: Path):
    told, call = _told(trained, _taken(trained))
    assert told["decodes"] is True
    assert "".join(call["pieces"]).startswith(call["text"])


def test_a_page_made_on_the_command_line_holds_what_training_tells(trained: Path, tmp_path: Path, capsys):
    name = _taken(trained)
    assert main(["view", str(trained), "--out", str(tmp_path / "page.html"), "--tape", name]) == Exit.HOLDS
    data = data_of(tmp_path / "page.html")
    assert data[f"{name}/explain"]["verdict"].startswith("trained on by update")
    (call,) = data[f"{name}/calls-0"].values()
    assert call["pieces"] is not None


def test_ratios_are_one_where_the_weights_are_those_that_sampled(trained: Path):
    kept = checkpoints(trained / "checkpoints")
    with Store.open(trained) as store:
        digests = {record.version: record.digest for record in (s.record for s in store.run_records("publish"))}
        (version, own) = next((v, one) for v, held in digests.items() for one in kept if one.state["digest"] == held)
        other = next(one for one in kept if one.path != own.path)
        tapes = (tape for tape in store.tapes(version=version, closed=True) if tape.calls[0].sampling.exact)
        name, call = next((t.id, t.calls[0]) for t in tapes if {v for v, _, _ in t.calls[0].spans} == {version})
        same = TrainingInsight(store, str(own.path)).explain(name)
        assert same["ratios"][call.call] == pytest.approx([1.0] * len(call.completion), abs=1e-4)
        assert same["weights"] == str(own.path)
        differ = TrainingInsight(store, str(other.path)).explain(name)["ratios"][call.call]
        assert max(abs(ratio - 1) for ratio in differ) > 1e-4
        assert "ratios" not in TrainingInsight(store).explain(name)


def test_a_tape_too_long_to_be_read_whole_is_not_explained_and_says_why(trained: Path, monkeypatch):
    monkeypatch.setattr(view_insight, "LONGEST", 3)
    told, _ = _told(trained, _taken(trained))
    assert " 3 " in told["missing"]
