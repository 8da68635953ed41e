"""Files from strangers: refused with the place and the cause, and the run stays as it was."""

from __future__ import annotations

import gzip
import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.finetune.interchange import FORMATS, read
from tapereel.finetune.interchange.trace_files import MEMBERS, BadImport, Bounds
from tapereel.tapes.errors import UsageError

TURN = {
    "node_id": "n",
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3],
    "per_token_logps": [-0.5],
    "loss_mask": [0, 0, 1],
    "request": {"messages": [{"role": "user", "content": "?"}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "!"}, "finish_reason": "stop"}]},
}
GOOD = {"schema_version": 1, "turns": [TURN]}


def trace(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "turns": [{**TURN, **changes}]}


def refused(path: Path, tmp_path: Path, sentence: str, *, format: str = "openenv", **bounds: int) -> None:
    with pytest.raises(BadImport, match=sentence):
        read(path, tmp_path / "run", format, bounds=Bounds(**bounds))
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_the_good_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert read(tmp_path / "t.jsonl", tmp_path / "run", "openenv").tapes == 1


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ([], "is a list, and a record is an object"),
        ("deep", "is no JSON"),
        ("{", "is no JSON"),
        ({"turns": []} | {"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"schema_version": 2, "turns": [TURN]}, "schema_version: Input should be 1"),
        ({"turns": [TURN, TURN]}, "two turns have one node_id"),
        (trace(completion_token_ids="3"), r"turns\.0\.completion_token_ids: Input should be a valid list"),
        (trace(completion_token_ids=[True]), "Input should be a valid integer"),
        (trace(completion_token_ids=[2**31]), "less than or equal to 2147483647"),
        (trace(completion_token_ids=[-1]), "greater than or equal to 0"),
        (trace(prompt_token_ids=[]), "at least 1 item"),
        (trace(per_token_logps=[0.5]), "less than or equal to 0"),
        (trace(per_token_logps=["NaN"]), "valid number"),
        (trace(per_token_logps=[]), "0 log-probs for 1 completion tokens"),
        (trace(loss_mask=[1, 0, 1]), "a token of the prompt is to be trained on"),
        (trace(loss_mask=[0, 0, 2]), "less than or equal to 1"),
        (trace(request={"messages": ["hello"]}), "valid dictionary"),
        (trace(request={"messages": [{"role": 1}]}), "role: Input should be a valid string"),
        (trace(request={"tools": "rm -rf"}), "tools of a request are a list"),
        (
            trace(response={"choices": [{"message": {"role": "assistant", "tool_calls": [{"x": 1}]}}]}),
            "function: Field",
        ),
        (trace(metadata={"tapereel": {"spans": [["v", 0, 9]]}}), "version spans"),
        (trace(metadata={"tapereel": {"episode": {"status": "hacked"}}}), "status"),
        (trace(metadata={"tapereel": {"episode": {"tape": "x" * 300}}}), "at most 200 characters"),
    ],
)
def test_a_wrong_record_names_its_line_and_field(tmp_path: Path, record: Any, sentence: str) -> None:
    text = "[" * 100_000 if record == "deep" else record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(GOOD)}\n{text}\n")
    refused(tmp_path / "t.jsonl", tmp_path, f"t.jsonl, line 2.*{sentence}")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "record",
    [
        {},
        {"messages": 3},
        {"prompt": [], "completion": []},
        {"turns": {"a": "b"}},
        {"trajectory": [{"prompt": 1}]},
        {"chosen": [{}]},
    ],
)
def test_a_record_of_nothing_known_is_refused_by_every_format(tmp_path: Path, format: str, record: Any) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    refused(tmp_path / "t.jsonl", tmp_path, f"is no {format} record", format=format)


def test_a_line_without_end(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"x": "' + b"a" * 10_000)
    refused(tmp_path / "t.jsonl", tmp_path, "line 1 is longer than 1,000 bytes", line=1000)


def test_a_file_that_goes_on_and_on(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text((json.dumps(GOOD) + "\n") * 100)
    refused(tmp_path / "t.jsonl", tmp_path, "more than 2,000 bytes, unpacked", total=2000)


def test_bombs_are_read_no_further_than_the_bound(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "t.jsonl.gz", "wb") as file:
        file.write(b" " * 50_000_000)
    refused(tmp_path / "t.jsonl.gz", tmp_path, "line 1 is longer than 10,000 bytes", line=10_000)
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(5):
            archive.writestr(f"{k}.jsonl", (json.dumps(GOOD) + "\n") * 20_000)
    assert (tmp_path / "t.zip").stat().st_size < 1_000_000
    refused(tmp_path / "t.zip", tmp_path, "more than 100,000 bytes, unpacked", total=100_000)


def member(name: str) -> Callable[[zipfile.ZipFile], None]:
    return lambda archive: archive.writestr(name, json.dumps(GOOD))


def link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("a.jsonl")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(info, "/etc/passwd")


def crowd(archive: zipfile.ZipFile) -> None:
    for k in range(MEMBERS + 1):
        archive.writestr(f"{k}.txt", "")


@pytest.mark.parametrize(
    ("fill", "sentence"),
    [
        (member("../../run/tapes/x.jsonl"), "leaves the archive's folder"),
        (member("/etc/x.jsonl"), "leaves the archive's folder"),
        (member("a\\..\\x.jsonl"), "leaves the archive's folder"),
        (member("C:x.jsonl"), "leaves the archive's folder"),
        (link, "is a link"),
        (crowd, "1,001 members, at most 1,000"),
        (member("a.txt"), "holds no .jsonl file"),
    ],
)
def test_archives_that_reach_out(tmp_path: Path, fill: Callable[[zipfile.ZipFile], None], sentence: str) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        fill(archive)
    refused(tmp_path / "t.zip", tmp_path, sentence)


def test_a_good_archive_is_read_in_place(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("folder/a.jsonl", json.dumps(GOOD))
    before = set(tmp_path.iterdir())
    assert read(tmp_path / "t.zip", tmp_path / "run", "openenv").tapes == 1
    assert set(tmp_path.iterdir()) - before == {tmp_path / "run"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.zip", b"PK\x03\x04 not really"),
        ("t.jsonl.gz", b"\x1f\x8b broken"),
        ("t.parquet", b"PAR1 broken PAR1"),
        ("t.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 10, mtime=0)[:-20]),
    ],
)
def test_broken_containers(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, tmp_path, "can't be|is no JSON")


def test_a_column_that_unpacks_to_more_than_it_is(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    message = {"role": "assistant", "content": "x" * 100_000}
    table = pyarrow.table({"messages": [[message]] * 1000})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 200_000, "a thousand times the same, kept once"
    refused(tmp_path / "t.parquet", tmp_path, "are more than the limits allow", format="sft", total=10_000_000)
    column = pyarrow.array(["x"] * 10).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "d.parquet")
    refused(tmp_path / "d.parquet", tmp_path, "the column 'messages' is of a dictionary type", format="sft")


def test_an_empty_file_and_other_endings(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n\n")
    refused(tmp_path / "t.jsonl", tmp_path, "holds no record")
    (tmp_path / "t.pkl").write_bytes(b"")
    for path in (tmp_path / "t.pkl", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError):
            read(path, tmp_path / "run", "openenv")
    assert main(["import", str(tmp_path / "t.pkl"), str(tmp_path / "run"), "--format", "openenv"]) == Exit.USAGE


def test_markup_stays_data(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    message = {"message": {"role": "assistant", "content": evil}}
    (tmp_path / "t.jsonl").write_text(json.dumps(trace(response={"choices": [message]})) + "\n")
    read(tmp_path / "t.jsonl", tmp_path / "run", "openenv")
    assert main(["view", str(tmp_path / "run"), "--out", str(tmp_path / "view"), "--no-browser"]) == Exit.HOLDS
    pages = [page.read_text(errors="replace") for page in (tmp_path / "view").rglob("*.html")]
    assert pages
    assert not any(evil in page for page in pages)
