"""report.html of a training run: what it tells, and that it is there however the run ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.report import run_report
from tapereel.finetune.report.report import ReportData
from tapereel.finetune.report.run_report import Reporter, command, reporting
from tapereel.tapes.audit.faults import Faults
from tapereel.tapes.records import Cause, CauseType
from tapereel.tapes.store.run_directory import open_run
from tapereel.tapes.store.store import Store
from tapereel.tapes.value import Value

from .lab import WORLD, answer_of, refusal_of
from .test_train import train_words
from .world import EXAMPLE


def words_of(page: Path) -> str:
    """The text of a page, without its markup."""
    text = re.sub(r"(?s)<style>.*?</style>|<[^>]*>", " ", page.read_text(encoding="utf-8"))
    return " ".join(text.split())


def test_a_run_s_page_tells_what_became_of_it_and_how_to_check_it(trained: Path):
    page = trained / "report.html"
    told, markup = words_of(page), page.read_text(encoding="utf-8")
    for said in (
        "Training player",
        "3 of 3",
        "after update 1",
        "after update 2",
        "held out, before",
        "in flight",
        "What ended episodes",
        "finished",
        "Over the updates",
        "group_size: 8",
    ):
        assert said in told, said
    for verb in ("verify", "audit", "reproduce", "requery", "show", "view", "explain"):
        assert f"tapereel {verb} {trained}" in told
    assert markup.count("<svg") >= 3, "rewards, loss, mismatch"
    assert re.search(r"package \d+\.\d+\.\d+ python 3\.", told)
    with Store.open(trained) as store:
        books = store.books()
        rewards = {s.id: s.reward for s in store.summaries(split="train", closed=True)}
    assert f"{books.sampled:,} sampled; {books.tokens['trained']:,} trained on" in told
    shown = dict.fromkeys(re.findall(r"#/tape/(\w+)", told))
    assert 2 <= len(shown) <= 3
    best, worst = (rewards[tape] for tape in list(shown)[:2])
    assert (best, worst) == (max(rewards.values()), min(rewards.values()))
    assert list(rewards)[-1] in shown
    assert "at work" not in told
    assert "was ended" not in told


def test_the_answer_names_the_page_and_a_run_at_work_has_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_report, "EVERY", 0.0)
    written: list[ReportData] = []
    write = run_report.write_report

    def keep(path: Any, data: ReportData) -> None:
        written.append(data)
        write(path, data)

    monkeypatch.setattr(run_report, "write_report", keep)
    out = tmp_path / "r"
    found = answer_of(capsys, *train_words(model, out, "evaluation.every=1", "loop.groups=8", "loop.group_size=8"))
    assert found["report"] == str(out / "report.html")
    *at_work, last = written
    assert at_work
    assert all("The run is at work" in data.notes[0] for data in at_work)
    assert last.notes == ()
    assert not list(out.glob("*.part"))


def test_a_run_that_an_error_ends_leaves_a_page_that_says_so(model: str, tmp_path: Path, capsys):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Broken", "--tasks", f"{EXAMPLE}:tasks")
    refusal_of(capsys, *train_words(model, tmp_path / "r", "evaluation.fraction=0", scene=scene), code=1)
    told = words_of(tmp_path / "r" / "report.html")
    assert "The run was ended after 0 of 3 updates" in told
    assert "--resume goes on with it" in told
    assert "x error of the environment: OSError: the world broke at" in told
    assert f"{WORLD}:" in told, "the line that raised"
    assert "error environment" in told, "among what ended episodes"


class Nothing(Value):
    """A configuration."""


def test_control_c_leaves_a_page_and_no_failure_of_the_page_hides_what_ended_the_run(tmp_path: Path, caplog):
    with open_run(tmp_path / "r", Nothing(), begin=lambda: {"lineage": "l"}) as directory:
        with pytest.raises(KeyboardInterrupt), reporting(Reporter(directory, "t", "grpo", 4, 1)):
            raise KeyboardInterrupt
        assert "was ended after 0 of 4 updates" in words_of(tmp_path / "r" / "report.html")
        del directory.results["lineage"]
        with pytest.raises(OSError, match="the disk"), reporting(Reporter(directory, "t", "grpo", 4, 1)):
            raise OSError("the disk")
    assert "report.html was not written; the run is not affected (KeyError" in caplog.text


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
