"""A run directory remembers; progress is told in lines where nobody watches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tapereel.cli.progress_bars import live_progress
from tapereel.tapes.common.config import Config, ConfigError
from tapereel.tapes.errors import RunExists
from tapereel.tapes.store.run_directory import Results, append_metrics, open_run, read_metrics


class Inner(Config):
    lr: float = 1.0


class Settings(Config):
    seed: int = 0
    threads: int = 1
    inner: Inner = Inner()


def test_results_and_seconds_are_there_for_the_next_process(tmp_path: Path):
    with open_run(tmp_path / "r", Settings(), begin=lambda: Results(lineage="x")) as run:
        assert not run.resumed
        with run.timed("work"):
            run.results.imitated = ["a", "b"]
        run.add_seconds("work", 2.0)
        run.save()
    with open_run(tmp_path / "r", Settings(threads=4), resume=True, free=("threads",)) as run:
        assert run.resumed
        assert (run.results.lineage, run.results.imitated) == ("x", ["a", "b"])
        assert run.results.seconds["work"] >= 2.0


def test_seconds_count_when_the_work_fails(tmp_path: Path):
    with open_run(tmp_path / "r", Settings()) as run:
        with pytest.raises(ZeroDivisionError), run.timed("work"):
            _ = 1 / 0
        assert set(run.results.seconds) == {"work"}


def test_a_run_is_begun_once_and_with_one_configuration(tmp_path: Path):
    with open_run(tmp_path / "r", Settings()):
        pass
    with pytest.raises(RunExists, match="--resume"), open_run(tmp_path / "r", Settings()):
        pass
    other = Settings(seed=1, inner=Inner(lr=2.0))
    with pytest.raises(ConfigError, match=r"seed, inner\.lr differ"), open_run(tmp_path / "r", other, resume=True):
        pass
    with pytest.raises(ConfigError, match="threads differ"), open_run(tmp_path / "r", Settings(threads=2), resume=True):
        pass


def test_resuming_what_was_never_begun_begins_it(tmp_path: Path):
    with open_run(tmp_path / "r", Settings(), resume=True) as run:
        assert not run.resumed


def test_metrics_have_no_number_that_json_lacks(tmp_path: Path):
    append_metrics(tmp_path / "m.jsonl", {"a": math.nan, "b": math.inf, "c": 0.5, "d": None, "e": "x"})
    assert read_metrics(tmp_path / "m.jsonl") == [{"a": None, "b": None, "c": 0.5, "d": None, "e": "x"}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_line_that_a_power_cut_tore_is_not_glued_to_the_next(tmp_path: Path):
    with open_run(tmp_path / "r", Settings()) as run:
        run.metrics({"update": 1})
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "lo')
    with open_run(tmp_path / "r", Settings(), resume=True) as run:
        run.metrics({"update": 2})
    assert read_metrics(tmp_path / "r" / "metrics.jsonl") == [{"update": 1}, {"update": 2}]


def test_progress_in_a_pipe_is_a_line_for_the_first_and_the_last(capsys: pytest.CaptureFixture[str]):
    with live_progress() as progress:
        for k in range(1, 6):
            progress("rolling out", k, 5, "[bold]\x1b[31m")
        progress("training", 0, 3, "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["rolling out: 1/5 [bold]\\x1b[31m", "rolling out: 5/5 [bold]\\x1b[31m", "training: 0/3"]


def test_progress_on_a_terminal_is_a_bar_for_each_phase(monkeypatch: pytest.MonkeyPatch):
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with live_progress() as progress:
        progress("one", 1, 2, "[bold]")
        progress("one", 2, 2, "[bold]")
        progress("two", 1, 1, "")
    shown = sys.stderr.getvalue()
    assert "one" in shown
    assert "2/2" in shown
    assert "[bold]" in shown
    assert "two" in shown


def test_results_are_replaced_as_a_whole(tmp_path: Path):
    with open_run(tmp_path / "r", Settings(), begin=lambda: Results(lineage="x")) as run:
        for n in range(3):
            run.results.seconds["n"] = n
            run.save()
            assert json.loads((tmp_path / "r" / "results.json").read_text()) == {"lineage": "x", "seconds": {"n": n}}
    assert not list((tmp_path / "r").glob(".*"))
