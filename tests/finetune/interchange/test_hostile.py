"""Files from strangers: refused with the place and the cause, and the run stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.finetune.interchange import BadImport, read
from tapereel.finetune.interchange.formats import IMPORTS
from tapereel.tapes.common import REWARD_LIMIT
from tapereel.tapes.errors import UsageError

ASKED = {"role": "user", "content": "?"}
GOOD = {"messages": [ASKED, {"role": "assistant", "content": "!"}]}


def row(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def answer(**changes: Any) -> dict[str, Any]:
    return row(messages=[ASKED, {"role": "assistant", "content": "!", **changes}])


def refused(path: Path, tmp_path: Path, *named: str, format: str = "sft") -> None:
    with pytest.raises(BadImport) as error:
        read(path, tmp_path / "run", format)
    assert [name for name in (path.name, *named) if name not in str(error.value)] == []
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_the_good_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert read(tmp_path / "t.jsonl", tmp_path / "run", "sft").tapes == 1


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([], "list"),
        ("deep", "JSON"),
        ("{", "JSON"),
        (row(messages="hello"), "messages"),
        (row(messages=["hello"]), "messages"),
        (row(messages=[]), "messages"),
        (row(messages=[ASKED]), "assistant"),
        (row(messages=[{"role": 1}, ASKED]), "role"),
        (answer(content=3), "content"),
        (answer(tool_calls=[{"x": 1}]), "function"),
        (answer(tool_calls="["), ""),
        (row(tools="rm -rf"), ""),
        (row(tools='{"a": 1}'), "tools"),
        (row(tools=[1]), "tools"),
        (row(reward="high"), "reward"),
        ('{"messages": [], "reward": NaN}', "reward"),
        (row(status="hacked"), "status"),
        (row(tape="x" * 300), "tape"),
        (row(group="x" * 600), "group"),
        (row(split=["train"]), "split"),
    ],
)
def test_a_wrong_record_names_its_line_and_field(tmp_path: Path, record: Any, named: str) -> None:
    text = "[" * 100_000 if record == "deep" else record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(GOOD)}\n{text}\n")
    refused(tmp_path / "t.jsonl", tmp_path, "line 2", named)


@pytest.mark.parametrize("format", IMPORTS)
@pytest.mark.parametrize("record", [{}, {"messages": 3}, {"prompt": [], "completion": []}, {"chosen": [{}]}])
def test_a_record_of_nothing_known_is_refused_by_every_format(tmp_path: Path, format: str, record: Any) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    refused(tmp_path / "t.jsonl", tmp_path, format, format=format)


@pytest.mark.parametrize("reward", [2 * REWARD_LIMIT, -1e200, 1e308])
def test_a_reward_beyond_the_limit_is_refused_with_its_line(tmp_path: Path, reward: float) -> None:
    lines = [json.dumps(row(reward=value)) for value in (-REWARD_LIMIT, reward)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    refused(tmp_path / "t.jsonl", tmp_path, "line 2", "reward")


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 broken PAR1")
    refused(tmp_path / "t.parquet", tmp_path)


def test_a_wrong_row_of_parquet_names_its_number(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["?"] * 300, "completion": ["!"] * 299 + [None]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", tmp_path, "row 300")


def test_an_empty_file_and_other_endings(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n\n")
    refused(tmp_path / "t.jsonl", tmp_path)
    (tmp_path / "t.pkl").write_bytes(b"")
    for path in (tmp_path / "t.pkl", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError):
            read(path, tmp_path / "run", "sft")
    assert main(["import", str(tmp_path / "t.pkl"), str(tmp_path / "run"), "--format", "sft"]) == Exit.USAGE


def test_markup_stays_data(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    (tmp_path / "t.jsonl").write_text(json.dumps(answer(content=evil)) + "\n")
    read(tmp_path / "t.jsonl", tmp_path / "run", "sft")
    page = tmp_path / "view.html"
    assert main(["view", str(tmp_path / "run"), "--out", str(page)]) == Exit.HOLDS
    assert "alert(1)" in page.read_text()
    assert evil not in page.read_text()
