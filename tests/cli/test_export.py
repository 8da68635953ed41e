"""`tapereel export`: what is written, read back with the library that people will read it with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import tapereel as tr
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.finetune.interchange import NothingToExport
from tapereel.finetune.interchange.row_files import export
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

from ..front.making import played, run_of, sampled_tape


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two sampled tapes, one of them unscored-like 0, and one of text only."""
    path = tmp_path / "run"
    run_of(path, [("eval", ["7"])])
    with Store.open(path, write=True) as store:
        for tape in (
            sampled_tape("42", logprobs=[-0.5, -0.25, -0.125], spans=(("a:1", 0, 1), ("a:2", 1, 3))),
            sampled_tape("41", logprobs=[-1.0, math.nan, -2.0], reward=0.0),
        ):
            for body in tape.bodies:
                store.writer.append(body)
    return path


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["export", *words, "--json"]) == Exit.HOLDS
    return json.loads(capsys.readouterr().out)


def test_rows_keep_their_tokens_log_probs_and_versions(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = _json(capsys, str(run), str(tmp_path / "rows.jsonl"))
    assert {k: done[k] for k in ("tapes", "rows", "tokens", "own_tokens", "without_tokens")} == {
        "tapes": 2,
        "rows": 2,
        "tokens": 8,
        "own_tokens": 6,
        "without_tokens": 1,
    }
    first, second = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first["input_ids"] == [1, ord("4"), ord("2"), 3]
    assert first["labels"] == [-100, ord("4"), ord("2"), 3]
    assert first["old_logprobs"] == [None, -0.5, -0.25, -0.125]
    assert first["version"] == ["", "a:1", "a:2", "a:2"]
    assert (first["reward"], first["status"], first["split"]) == (1.0, "finished", "eval")
    assert second["old_logprobs"] == [None, -1.0, None, -2.0], "an unknown log-prob is null, not 0"
    assert second["reward"] == 0.0


def test_parquet_and_a_folder_hold_what_jsonl_holds(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _json(capsys, str(run), str(tmp_path / "rows.parquet"), "--min-reward", "0.5", "--split", "eval")
    _json(capsys, str(run), str(tmp_path / "folder"), "--min-reward", "0.5", "--split", "eval")
    cache = tmp_path / "cache"
    parquet = Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(cache))
    folder = Dataset.load_from_disk(str(tmp_path / "folder"))
    assert len(parquet) == len(folder) == 1  # type: ignore[arg-type]
    assert parquet[0]["input_ids"] == folder[0]["input_ids"] == [1, ord("4"), ord("2"), 3]  # type: ignore[index]
    assert not (tmp_path / "rows.parquet.partial").exists()


def test_a_tokenizer_brings_in_tapes_of_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    char_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    done = _json(capsys, str(run), str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"))
    assert (done["tapes"], done["without_tokens"]) == (3, 0)
    text = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert set(text["old_logprobs"]) == {None}
    assert char_tokenizer().decode([t for t in text["labels"] if t != -100]).startswith("7")


def test_held_out_tapes_of_a_run_that_trained_need_their_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_of(tmp_path / "run", [("train", ["7"]), *[("eval-after-sampled", ["7"])] * 2, ("eval-before-sampled", ["7"])])
    run, after = str(tmp_path / "run"), ("--split", "eval-after-sampled")
    assert main(["export", run, str(tmp_path / "a.jsonl"), "--format", "sft"]) == Exit.HOLDS
    said = " ".join(capsys.readouterr().err.split())
    assert "2 tapes of the held-out split eval-after-sampled" in said
    assert "--split eval-before-sampled" in said
    assert main(["export", run, str(tmp_path / "b.jsonl"), "--format", "sft", *after]) == Exit.HOLDS
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("a.jsonl", "b.jsonl")] == [1, 2]
    assert main(["export", run, str(tmp_path / "atif"), "--format", "atif"]) == Exit.HOLDS
    assert len([*(tmp_path / "atif").iterdir()]) == 4, "trajectories to look at, not to train on"
    # A filter that no tape to train on passes doesn't let held-out tapes in.
    assert main(["export", run, str(tmp_path / "d.jsonl"), "--format", "sft", "--min-reward", "9"]) == Exit.BROKEN
    char_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    chosen = [(False, None), (True, None), (False, "eval-after-sampled")]
    rows = [tr.open(run).dataset(tokenizer=tmp_path / "tokenizer", streaming=k, split=s) for k, s in chosen]
    assert [sorted({row["split"] for row in some}) for some in rows] == [["train"], ["train"], ["eval-after-sampled"]]


def test_nothing_is_overwritten_and_no_other_ending_taken(run: Path, tmp_path: Path):
    (tmp_path / "there.jsonl").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "there.jsonl")]) == Exit.USAGE
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert main(["export", str(run), str(tmp_path / "rows.csv")]) == Exit.USAGE
    assert main(["export", str(run), str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "none")]) == Exit.USAGE
    with pytest.raises(UsageError, match=r"there\.jsonl"):
        export([], tmp_path / "there.jsonl")


def test_an_export_that_leaves_everything_out_writes_no_file_and_says_why(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(NothingToExport, match=r"\b1\b.*\b1\b.*token"):
        export([played("7")], tmp_path / "rows.jsonl")
    for words in (["--format", "preference"], ["--format", "sft", "--min-reward", "9"], ["--min-reward", "9"]):
        for name in ("out.jsonl", "out.parquet"):
            assert main(["export", str(run), str(tmp_path / name), *words]) == Exit.BROKEN
        said = capsys.readouterr().err
        assert all(name in said for name in ("out.jsonl", "out.parquet"))
        assert ("group" if "preference" in words else "closed") in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
