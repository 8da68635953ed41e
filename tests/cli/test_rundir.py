"""A run directory remembers; progress is told in lines where nobody watches."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tapereel.cli.progress_bars import live_progress
from tapereel.finetune import TrainConfig
from tapereel.tapes import Corrupt
from tapereel.tapes.common import Config, ConfigError, load_config
from tapereel.tapes.common.config import FORMAT
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import (
    CONFIG,
    METRICS,
    LeaseLost,
    Results,
    RunDir,
    Store,
    append_metrics,
    end_lease,
    read_metrics,
    verify,
)
from tapereel.tapes.store.disk import MOST_BYTES, NotAFile, file_digest, read_file
from tapereel.tapes.store.reader import PINS
from tapereel.tapes.store.run_directory import RESULTS, open_run


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
    with pytest.raises(UsageError, match="resume=True"), open_run(tmp_path / "r", Settings()):
        pass
    other = Settings(seed=1, inner=Inner(lr=2.0))
    with pytest.raises(ConfigError, match=r": seed, inner\.lr\b"), open_run(tmp_path / "r", other, resume=True):
        pass
    with pytest.raises(ConfigError, match=r": threads\b"), open_run(tmp_path / "r", Settings(threads=2), resume=True):
        pass


def everywhere(port: int, model: str = "m", rewards: str = "a:b") -> TrainConfig:
    """A configuration with servers in all its places."""
    url = f"http://127.0.0.1:{port}"
    served = {"kind": "vllm", "model": model, "urls": [url] * (port % 3), "key_variable": f"KEY_{port}"}
    hosted = {"kind": "litellm", "model": "openai/m", "base_url": url}
    nccl = {"kind": "broadcast", **({"address": "10.0.0.1", "port": port} if port % 3 == 2 else {})}
    players = {
        "one": {"engine": served, "agents": ["one"], "frozen": True},
        "two": {"engine": hosted, "agents": ["two"], "frozen": True},
    }
    return TrainConfig.model_validate(
        {
            "engine": {**served, "weights": nccl, "weights_folder": f"weights/{port}"},
            "players": players,
            "loop": {"agents": ["me"], "teacher": {**served, "model": "teacher"}},
            "rewards": [rewards],
        }
    )


def test_a_run_resumes_with_servers_at_other_addresses(tmp_path: Path):
    with open_run(tmp_path / "r", everywhere(8000)):
        pass
    with open_run(tmp_path / "r", everywhere(8002), resume=True) as run:
        assert run.resumed
    assert load_config(TrainConfig, tmp_path / "r" / "config.yaml") == everywhere(8000)
    other = everywhere(8002, model="n", rewards="http://127.0.0.1:1/score")
    with pytest.raises(ConfigError) as refused, open_run(tmp_path / "r", other, resume=True):
        pass
    named = re.findall(r"(?:engine|players|loop|rewards)[a-z._]*", str(refused.value))
    assert set(named) == {"engine.model", "players.one.engine.model", "rewards"}


def test_a_run_that_was_never_begun_is_not_resumed(tmp_path: Path):
    with (
        pytest.raises(UsageError, match=r"r holds no run.*resume=True"),
        open_run(tmp_path / "r", Settings(), resume=True),
    ):
        pass
    assert not (tmp_path / "r").exists()


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


def test_a_long_phase_says_how_long_the_rest_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = iter([0.0, 20.0, 60.0, 100.0])
    monkeypatch.setattr("tapereel.cli.progress_bars.time.monotonic", lambda: next(clock))
    with live_progress() as progress:
        for done in (10, 11, 13, 20):  # resumed at the tenth of twenty
            progress("train", done, 20, "reward 0.5")
    assert capsys.readouterr().err.splitlines() == [
        "train: 10/20 reward 0.5",
        "train: 11/20 reward 0.5",
        "train: 13/20 reward 0.5, about 0:02:20 left",
        "train: 20/20 reward 0.5",
    ]


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
            results = json.loads((tmp_path / "r" / "results.json").read_text())
            assert results == {"format": FORMAT, "lineage": "x", "seconds": {"n": n}}
    assert not list((tmp_path / "r").glob(".*"))


@pytest.mark.parametrize("name", [CONFIG, RESULTS, METRICS, PINS])
def test_a_file_that_is_larger_than_any_run_writes_is_not_read(tmp_path: Path, name: str):
    """It may be sparse: 300 GB that take no space."""
    with open_run(tmp_path / "run", Settings()) as run:
        run.metrics({"a": 1})
    path, size = tmp_path / "run" / name, MOST_BYTES[name] + 1
    os.truncate(path, size)
    (found,) = (text for text in verify(tmp_path / "run").broken if name in text)
    assert f"{size:,}" in found
    with pytest.raises(NotAFile, match=f"{size:,}"):
        read_file(path)


# A lead that another one replaced


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}


def to_update(updates: int) -> Callable[[RunDir, int, int], str]:
    return lambda run, then, now: f"at {updates}"


WRITES: dict[str, Callable[[RunDir], None]] = {
    "metrics": lambda run: run.metrics({"phase": "rl", "update": 2}),
    "results": lambda run: run.save(),
    "dropped": lambda run: run.drop_metrics(lambda line: line["update"] == 1),
    "digests": lambda run: run.store.record_files(run.path / "results.json"),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_lead_that_lost_its_lease_writes_no_file(tmp_path: Path, write: str):
    path = tmp_path / "r"

    def lead() -> None:
        with open_run(path, Settings()) as run:
            run.metrics({"phase": "rl", "update": 1})
            end_lease(path)
            before.update(files_of(path))
            run.results.seconds["n"] = 1.0
            WRITES[write](run)

    before: dict[str, bytes] = {}
    with pytest.raises(LeaseLost):
        lead()
    assert files_of(path) == before
    with open_run(path, Settings(), resume=True):
        pass
    assert verify(path).exit_code == 0


class Stopped:
    """Stops a lead between a check that passes and the write, as SIGSTOP may; then another lead does the whole run."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.check, self.met = run.path, run.store.check_lead, False
        monkeypatch.setattr(run.store, "check_lead", self)

    def __call__(self) -> None:
        self.check()
        if not self.met:
            self.met = True
            end_lease(self.path)
            with open_run(self.path, Settings(seed=1), resume=True, changes={"seed": to_update(1)}) as later:
                later.metrics({"phase": "rl", "update": 2, "by": "the later one"})
                later.results.seconds["n"] = 2.0
                later.save()
            self.after = files_of(self.path)


@pytest.mark.parametrize("write", WRITES)
def test_a_lead_that_is_stopped_between_check_and_write_changes_nothing(
    tmp_path: Path, write: str, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "r"
    found: list[Stopped] = []

    def lead() -> None:
        with open_run(path, Settings()) as run:
            run.metrics({"phase": "rl", "update": 1})
            found.append(Stopped(run, monkeypatch))
            run.results.seconds["n"] = 1.0
            WRITES[write](run)
            WRITES[write](run)  # the first may have gone into a file that was replaced: then the next check tells

    with pytest.raises(LeaseLost):
        lead()
    assert files_of(path) == found[0].after
    assert verify(path).exit_code == 0, verify(path)
    assert [line.get("by") for line in read_metrics(path / "metrics.jsonl")] == [None, "the later one"]
    assert Results.read(path).seconds["n"] == 2.0
    with open_run(path, Settings(seed=1), resume=True):
        pass


def test_lines_of_an_ended_epoch_count_nowhere_and_hide_nothing(tmp_path: Path):
    path = tmp_path / "r"
    for update in (1, 2):
        with open_run(path, Settings(), resume=update > 1) as run:
            run.metrics({"phase": "rl", "update": update})
    file = path / "metrics.jsonl"
    whole, digest = file.read_bytes(), file_digest(file)
    assert [json.loads(line)["lead"] for line in whole.splitlines()] == [1, 2]
    late = b'{"lead": 1, "phase": "rl", "update": 11}\n'
    for more in (late, late * 2, late[:-9]):
        file.write_bytes(whole + more)
        assert file_digest(file) == digest
        assert verify(path).exit_code == 0
        assert read_metrics(file) == [{"phase": "rl", "update": 1}, {"phase": "rl", "update": 2}]
    # An edit doesn't hide behind an ended epoch: a line either counts, and changes the digest, or is read by nobody.
    first, second = whole.splitlines(keepends=True)
    edits = (
        late + whole,
        first + late + second,
        whole.replace(b'"lead": 2', b'"lead": 1'),
        whole.replace(b'"lead": 1', b'"lead": 3'),
        whole.replace(b'"lead": 2', b'"lead": 0'),
        whole.replace(b'"lead": 1, ', b""),
        whole + late.replace(b'"lead": 1, ', b""),
        whole + late.replace(b'"lead": 1', b'"lead": 2'),
        whole + late.replace(b'"lead": 1', b'"lead":1'),
        whole + late.replace(b'"lead": 1', b'"lead": 1e0'),
        whole + late[:20] + b"\r" + late[20:],
    )
    for edit in edits:
        file.write_bytes(edit)
        assert verify(path).exit_code == 1, edit
        with pytest.raises(Corrupt), open_run(path, Settings(), resume=True):
            pass
    file.write_bytes(whole + late)
    with open_run(path, Settings(), resume=True):
        pass
    assert file.read_bytes() == whole, "a resume cuts them off"


def test_a_crash_while_a_closed_run_is_resumed_leaves_no_old_digest(tmp_path: Path):
    """The settings and results of a run that is made longer change before anything else is recorded."""
    path = tmp_path / "r"
    with open_run(path, Settings()) as run:
        run.metrics({"update": 1})

    def dies(run: RunDir, then: int, now: int) -> str:
        if run.store.writer.when_durable(lambda _: None):
            os._exit(8)
        run.results.seconds["n"] = 1.0
        run.save()
        os._exit(7)

    pid = os.fork()
    if not pid:
        with open_run(path, Settings(seed=1), resume=True, changes={"seed": dies}):
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    with Store.open(path) as store:
        assert store.edited() == []
