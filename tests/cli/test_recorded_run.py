"""A run that commit 9dc43d5 recorded keeps verifying and opening. A run that needs an earlier version is refused with
the commit that reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tapereel.agents.episode.limits import Limits
from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.tapes.common.config import ConfigError, load_config
from tapereel.tapes.errors import UsageError

RECORDED = Path(__file__).parents[1] / "recorded" / "run"
LAST_READER = "9dc43d5"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(RECORDED, tmp_path / "run")


def test_a_recorded_run_verifies_and_opens(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 85
    assert main(["show", "run", "--json"]) == 0
    tapes = json.loads(capsys.readouterr().out)["tapes"]
    assert len(tapes) == 14
    assert main(["show", "run", tapes[0]["id"]]) == 0
    assert "calculator_problem" in capsys.readouterr().out
    assert main(["view", "run", "--out", "page.html"]) == 0


@pytest.mark.parametrize("part", ["agent", "env"])
def test_a_recorded_run_replays(part: str, recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", part, "run", "--json"]) == 0
    assert {one["outcome"] for one in json.loads(capsys.readouterr().out)["verdicts"]} == {"verified"}


@pytest.mark.parametrize(("line", "other"), [("warm: null", "warm: 3"), ("count: null", "refills: 1")])
def test_a_record_of_another_version_names_the_commit_that_reads_it(line: str, other: str, recorded: Path):
    file = recorded / "config.yaml"
    assert load_config(TrainConfig, file).loop.updates == 2
    file.write_text(file.read_text().replace(f"\n{line}\n", f"\n{other}\n"))
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, file)
    assert LAST_READER in str(refused.value)
    assert other.partition(":")[0] in str(refused.value)


def test_a_user_s_own_file_names_no_commit(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("refills: 1\n")
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, file)
    assert LAST_READER not in str(refused.value)


def test_a_class_and_a_limit_of_another_version_name_the_commit(recorded: Path):
    with pytest.raises(UsageError) as refused:
        load_named("tapereel.envs.calculator:Calculator")
    assert LAST_READER in str(refused.value)
    with pytest.raises(UsageError) as refused:
        Limits.recorded({"turns": 2, "seconds": 120.0})
    assert LAST_READER in str(refused.value)
    assert "seconds" in str(refused.value)
