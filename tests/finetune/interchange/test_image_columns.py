"""Data sets of runs with pictures have an image column; those of runs without pictures are as they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Image, List, load_from_disk

import tapereel as tr
from tapereel.cli import main
from tapereel.finetune import collate, rl_features
from tapereel.finetune.data import BadBatch
from tapereel.tapes import Picture
from tapereel.tapes.store import Store

from ...agents.episode.test_seeing_tokens import played
from ...agents.picture_worlds import TURNS, Gallery, corner_of, square
from ...toy_envs import Paid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Store.create(tmp_path / "run") as store:
        played(journal=store.writer)
        played(Gallery, task=3, journal=store.writer)
    return tmp_path / "run"


def corners(row: Any) -> list[int]:
    return [corner_of(np.asarray(image)) for image in row["images"]]


def test_a_run_with_pictures_has_a_column_of_images(run: Path, tmp_path: Path):
    found: Any = tr.open(run).dataset()
    assert found.features == rl_features(images=True)
    assert found.features["images"] == List(Image())
    assert [corners(row) for row in found] == [[1, 2, 3][:TURNS], [3, 3]]
    raw = found.cast_column("images", List(Image(decode=False)))
    shown = Picture.of(square(1))
    assert raw[0]["images"][0] == {"bytes": shown.data, "path": shown.name}
    streamed: Any = tr.open(run).dataset(streaming=True)
    assert [corners(row) for row in streamed] == [corners(row) for row in found]
    for out in ("x.parquet", "folder"):
        assert main(["export", str(run), str(tmp_path / out)]) == 0
        read: Any = Dataset.from_parquet(str(tmp_path / out)) if "." in out else load_from_disk(tmp_path / out)
        assert read.features["images"] == List(Image())
        assert [corners(row) for row in read] == [corners(row) for row in found]


def test_rows_with_pictures_are_never_taken_for_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(run), str(tmp_path / "x.jsonl")]) == 64
    assert " pictures" in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()
    with pytest.raises(BadBatch, match=r"row 0\b.*`images`"):
        collate(list(tr.open(run).dataset()))


def test_a_run_of_texts_keeps_its_columns(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        played(Paid, journal=store.writer)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.parquet")]) == 0
    for found in (tr.open(tmp_path / "run").dataset(), Dataset.from_parquet(str(tmp_path / "x.parquet"))):
        assert found.features == rl_features()
        assert "images" not in found.column_names


def test_a_missing_file_is_named(run: Path):
    gone = next((run / "tapes/media").iterdir())
    gone.unlink()
    with pytest.raises(Exception, match=rf"{re.escape(gone.name)}.*\bmissing\b"):
        tr.open(run).dataset()
