"""A run in which two processes trained at once, as before leases: readers open it and name what is recorded twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.tapes.store import Store, verify

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
WORDS = ["train", "--agent", f"{EXAMPLE}:player", "--env", f"{EXAMPLE}:Digits", "--tasks", f"{EXAMPLE}:tasks"]
SETTINGS = ("loop.updates=2", "loop.groups=4", "loop.group_size=8", "evaluation.fraction=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    model = tr.save_tiny_model(folder / "model", alphabet="0123456789", size="micro")
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    assert main([*WORDS, "--model", model, "--out", str(folder / "run"), *sets]) == 0
    return folder / "run"


@pytest.fixture
def doubled(trained: Path, tmp_path: Path) -> Path:
    run = shutil.copytree(trained, tmp_path / "run")
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
    assert main(["scores", str(doubled)]) == 0
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
