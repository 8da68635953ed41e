"""The runs that commit 9dc43d5 recorded keep verifying and opening. What would need their settings is refused with the
commit that reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.agents import Limits, RunConfig
from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.finetune import TrainConfig
from tapereel.tapes import NotATape
from tapereel.tapes.common import ConfigError, load_config
from tapereel.tapes.common.config import FORMAT
from tapereel.tapes.errors import OtherVersion, UsageError
from tapereel.tapes.store import Results
from tapereel.tapes.store.run_directory import recorded_settings

from ..recorded.worlds import WORLDS, Division

RECORDED = Path(__file__).parents[1] / "recorded"
LAST_READER = "9dc43d5"
SHOWN = {"text": "question  53", "tools": "ZeroDivisionError", "pictures": "[picture "}
"""Name of a run -> what its tapes show."""
REFUSED = {
    "replay agent": ["replay", "agent", "run"],
    "replay agent with names": ["replay", "agent", "run", "--agent", "tapereel:ChatAgent", "--tokenizer", "model"],
    "replay env": ["replay", "env", "run"],
    "replay model": ["replay", "model", "run", "--model", "model"],
    "reproduce": ["reproduce", "run"],
    "reproduce a checkpoint": ["reproduce", "run", "update-000001"],
    "branch": ["branch", "run", "01", "--at", "1"],
    "train --resume": ["train", "--config", "run/config.yaml", "--out", "run", "--resume"],
    "demo --resume": ["demo", "--out", "run", "--resume"],
}


def contents(run: Path) -> dict[Path, bytes]:
    """The files of a run, without the index, which every reader keeps."""
    files = (path for path in run.rglob("*") if path.is_file() and "index.sqlite" not in path.name)
    return {path: path.read_bytes() for path in files}


@pytest.fixture(params=WORLDS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a recorded run, which is in the folder `run`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDED / request.param, "run")
    return request.param


def test_a_recorded_run_verifies_and_opens(recorded: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "holds"
    assert main(["show", "run", "--last", "100", "--json"]) == 0
    tapes = json.loads(capsys.readouterr().out)["tapes"]
    assert len(tapes) == len(json.loads((RECORDED / f"{recorded}.json").read_text())["episodes"])
    for tape in tapes:
        assert main(["show", "run", tape["id"]]) == 0
    assert SHOWN[recorded] in capsys.readouterr().out
    assert main(["view", "run", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert any(tape["id"] in page for tape in tapes)


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_its_settings_are_refused_with_the_commit_that_reads_them(
    words: list[str], recorded: str, capsys: pytest.CaptureFixture[str]
):
    before = contents(Path("run"))
    assert main(words) == 2
    out, err = capsys.readouterr()
    (sentence,) = err.splitlines()
    assert (out, sentence.count(LAST_READER), sentence.count("run/config.yaml")) == ("", 1, 1)
    assert contents(Path("run")) == before


def test_python_calls_refuse_them_too(recorded: str):
    world, run = WORLDS[recorded], tr.open("run")
    world.save_model("model")
    whole = {"evaluation.fraction": 0}
    for refused in (
        lambda: run.replay(world.agent),
        lambda: run.reproduce(),
        lambda: tr.train(world.agent, world.env, list(world.tasks), "model", out="run", resume=True, settings=whole),
    ):
        with pytest.raises(OtherVersion) as caught:
            refused()
        assert LAST_READER in str(caught.value)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A run of this version."""
    run = tr.run(tr.ChatAgent(), Division, ["1"], ["yes"], out=tmp_path / "run")
    return Path(run.path)


def test_a_run_names_the_format_of_its_settings(new: Path):
    assert Results.read(new).format == FORMAT
    assert load_config(RunConfig, new / "config.yaml").seed == 0
    assert recorded_settings(new)["seed"] == 0


@pytest.mark.parametrize("found", [0, FORMAT + 1, None, "1", [1]])
def test_another_format_is_never_read(found: object, new: Path):
    results = json.loads((new / "results.json").read_text())
    (new / "results.json").write_text(json.dumps({**results, "format": found}))
    for read in (lambda: load_config(RunConfig, new / "config.yaml"), lambda: recorded_settings(new)):
        with pytest.raises(OtherVersion) as caught:
            read()
        assert str(new / "config.yaml") in str(caught.value)
        assert f"{found!r}" in str(caught.value)
    (new / "config.yaml").rename(new / "mine.yaml")
    assert load_config(RunConfig, new / "mine.yaml").seed == 0, "a user's own file has no version"


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\x00", '"format"'])
def test_results_that_cannot_be_read_are_no_other_version(text: str, new: Path):
    (new / "results.json").write_text(text)
    assert load_config(RunConfig, new / "config.yaml").seed == 0
    with pytest.raises(NotATape):
        Results.read(new)


def test_a_setting_that_this_version_does_not_know_names_the_commit(new: Path):
    file = new / "config.yaml"
    file.write_text(file.read_text() + "refills: 1\n")
    with pytest.raises(OtherVersion) as refused:
        load_config(RunConfig, file)
    assert LAST_READER in str(refused.value)
    assert "refills" in str(refused.value)


def test_a_user_s_own_file_names_no_commit(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("refills: 1\n")
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, file)
    assert LAST_READER not in str(refused.value)


def test_a_class_and_a_limit_of_another_version_name_the_commit():
    with pytest.raises(UsageError) as refused:
        load_named("tapereel.envs.calculator:Calculator")
    assert LAST_READER in str(refused.value)
    with pytest.raises(UsageError) as refused:
        Limits.recorded({"turns": 2, "seconds": 120.0})
    assert LAST_READER in str(refused.value)
    assert "seconds" in str(refused.value)
