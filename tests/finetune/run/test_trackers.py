"""Trackers draw what metrics.jsonl says, on three axes, and can't hurt a run."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tapereel as tr
from tapereel.finetune.run import Axes
from tapereel.finetune.run.trackers import (
    COLUMNS,
    FOLDER,
    TABLE,
    Setting,
    TrackerName,
    Trackers,
    TrackingConfig,
    check_trackers,
    start_tracker,
)
from tapereel.tapes import MissingExtra, Tape

from ...recorded.worlds import Echo

LINES: tuple[dict[str, Any], ...] = (
    {"phase": "sft", "update": 1, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "skipped": None},
    {
        "phase": "rl",
        "update": 2,
        "reward": 0.25,
        "episodes": 8,
        "turns": 2.0,
        "loss": -0.5,
        "skipped": None,
        "ess": math.nan,
        "reward/max": 1.0,
        "mismatch": 1e-6,
    },
    {"phase": "evaluation", "update": 1, "updates": 2, "sampled": 0.5, "greedy": None},
    {"phase": "rl", "update": 3, "reward": None, "episodes": 4, "loss": 0.0, "skipped": "loss"},
)


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.got: list[tuple[int | None, dict[str, float]]] = []
        self.breaks, self.ended = breaks, False
        self.settings: dict[str, Setting] = {}

    def store_init_configuration(self, values: dict[str, Setting]) -> None:
        self.settings |= values

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        if self.breaks:
            raise OSError("the disk is full")
        self.got.append((step, values))

    def finish(self) -> None:
        self.ended = True


@pytest.mark.ledger("F76", "F87")
def test_each_axis_has_a_step_of_its_own():
    axes = Axes()
    points = [point for line in LINES for point in axes.points(line)]
    assert [(point.axis, point.step) for point in points] == [
        ("train", 1),
        ("rollout", 8),
        ("train", 2),
        ("eval", 2),
        ("rollout", 12),
        ("train", 3),
    ]
    assert points[1].values == {
        "rollout/episodes_so_far": 8,
        "rollout/reward": 0.25,
        "rollout/episodes": 8,
        "rollout/turns": 2.0,
        "rollout/reward/max": 1.0,
    }
    assert points[2].values == {"train/update": 2, "train/loss": -0.5, "train/mismatch": 1e-6}
    assert points[3].values == {"eval/update": 2, "eval/sampled": 0.5}
    assert "rollout/reward" not in points[4].values


def test_a_resumed_run_counts_on():
    kept = Kept()
    trackers = Trackers(("tensorboard",), Path(), earlier=LINES[:3], make=lambda name, path: kept)
    trackers.line(LINES[3])
    trackers.close()
    assert [step for step, _ in kept.got] == [12, 3]
    assert kept.ended


@pytest.mark.ledger("F88")
def test_a_tracker_that_fails_is_said_once_and_counted_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    def make(name: str, path: Path) -> Kept:
        if name == "mlflow":
            raise ConnectionError("no server")
        return trackers_by_name.setdefault(name, Kept(breaks=name == "wandb"))

    trackers_by_name: dict[str, Kept] = {}
    trackers = Trackers(("wandb", "mlflow", "tensorboard"), Path(), make=make)
    for line in LINES:
        trackers.line(line)
    trackers.close()
    said = caplog.text
    assert trackers.failures == {"wandb": 6, "mlflow": 6}
    assert len(trackers_by_name["tensorboard"].got) == 6
    assert said.count("FAILED") == 2
    assert "the disk is full" in said
    assert said.count(": 6 ") == 2


CONFIG = {
    "seed": 3,
    "env": None,
    "loop": {"optimiser": {"lr": 1e-3, "betas": [0.9, 0.95]}, "sleep": False, "changes": {}},
    "engine": {"options": {"api_key": "sk-1234567890abcdef1234567890abcdef"}},
}


def test_a_tracker_gets_the_configuration_once_and_without_secrets():
    kept = Kept()
    Trackers(("wandb",), Path(), config=CONFIG, make=lambda name, path: kept)
    assert "1234567890abcdef" not in str(kept.settings.pop("engine.options.api_key"))
    assert kept.settings == {
        "seed": 3,
        "env": "null",
        "loop.optimiser.lr": 1e-3,
        "loop.optimiser.betas": "[0.9, 0.95]",
        "loop.sleep": False,
        "loop.changes": "{}",
    }
    again = Kept()
    Trackers(("wandb",), Path(), config=CONFIG, earlier=LINES, make=lambda name, path: again)
    assert again.settings == {}, "mlflow refuses a setting that changed"


def test_tensorboard_shows_the_configuration(tmp_path: Path):
    pytest.importorskip("tensorboard")
    trackers = Trackers(("tensorboard",), tmp_path, config=CONFIG)
    trackers.close()
    assert trackers.failures == {}
    (written,) = (tmp_path / FOLDER / "tensorboard").glob("*/hparams.yml")
    assert "loop.optimiser.lr: 0.001" in written.read_text()


def test_wandb_gets_no_step_that_could_go_back():
    kept = Kept()
    trackers = Trackers(("wandb",), Path(), make=lambda name, path: kept)
    for line in LINES:
        trackers.line(line)
    assert {step for step, _ in kept.got} == {None}


def test_mlflow_gets_only_names_that_it_takes():
    line = {"phase": "rl", "update": 1, "reward/missing/win@pair(0)": 1, "loss": 2.0}
    got = {}
    for name in ("mlflow", "trackio"):
        kept = Kept()
        Trackers((name,), Path(), make=lambda name, path, kept=kept: kept).line(line)  # type: ignore[arg-type]
        got[name] = [key for _, values in kept.got for key in values if "missing" in key]
    assert got == {"mlflow": ["rollout/reward/missing/win_pair_0_"], "trackio": ["rollout/reward/missing/win@pair(0)"]}


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(MissingExtra, match=r"tapereel\[wandb\]"):
        check_trackers(("wandb",))
    check_trackers(())


@pytest.mark.ledger("F88")
def test_tensorboard_reads_back_what_was_drawn(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(("tensorboard",), tmp_path)
    for line in LINES:
        trackers.line(line)
    trackers.close()
    assert trackers.failures == {}
    events = accumulator.EventAccumulator(str(tmp_path / FOLDER / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, -0.5), (3, 0.0)]
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(8, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("eval/sampled")] == [(2, 0.5)]
    assert "train/ess" not in events.Tags()["scalars"]


class Started:
    """A class of accelerate's trackers that keeps its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.tracker, self.active_run = arguments, self, self
        self.info = self
        self.run_id = "mlflow-1"

    def start(self) -> None: ...
    def define_metric(self, name: str, step_metric: str) -> None: ...


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_run_is_listed_under_the_project_group_and_name_that_it_names(
    name: TrackerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {name: Started})
    for variable in ("WANDB_ERROR_REPORTING", "TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(variable, "here")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def listed(**about: str) -> tuple[Any, ...]:
        tracker: Any = start_tracker(name, tmp_path / "r", TrackingConfig(**about))
        found = tracker.arguments
        if name == "mlflow":
            return found["experiment_name"], (found["tags"] or {}).get("group"), found["run_name"]
        return found["run_name"], found.get("group"), found["name"]

    assert listed() == ("tapereel", None, "r")
    monkeypatch.setenv("WANDB_PROJECT", "of-the-team")
    assert listed() == ("of-the-team", None, "r")
    assert listed(project="p", group="g", name="n") == ("p", "g", "n")


@pytest.fixture
def tapes(tmp_path: Path) -> list[Tape]:
    """Episodes in which an echo scores the answers."""
    run = tr.run(tr.ChatAgent(), Echo, ["3", "14"], ["3", "159"], out=tmp_path / "recorded")
    return list(run.tapes())


@pytest.mark.ledger("F88")
def test_tensorboard_shows_episodes_as_text(tapes: list[Tape], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(("tensorboard",), tmp_path)
    trackers.episodes(3, tapes)
    trackers.close()
    assert trackers.failures == {}
    events = accumulator.EventAccumulator(str(tmp_path / FOLDER / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors(f"{TABLE}/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    for tape in tapes:
        assert f"    tape: {tape.id}" in text
        assert f"    reward: {tape.reward}" in text
    assert "    completion: " in text


def test_every_tracker_gets_the_episodes_as_its_own_kind_of_table(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: dict[str, Any] = {}

    class Table:
        def __init__(self, *, data: list[dict[str, object]]) -> None:
            self.data = data

    class Keeps(Kept):
        active_run = SimpleNamespace(info=SimpleNamespace(run_id="mlflow-1"))

        def log_table(self, name: str, columns: list[str], data: list[list[object]]) -> None:
            got[name] = [dict(zip(columns, row, strict=True)) for row in data]

    kept = {name: Keeps() for name in ("wandb", "trackio", "mlflow")}
    trackio, mlflow = ModuleType("trackio"), ModuleType("mlflow")
    trackio.Table = Table  # type: ignore[attr-defined]
    mlflow.log_table = lambda data, file, run_id: got.update({f"{file} of {run_id}": data})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trackers = Trackers(("wandb", "trackio", "mlflow"), Path(), make=lambda name, path: kept[name])
    trackers.episodes(3, tapes)
    assert trackers.failures == {}
    rows = got[TABLE]
    assert [(row["update"], row["tape"], row["reward"]) for row in rows] == [(3, t.id, t.reward) for t in tapes]
    assert kept["trackio"].got[0][1][TABLE].data == rows  # type: ignore[attr-defined]
    assert got[f"{TABLE}.json of mlflow-1"] == {column: [row[column] for row in rows] for column in COLUMNS}
