"""Columns as tasks, data sets of the hub, and a clear word where there is no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from tapereel.envs import BadTasks, Taskset
from tapereel.envs.taskset import columns, hub_tasks

ROWS = [{"name": f"n{k}", "q": f"{k}+1?", "a": str(k + 1), "seed": k} for k in range(4)]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_files_by_columns(tmp_path: Path, ending: str) -> None:
    path, data = tmp_path / f"tasks{ending}", Dataset.from_list(ROWS)
    {".csv": data.to_csv, ".parquet": data.to_parquet}.get(ending, data.to_json)(str(path))
    tasks = Taskset.load(path, row=columns({"question": "q"}, {"answer": "a"}, id="name", seed="seed"))
    assert [task.public for task in tasks] == [{"question": row["q"]} for row in ROWS]
    private = {"answer": str(1) if ending != ".csv" else 1, "seed": 0}  # a CSV file knows no types
    assert tasks[0].private == private
    assert [task.id for task in tasks] == ["n0", "n1", "n2", "n3"]


def test_one_column_is_the_part_itself() -> None:
    (first, *_) = Taskset(ROWS, row=columns("q", "a"))
    assert (first.public, first.private) == ("0+1?", "1")
    (first, *_) = Taskset(ROWS, row=columns("q", "a", seed="seed"))
    assert first.private == {"answer": "1", "seed": 0}
    (first, *_) = Taskset(ROWS, row=columns(["name", "q"]))
    assert (first.public, first.private) == ({"name": "n0", "q": "0+1?"}, None)


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(BadTasks, match=r"'question'.*'name', 'q', 'a', 'seed'"):
        Taskset(ROWS, row=columns("question"))
    with pytest.raises(BadTasks, match=r"\b3\b.*\bint\b"):
        Taskset([3], row=columns("question"))


def test_a_hub_that_can_t_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(BadTasks) as caught:
        hub_tasks("nobody/nothing", row=columns("question"))
    sentence = str(caught.value)
    assert "'nobody/nothing'" in sentence
    assert "'train'" in sentence
    assert "hf download --repo-type dataset nobody/nothing" in sentence


def test_a_name_that_the_library_knows_is_read(tmp_path: Path) -> None:
    """A folder of files is a name like any other to `datasets`."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks = hub_tasks(str(tmp_path / "set"), row=columns("q", "a"), size=2)
    assert [task.private for task in tasks] == ["1", "2"]
