"""The demo with pictures, a few updates of it: recorded, verified, replayed, asked again and reproduced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes.common import dump_config
from tapereel.tapes.store import Store
from tests.finetune.loop.micro import PICTURED

pytestmark = pytest.mark.docs

LOOP = PICTURED.loop.model_copy(update={"updates": 2, "checkpoint_every": 1})
SMALL = PICTURED.model_copy(update={"warm": PICTURED.warm.model_copy(update={"updates": 2}), "loop": LOOP})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictured")
    (folder / "small.yaml").write_text(dump_config(SMALL))
    assert main(["demo", "--pictures", "--config", str(folder / "small.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_rows_with_pictures_are_trained_on_and_the_books_close(run: Path):
    with Store.open(run) as store:
        assert store.books().closes
        tapes = list(store.tapes(split="train"))
        assert all(len(tape.call_places(call)) == k + 1 for tape in tapes for k, call in enumerate(tape.calls))
    assert any(line["phase"] == "rl" for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


@pytest.mark.parametrize("words", [["verify"], ["replay", "agent"], ["replay", "env"], ["reproduce"]])
def test_what_is_recorded_holds(run: Path, words: list[str], capsys: pytest.CaptureFixture[str]):
    code = main([*words, str(run), "--json"])
    assert code == 0, capsys.readouterr().out[-2000:]


def test_a_process_that_knows_no_lamp_finds_the_pictures_by_their_places(run: Path):
    """The step's class isn't imported there, so no field of the step is known to be a picture."""
    command = [sys.executable, "-m", "tapereel.cli", "replay", "model", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    verdicts = json.loads(done.stdout)["verdicts"]
    with Store.open(run) as store:
        shown = {tape.id for tape in store.tapes(split="demo")}
    # No model sampled the demonstrations.
    assert {v["tape"] for v in verdicts if v["outcome"] != "verified"} == shown


def test_blind_belongs_to_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--blind", "--out", str(tmp_path / "run")]) == 64
    assert "add --pictures" in capsys.readouterr().err


def test_the_vision_model_has_one_size(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--pictures", "--model-size", "tiny", "--dry-run"]) == 64
    assert "--model-size tiny" in capsys.readouterr().err
