"""A run in which two processes trained at once, as before leases: readers open it and name what is recorded twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.verifier import verify

RECORDED = Path(__file__).resolve().parents[1] / "recorded"


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(RECORDED / "run", run)
    shutil.copytree(RECORDED / "model", tmp_path / "model")
    shutil.copy(RECORDED / "tasks.json", tmp_path)
    with Store.open(run, write=True) as store:
        for use in [stored.record for stored in store.run_records("use")]:
            store.writer.append(use.body())
    return run


def test_verify_lists_the_updates(doubled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(doubled)
    assert report.exit_code == 1
    assert "(update 0, 1)" in report.broken[0]
    assert main(["verify", str(doubled)]) == 1
    assert "(update 0, 1)" in capsys.readouterr().out
    assert main(["show", str(doubled)]) == 0


def test_its_tapes_can_be_read(doubled: Path, tmp_path: Path) -> None:
    assert main(["view", str(doubled), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["eval", str(doubled)]) == 0
    assert main(["replay", "agent", str(doubled)]) == 0


def test_it_takes_no_further_update(
    doubled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open(doubled) as store:
        before = sum(1 for _ in store.run_records("use"))
    assert main(["train", "--config", str(doubled / "config.yaml"), "--out", str(doubled), "--resume"]) != 0
    assert "(update 0, 1)" in capsys.readouterr().err
    with Store.open(doubled) as store:
        assert sum(1 for _ in store.run_records("use")) == before
