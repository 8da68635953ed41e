"""A demo that dies at every kind of moment, in one process after the other, ends as one that was left alone.

Death is an exception that nothing catches, at a chosen record or step of a checkpoint; from then on nothing more
reaches the disk, and what was queued but not written is lost.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.inspect import reproduce
from tapereel.finetune.run import DemoConfig, demonstrations
from tapereel.finetune.run.demonstrations import DEMO, DemoSummary, PicturesDemoConfig, begun_demo
from tapereel.finetune.run.demonstrations import demo as run_demo
from tapereel.finetune.trainer import checkpoint, checkpoints, fitted, save_checkpoint
from tapereel.finetune.trainer.checkpoint import prune, remove_partial
from tapereel.tapes.common import ConfigError, dump_config
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import METRICS, Lease, LeaseLost, RunDir, Store, append_metrics, end_lease, read_metrics
from tapereel.tapes.store.writer import SegmentWriter

from ...tapes.store.synced import Synced
from ..loop.micro import MICRO, UPDATES, WARM, assert_reproduced, assert_sound, closed_tapes, history_of
from .lab import model


class Death(BaseException):
    """The process is gone."""


class Scythe:
    """Kills at the n-th time that a kind of thing is about to happen (or has just happened)."""

    def __init__(self, kind: str, n: int, *, after: bool = False) -> None:
        self.kind, self.left, self.after = kind, n, after
        self.dead = False

    def __repr__(self) -> str:
        return f"{self.kind}-{self.left}{'-after' if self.after else ''}"

    def __call__(self, kind: str, thing: Any) -> Any:
        """`thing()`, unless death comes first."""
        if self.dead:
            raise Death
        self.left -= kind == self.kind
        mine = kind == self.kind and self.left == 0
        if mine and not self.after:
            self._strike(kind)
        result = thing()
        if mine:
            self._strike(kind)
        return result

    def _strike(self, kind: str) -> None:
        self.dead = True
        raise Death(kind)


@contextmanager
def dying(scythe: Scythe, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    append, leave, rename, rmtree = SegmentWriter.append, Store.__exit__, os.rename, shutil.rmtree

    def kind_of(body: bytes) -> str:
        t = json.loads(body)["t"]
        return f"{t} of {json.loads(body).get('split')}" if t == "begin" else t

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "append", lambda self, body: scythe(kind_of(body), lambda: append(self, body)))
        patch.setattr(Store, "__exit__", lambda self, *e: self.abandon() if scythe.dead else leave(self, *e))
        patch.setattr(checkpoint.os, "rename", lambda *a: scythe("rename", lambda: rename(*a)))
        patch.setattr(checkpoint.shutil, "rmtree", lambda *a, **o: scythe("rmtree", lambda: rmtree(*a, **o)))
        yield


def demo(path: Path, *, controls: bool = False) -> DemoSummary:
    return run_demo(MICRO, path, controls=controls, resume=(path / DEMO).exists())


DEATHS = [
    Scythe("step", 90, after=True),  # in the demonstrations
    Scythe("end", 40),  # when one is about to be whole
    Scythe("use", 3, after=True),  # in the imitation
    Scythe("use", 2),
    Scythe("rename", 1),  # the imitation is done, its checkpoint is not there yet
    Scythe("end", 20),  # in the evaluation before
    Scythe("call", 30),  # in rollouts
    Scythe("begin of train", 5, after=True),
    Scythe("use", 1, after=True),  # recorded, not published
    Scythe("publish", 2, after=True),  # both queued, neither acknowledged
    Scythe("rename", 1),  # in the loop: a checkpoint is written but not in its place
    Scythe("rename", 1, after=True),  # it is, and the oldest was to go
    Scythe("rmtree", 2),
    Scythe("end", 30, after=True),
]


@pytest.mark.kill
def test_a_demo_that_dies_at_every_kind_of_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept, missed = tmp_path / "run", {}, []
    for scythe in DEATHS:
        with dying(Scythe(scythe.kind, scythe.left, after=scythe.after), monkeypatch) as _:
            try:
                demo(path)
                missed.append(scythe)
            except Death:
                pass
        now = closed_tapes(path)
        assert {name: now.get(name) for name in kept} == kept
        kept = now
    summary = demo(path)
    assert not missed, "the demo was done before death came: make it longer, or let death come earlier"
    assert summary.held_out["before"] is not None
    assert summary.held_out["after"] is not None
    lineage = json.loads((path / "results.json").read_text())["lineage"]
    assert_sound(path, kept, lineage)
    assert_reproduced(path, tmp_path / "fresh", lineage)
    assert json.loads((path / "results.json").read_text())["reapplied"] > 0


def test_a_demo_with_other_tasks_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    with dying(Scythe("use", 3, after=True), monkeypatch), pytest.raises(Death):
        demo(path)
    monkeypatch.setattr(demonstrations, "word_problems", partial(demonstrations.word_problems, digits=1))
    with pytest.raises(ConfigError, match=r"\btasks\b"):
        demo(path)


@pytest.mark.kill
def test_the_last_checkpoint_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    # Of every two updates one checkpoint, and one at the end of each phase.
    for n in (1, 1 + UPDATES // 2 - 1):
        with dying(Scythe("rename", n), monkeypatch), pytest.raises(Death):
            demo(path)
    demo(path)
    found = {c.update: c.state["pinned"] for c in checkpoints(path / "checkpoints")}
    assert found[WARM]
    assert found[WARM + UPDATES]


def test_controls_begin_at_the_base_where_nothing_was_imitated(tmp_path: Path) -> None:
    config = MICRO.model_copy(
        update={
            "warm": MICRO.warm.model_copy(update={"updates": 0}),
            "loop": MICRO.loop.model_copy(update={"updates": 2}),
        }
    )
    summary = run_demo(config, tmp_path / "run", controls=True)
    assert set(summary.controls or ()) == {"sft", "shuffled"}
    for control in ("sft", "shuffled"):
        results = json.loads((tmp_path / "run" / "controls" / control / "results.json").read_text())
        assert results["base"] == json.loads((tmp_path / "run" / "results.json").read_text())["base"]


def test_a_demo_is_made_longer_unless_it_has_controls(tmp_path: Path) -> None:
    def of(updates: int) -> DemoConfig:
        return MICRO.model_copy(
            update={
                "warm": MICRO.warm.model_copy(update={"updates": 2}),
                "loop": MICRO.loop.model_copy(update={"updates": updates}),
            }
        )

    path = tmp_path / "run"
    run_demo(of(2), path)
    after = json.loads((path / "results.json").read_text())["after"]
    summary = run_demo(of(3), path, controls=True, resume=True)
    results = json.loads((path / "results.json").read_text())
    assert results["evaluations"] == {"2": after}
    assert results["lengths"] == [{"updates": 2, "done": 2}]
    assert summary.held_out["after"] == results["after"]["sampled"]["mean"]
    assert [c.update for c in checkpoints(path / "checkpoints") if c.state["pinned"]] == [2, 4, 5]
    verdict = reproduce(path)
    assert (str(verdict), verdict.of) == ("verified", 5)
    with pytest.raises(UsageError, match=r"loop\.updates=4"):
        run_demo(of(4), path, resume=True)
    begun = begun_demo(path)
    assert begun is not None
    assert begun.loop.updates == 3


def test_a_line_of_metrics_that_death_cut_off_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "run", RunDir.metrics

    def dies(self: RunDir, line: dict[str, Any]) -> None:
        if line["update"] == n:
            raise Death
        write(self, line)

    for n in (3, WARM + 5):
        with monkeypatch.context() as patch:
            patch.setattr(RunDir, "metrics", dies)
            with pytest.raises(Death):
                demo(path)
        if n == 3:  # as if the disk had kept a line whose update it has lost
            append_metrics(path / METRICS, {"phase": "sft", "update": 5, "loss": 0.0})
            with Store.open(path, write=True) as store:  # such a disk has no digest of the file either
                store.record_files(path / METRICS, open=True)
    demo(path)
    lines = [line for line in read_metrics(path / METRICS) if line["phase"] != "evaluation"]
    assert [line["update"] for line in lines] == list(range(1, WARM + UPDATES + 1))
    assert lines[4]["loss"] != 0
    again = lines[WARM + 4]
    assert again["train_seconds"] is None
    assert set(lines[WARM + 5]) - set(again) <= {"groups", "groups_aside", "filled"} | {
        key for key in lines[WARM + 5] if key.startswith(("closed/", "delivery/", "lost/", "mismatch/", "perf/"))
    }
    assert again["grad_norm"] > 0


@pytest.mark.kill
def test_controls_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    demo(path)
    for scythe in (Scythe("use", 2, after=True), Scythe("begin of train", 20, after=True)):
        with dying(scythe, monkeypatch), pytest.raises(Death):
            demo(path, controls=True)
    summary = demo(path, controls=True)
    assert set(summary.controls or ()) == {"sft", "shuffled"}
    for run in (path, path / "controls" / "sft", path / "controls" / "shuffled"):
        store = Store.open(run, cache=False)
        assert store.books().closes, store.books().findings
        assert {stored.record.lead is None for stored in store.run_records("use")} == {False}
        store.close()


def test_a_checkpoint_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch, tmp_path)
    rename, renamed = os.rename, list[Path]()

    def watched(old: Path, new: Path) -> None:
        if new.name.startswith("update-"):
            files = [path for path in old.rglob("*") if path.is_file()]
            assert {path for path in files if synced.content(path) != path.read_bytes()} == set()
            renamed.extend(path.relative_to(old) for path in files)
        rename(old, new)

    monkeypatch.setattr(checkpoint.os, "rename", watched)
    for update in (1, 2):
        made = save_checkpoint(tmp_path / "run" / "checkpoints", model(), {"steps": 1}, {}, update=update, taught={})
        for path in renamed:
            assert synced.left(made.path / path) == (made.path / path).read_bytes(), "and its name when it is saved"
    assert {"state.json", "taught.jsonl", "trainer.pt", "hf/config.json", "hf/model.safetensors"} <= set(
        map(str, renamed)
    )


@pytest.mark.parametrize(
    "death",
    [
        Scythe("rename", 1),
        Scythe("rename", 1, after=True),
        Scythe("rename", 2),
        Scythe("rename", 2, after=True),
        Scythe("rmtree", 2),
        Scythe("rmtree", 3),
        Scythe("rmtree", 3, after=True),
    ],
    ids=repr,
)
def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: Scythe) -> None:
    def save(update: int) -> None:
        save_checkpoint(tmp_path, model(update), {"steps": update}, {"lineage": "l"}, update=update)
        prune(tmp_path, keep=2)

    for update in (1, 2):
        save(update)
    with dying(Scythe(death.kind, death.left, after=death.after), monkeypatch):
        try:
            save(3)
        except Death:
            pass
        else:
            assert death.kind == "rmtree", "death never came"
    found = checkpoints(tmp_path)
    assert [c.update for c in found] in ([1, 2], [1, 2, 3], [2, 3])
    for one in found:
        one.weights()
        assert one.trainer_state() == {"steps": one.update}
    save(3)
    assert [c.update for c in checkpoints(tmp_path)] == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000002", "update-000003"]


@pytest.mark.parametrize("there", [True, False])
def test_a_successor_keeps_the_checkpoints_of_an_earlier_lead_out(tmp_path: Path, there: bool) -> None:
    """The earlier lead is stopped between its last check and the rename, while its successor begins."""
    if there:
        save_checkpoint(tmp_path, model(1), {"steps": 1}, {"lineage": "l"}, update=7)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FileNotFoundError):
        save_checkpoint(
            tmp_path, model(2), {"steps": 2}, {"lineage": "l"}, update=7, check=lambda: remove_partial(tmp_path)
        )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_lead_that_lost_its_lease_writes_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Lease(run) as lease, Store.create(run) as store:
        MICRO.save_model(MICRO.model(run))
        history = history_of(store, run, tmp_path / "fresh", "main")
        store.take_lead(lease)
        history.checkpoint()
        end_lease(run)
        with pytest.raises(LeaseLost):
            history.checkpoint(pinned=True)
        assert [found.state.get("pinned") for found in checkpoints(history.directory)] == [False]
        store.abandon()
    left = history.directory / ".update-000009.1.partial"
    left.mkdir()
    with Lease(run) as lease, Store.open(run, write=True) as store:
        store.take_lead(lease)
        history.store = store
        history.restore()
        assert left.exists(), "a reader changes nothing"
        history.restore(checkpoint_every=1)
        assert not left.exists()


@pytest.mark.parametrize("config", [DemoConfig(model_size="micro"), PicturesDemoConfig()], ids=["text", "pictures"])
def test_a_demo_read_from_its_file_has_the_settings_that_it_began_with(config: DemoConfig, tmp_path: Path) -> None:
    """A profile fills only what is unset, and the file of a demo sets everything."""
    config.save_model(config.model(tmp_path))
    (tmp_path / DEMO).write_text(dump_config(config))
    again = begun_demo(tmp_path)
    assert again is not None
    assert fitted(again.training(tmp_path)) == fitted(config.training(tmp_path))


def test_a_demo_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    text = dump_config(DemoConfig())
    assert "  in_flight: " in text
    (tmp_path / DEMO).write_text(text.replace("  in_flight: ", "  keep_checkpoint_bytes: null\n  publish: "))
    assert begun_demo(tmp_path) == DemoConfig()
