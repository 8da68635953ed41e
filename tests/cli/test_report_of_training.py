"""report.html of a training run: what it tells, and that it is there however the run ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli.console import command
from tapereel.finetune.run import run_report
from tapereel.finetune.run.run_report import Reporter, reporting
from tapereel.tapes import Cause, CauseType
from tapereel.tapes.audit.faults import Faults
from tapereel.tapes.store import HeldOut, Results, Store
from tapereel.tapes.store.run_directory import open_run
from tapereel.tapes.value import Value
from tapereel.tapes.view import Overview, overview_of

from ..front.pages import data_of, overview_in, words_of
from .lab import WORLD, answer_of, refusal_of
from .test_train import train_words
from .world import EXAMPLE


def test_a_run_s_page_tells_what_became_of_it_and_how_to_check_it(trained: Path):
    page = trained / "report.html"
    told, overview = words_of(page), overview_in(page)
    for said in (
        "Training player",
        "3 of 3",
        "after update 1",
        "after update 2",
        "held out, before",
        "in_flight",
        "finished",
        "group_size: 8",
    ):
        assert said in told, said
    for verb in ("verify", "audit", "reproduce", "replay model", "show", "view", "explain"):
        assert f"tapereel {verb} {trained}" in told
    assert {"Mean reward of each update's episodes", "Loss", "Mismatch"} <= {
        plot["title"] for plot in overview["plots"]
    }
    assert re.search(r"package \d+\.\d+\.\d+ python 3\.", told)
    with Store.open(trained) as store:
        books = store.books()
        rewards = {s.id: s.reward for s in store.summaries(split="train", closed=True)}
        assert overview_of(store).scores == Overview.model_validate(overview).scores
    assert f"sampled; {books.tokens['trained']:,} trained on" in told
    shown = [one["tape"] for one in overview["tapes"]]
    assert 2 <= len(shown) <= 3
    best, worst = (rewards[tape] for tape in shown[:2])
    assert (best, worst) == (max(rewards.values()), min(rewards.values()))
    assert list(rewards)[-1] in shown
    calls = data_of(page)[f"{shown[0]}/calls-0"]
    assert all("".join(call["pieces"]) for call in calls.values()), "the text of the tokens"
    assert "at work" not in told
    assert "was ended" not in told


def test_a_finished_run_s_page_has_no_warning_and_a_running_one_s_says_that_it_is_written(
    trained: Path, tmp_path: Path
):
    page = data_of(trained / "report.html")["run"]
    integrity = page["integrity"]
    assert [integrity[part] for part in ("broken", "holes", "live")] == [[], [], []]
    assert page["left_out"], "the tapes that the file leaves out"
    with open_run(tmp_path / "r", Nothing(), begin=lambda: Results(lineage="l")) as directory:
        Reporter(directory, "t", "grpo", 4, 1)._write_now(directory.results)
        assert data_of(tmp_path / "r" / "report.html")["run"]["integrity"]["live"]
        with reporting(Reporter(directory, "t", "grpo", 4, 1)):
            pass
    assert data_of(tmp_path / "r" / "report.html")["run"]["integrity"]["live"] == []


def test_the_held_out_line_goes_from_the_first_evaluation_to_the_last(trained: Path):
    held_out = next(
        one for one in overview_in(trained / "report.html")["plots"][0]["curves"] if one["name"] == "held out"
    )
    results = Results.read(trained)
    assert results.before is not None
    assert results.after is not None
    assert held_out["x"] == [0, 1, 2, 3]
    assert [held_out["y"][0], held_out["y"][-1]] == [results.before["sampled"].mean, results.after["sampled"].mean]


def test_the_answer_names_the_page_and_a_run_at_work_has_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_report, "EVERY", 0.0)
    written: list[Overview] = []
    write = run_report.write_report

    def keep(path: Any, run: Any, overview: Overview, decode: Any) -> None:
        written.append(overview)
        write(path, run, overview, decode)

    monkeypatch.setattr(run_report, "write_report", keep)
    out = tmp_path / "r"
    found = answer_of(capsys, *train_words(model, out, "evaluation.every=1", "loop.groups=8", "loop.group_size=8"))
    assert found["report"] == str(out / "report.html")
    held_out = found["held_out"]
    assert held_out["after_change"]["value"] == pytest.approx(held_out["after"] - held_out["before"])
    *at_work, last = written
    assert at_work
    assert all("The run is in progress" in one.notes[0] for one in at_work)
    assert last.notes == ()
    assert not list(out.glob("*.part"))


def test_a_run_that_an_error_ends_leaves_a_page_that_says_so(model: str, tmp_path: Path, capsys):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Broken", "--tasks", f"{EXAMPLE}:tasks")
    refusal_of(capsys, *train_words(model, tmp_path / "r", "evaluation.fraction=0", scene=scene), code=1)
    told = words_of(tmp_path / "r" / "report.html")
    assert "The run was ended after 0 of 3 updates" in told
    assert "Resume it" in told
    assert "environment error OSError: the world broke" in told
    assert f"{WORLD}:" in told, "the line that raised"
    assert "status error cause environment" in told, "among what ended episodes"


class Nothing(Value):
    """A configuration."""


def test_control_c_leaves_a_page_and_no_failure_of_the_page_hides_what_ended_the_run(tmp_path: Path, caplog):
    with (
        open_run(tmp_path / "r", Nothing(), begin=lambda: Results(lineage="l")) as directory,
        pytest.raises(KeyboardInterrupt),
        reporting(Reporter(directory, "t", "grpo", 4, 1)),
    ):
        raise KeyboardInterrupt
    assert "was ended after 0 of 4 updates" in words_of(tmp_path / "r" / "report.html")
    with open_run(tmp_path / "r", Nothing(), resume=True) as directory:
        directory.results.before = {"no such": HeldOut.model_construct()}
        with pytest.raises(OSError, match="disk"), reporting(Reporter(directory, "t", "grpo", 4, 1)):
            raise OSError("the disk")
    assert re.search(r"report\.html.*\(KeyError", caplog.text)


def test_a_command_line_is_read_by_a_shell_as_it_was_meant():
    assert command("show", "a run/of $mine") == "tapereel show 'a run/of $mine'"


def test_an_error_of_one_line_is_one_with_its_first_tape():
    faults = Faults()
    for tape, message, line in (("a", "x", "w.py:1"), ("b", "y", "w.py:1"), ("c", "x", "w.py:2"), ("d", "x", "w.py:1")):
        faults.count(tape, Cause(type=CauseType.ENVIRONMENT, error="OSError", message=message, frame=line))
    assert [str(fault) for fault in faults.most()] == [
        "3 x error of the environment: OSError: x (w.py:1), first on tape a",
        "1 x error of the environment: OSError: x (w.py:2), first on tape c",
    ]
    assert len(faults.most(1)) == 1


def test_a_page_that_can_t_be_written_doesn_t_fail_a_finished_run(tmp_path: Path, caplog):
    with open_run(tmp_path / "r", Nothing(), begin=lambda: Results(lineage="l")) as directory:
        (tmp_path / "r" / "report.html").mkdir()
        with reporting(Reporter(directory, "t", "grpo", 4, 1)):
            pass
    assert re.search(r"report\.html was not written; the run is not affected \(IsADirectoryError", caplog.text)
