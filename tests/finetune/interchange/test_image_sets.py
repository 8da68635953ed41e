"""TRL's sets of runs with pictures: content parts in every message and a column `images`, in Parquet and in JSONL."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, List
from datasets import Image as ImageColumn
from PIL import Image

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.envs import Taskset
from tapereel.envs.taskset import standard_row
from tapereel.finetune.interchange import BadImport, read, write
from tapereel.tapes import Picture
from tapereel.tapes.store import Store

from ...agents.episode.test_seeing import Player
from ...agents.picture_worlds import TURNS, Corners, Gallery, corner_of
from ...envs.test_trl_pictures import AGENT, Plain, seen
from ...toy_envs import Paid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An episode of three pictures over three turns, one of two pictures in a message, one of text, and a group."""

    async def play() -> None:
        for env, task in ((Corners, 1), (Gallery, 3), (Paid, 1)):
            await rollout(Player(), env, task, engine=ScriptedEngine(lambda _: "1"), journal=store.writer)
        for said in ("0", "3"):
            engine = ScriptedEngine([said])
            await rollout(
                Player(), Gallery, EpisodeSpec.of(3, group="g", env_seed=1), engine=engine, journal=store.writer
            )

    with Store.create(tmp_path / "run") as store:
        asyncio.run(play())
    return tmp_path / "run"


def pixels(image: Any) -> int:
    """The corner that an image of Parquet, or a data URL of JSONL, shows in red."""
    return corner_of(
        np.asarray(Image.open(io.BytesIO(Picture.of(image).data or b"")) if isinstance(image, str) else image)
    )


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_a_set_with_pictures_is_trls_form_and_ours(run: Path, tmp_path: Path, ending: str):
    out = tmp_path / f"sft{ending}"
    assert main(["export", str(run), str(out), "--format", "sft"]) == 0
    load = Dataset.from_parquet if ending == ".parquet" else Dataset.from_json
    rows: Any = load(str(out), cache_dir=str(tmp_path / "cache"))
    if ending == ".parquet":
        assert rows.features["images"] == List(ImageColumn())
    assert [[pixels(one) for one in row["images"]] for row in rows] == [[1, 2, 3][:TURNS], [3, 3], [], [3, 3], [3, 3]]
    for row in rows:
        parts = [part for message in row["messages"] for part in message["content"]]
        assert [part["type"] for part in parts].count("image") == len(row["images"])
        assert all({k for k, v in part.items() if v is not None} <= {"type", "text"} for part in parts)
    # The same file as tasks of our own.
    tasks = Taskset.load(out, row=standard_row({"prompt": "messages", "images": "images"}))
    asked: list[list[int]] = []
    engine = ScriptedEngine(lambda request: str(asked.append(seen(request))))
    for task in tasks:
        tape = asyncio.run(rollout(AGENT, Plain, task, engine=engine))
        assert tape.status == "finished", tape.cause
    assert asked == [[1, 2, 3][:TURNS], [3, 3], [], [3, 3], [3, 3]]
    with pytest.raises(BadImport, match="`images`"):
        read(out, tmp_path / "again", "sft")
    assert not (tmp_path / "again").exists()


def test_pairs_have_the_pictures_of_their_prompt(run: Path, tmp_path: Path):
    out = tmp_path / "pairs.parquet"
    assert main(["export", str(run), str(out), "--format", "preference"]) == 0
    (row,) = Dataset.from_parquet(str(out), cache_dir=str(tmp_path / "cache"))
    assert isinstance(row, dict)
    assert [pixels(one) for one in row["images"]] == [3, 3]
    assert row["chosen"][0]["content"] == [{"type": "text", "text": "3"}]


def test_without_pictures_nothing_changes(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tape = asyncio.run(rollout(Player(), Paid, 1, engine=ScriptedEngine(["a"]), journal=store.writer))
    write([tape], tmp_path / "x.jsonl", "sft")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "y.jsonl"), "--format", "sft"]) == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("x.jsonl", "y.jsonl"))
    assert first == second
    assert "images" not in first
    assert isinstance(first["messages"][-1]["content"], str)
