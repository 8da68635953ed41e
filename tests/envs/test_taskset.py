"""Tasksets: each task once, from any source; splits that stay put; orders that a seed decides and a cursor keeps."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from datetime import date
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tapereel.agents.setup import load_tasks
from tapereel.agents.setup.setup import DatasetConfig
from tapereel.envs import BadTasks, Taskset, overlap
from tapereel.envs.taskset import columns
from tapereel.tapes import MissingExtra, Task
from tapereel.tapes.errors import UsageError


def _squares() -> Iterator[int]:
    for k in count():
        yield k * k


def _mod_7(index: int) -> dict[str, int]:
    return {"n": index % 7}


SOURCES = {
    "list": lambda: Taskset([3, 1, 3, 2]),
    "iterator": lambda: Taskset(iter([3, 1, 3, 2])),
    "generator function": lambda: Taskset(lambda: iter([3, 1, 3, 2])),
    "tasks": lambda: Taskset(Task.of(n) for n in (3, 1, 3, 2)),
    "function of the index": lambda: Taskset(lambda k: (3, 1, 3, 2)[k], size=4),
    "rows": lambda: Taskset([{"n": 3}, {"n": 1}, {"n": 3}, {"n": 2}], row=lambda row: row["n"]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_source_gives_each_task_once_in_its_order(source: str):
    tasks = SOURCES[source]()
    assert [task.given for task in tasks] == [3, 1, 2]
    assert (len(tasks), tasks.dropped, tasks[1].given, tasks[-1].given) == (3, 1, 1, 2)
    assert Task.of(2) in tasks
    assert 2 in tasks
    assert 4 not in tasks
    assert [task.given for task in tasks[1:]] == [1, 2]


def test_a_task_is_one_by_its_parts_not_by_its_name():
    tasks = Taskset([Task(id="a", public={"q": 1}), Task(id="b", public={"q": 1}), Task(id="a", public={"q": 2})])
    assert [task.id for task in tasks] == ["a", "a"]
    assert tasks.dropped == 1


def test_size_takes_so_many_distinct_tasks_of_an_endless_source_and_refuses_to_pretend():
    assert [task.given for task in Taskset(_squares, size=3)] == [0, 1, 4]
    with pytest.raises(BadTasks, match=r"size.*\b10\b.*\b3\b.*\b1\b"):
        Taskset([3, 1, 3, 2], size=10)
    # Of a function of the index, `size` counts the calls: there is no other end to them.
    assert (len(Taskset(_mod_7, size=10)), Taskset(_mod_7, size=10).dropped) == (7, 3)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("tasks.jsonl", {}, r"'tasks\.jsonl'.*Taskset\.load"),
        ({"q": 1}, {}, r"\{'q': 1\}.*Taskset\.load"),
        (7, {}, r"source.*\b7\b"),
        (lambda: 7, {}, r"^7 .*\biterable\b"),
        (_mod_7, {}, "_mod_7.*`size`"),
        (lambda a, b: 0, {}, r"lambda.*\b2 arguments\b"),
        ([1], {"size": 0}, r"size.*\b0\b"),
        ([1, {2}], {}, r"item 1\b.*\{2\}.*JSON"),
        ([1, {"q": [{"day": date(2026, 1, 1)}]}], {}, r"item 1\b.*private\.q\.0\.day is datetime.*JSON"),
        ([{"q": 1, "a": [0.5, math.nan]}], {}, r"item 0\b.*private\.a\.1 is nan\b.*finite"),
        ([{"q": 1}], {"row": lambda row: Task(public=(1, 2))}, r"item 0\b.*JSON"),
    ],
)
def test_what_is_no_source_of_tasks_is_refused_with_its_remedy(source, options, says: str):
    with pytest.raises(UsageError, match=says):
        Taskset(source, **options)


def test_a_source_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapereel.envs.taskset.ENDLESS", 1000)
    with pytest.raises(BadTasks, match=r"_squares has no end after 1,000 items, 1,000 .*`size`"):
        Taskset(_squares)
    with pytest.raises(BadTasks, match=r"1,002 items, 1 .*`size`"):
        Taskset(repeat(7), size=2)
    assert len(Taskset(_squares, size=2000)) == 2000
    assert len(Taskset(list(islice(_squares(), 2000)))) == 2000


def test_the_rows_of_a_data_frame_are_tasks():
    frame = pandas.DataFrame({"prompt": ["1+1?", "6*7?"], "answer": [2, 42], "hint": ["easy", None], "p": [0.5, None]})
    assert [task.given for task in Taskset(frame)] == [
        {"prompt": "1+1?", "answer": 2, "hint": "easy", "p": 0.5},
        {"prompt": "6*7?", "answer": 42, "hint": None, "p": None},
    ]


def test_equal_tasks_that_are_left_out_are_counted_for_the_user(caplog: pytest.LogCaptureFixture):
    assert len(load_tasks([1, 1, 1])) == 1
    assert len(load_tasks([1, 2])) == 2
    (said,) = caplog.messages
    assert "2 equal tasks" in said
    assert "attempts=3" in said


def test_an_error_in_the_mapping_is_the_callers_own():
    with pytest.raises(KeyError, match="answer"):
        Taskset([{"q": 1}], row=lambda row: row["answer"])


def test_a_split_is_disjoint_whole_and_about_as_asked():
    tasks = Taskset(range(4000))
    train, dev, held_out = tasks.split(0.8, 0.1, 0.1)
    assert overlap(train, dev) == overlap(train, held_out) == overlap(dev, held_out) == 0
    assert len(train) + len(dev) + len(held_out) == 4000
    # 4000 * 0.1 = 400, binomial standard deviation 19
    assert abs(len(dev) - 400) < 100
    assert abs(len(held_out) - 400) < 100


def test_a_task_stays_on_its_side_when_the_set_grows_or_is_reordered():
    small, held_small = Taskset(range(500)).split(0.7, 0.3)
    large, held_large = Taskset(reversed(range(2000))).split(0.7, 0.3)
    assert small.hashes <= large.hashes
    assert held_small.hashes <= held_large.hashes
    assert overlap(small, held_large) == overlap(large, held_small) == 0


def test_another_salt_is_an_independent_split():
    tasks = Taskset(range(2000))
    a, b = tasks.split(0.5, 0.5)[0], tasks.split(0.5, 0.5, salt="2")[0]
    assert 350 < overlap(a, b) < 650
    assert overlap(a, tasks.split(0.5, 0.5)[0]) == len(a)


@pytest.mark.parametrize("fractions", [(), (0.5,), (0.9, 0.2), (1.5, -0.5)])
def test_fractions_that_are_no_partition_are_refused(fractions):
    with pytest.raises(BadTasks, match=re.escape(str(list(fractions)))):
        Taskset([1, 2]).split(*fractions)


def test_overlap_counts_by_hash():
    assert overlap(Taskset([1, 2, 3]), [Task.of(3), Task(id="x", private=2, bare=True), Task.of(9)]) == 2


def test_every_epoch_has_each_task_once_in_an_order_of_its_own():
    tasks = Taskset(range(50))
    drawn = [task.given for task in islice(tasks.cursor(seed=1), 150)]
    epochs = [drawn[:50], drawn[50:100], drawn[100:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert drawn == [task.given for task in islice(tasks.cursor(seed=1), 150)]
    assert drawn != [task.given for task in islice(tasks.cursor(seed=2), 150)]
    assert [t.given for t in islice(tasks.cursor(shuffle=False), 60)] == [*range(50), *range(10)]


def test_the_order_of_a_seed_is_fixed_for_ever():
    """Changing this changes which task a resumed run sees next; don't mend the test without deciding to."""
    drawn = [task.given for task in islice(Taskset(range(8)).cursor(seed=0), 16)]
    assert drawn == [0, 3, 7, 4, 1, 5, 2, 6, 6, 3, 1, 2, 0, 4, 5, 7]


@given(st.integers(1, 20), st.integers(0, 70), st.integers(1, 50), st.integers(), st.booleans())
def test_a_resumed_cursor_goes_on_where_it_was(n: int, before: int, after: int, seed: int, shuffle: bool):
    cursor = Taskset(range(n)).cursor(seed, shuffle=shuffle)
    for _ in range(before):
        next(cursor)
    resumed = Taskset(range(n)).cursor(seed, shuffle=shuffle, start=before)
    assert list(islice(cursor, after)) == list(islice(resumed, after))


def test_a_cursor_without_tasks_or_before_the_first_is_refused():
    with pytest.raises(BadTasks, match=r"Taskset.*\b0 tasks\b"):
        Taskset([]).cursor()
    with pytest.raises(BadTasks, match=r"start.*-1\b"):
        Taskset([1]).cursor(start=-1)


ROWS = [{"q": "1+1", "a": 2}, {"q": "2+2", "a": 4}, {"q": "1+1", "a": 2}]


def _to_task(row: dict) -> Task:
    return Task(public={"question": row["q"]}, private={"answer": row["a"]})


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_files_are_read_as_datasets_reads_them(suffix: str, tmp_path: Path):
    path = tmp_path / f"sums{suffix}"

    source = Dataset.from_list(ROWS)
    if suffix == ".parquet":
        source.to_parquet(str(path))
    elif suffix == ".csv":
        source.to_csv(str(path))
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    tasks = Taskset.load(path, row=_to_task)
    assert (tasks.name, len(tasks), tasks.dropped) == ("sums", 2, 1)
    assert tasks[1].private == {"answer": 4}
    assert tasks.digest == Taskset(source, row=_to_task).digest


def test_reading_a_file_shows_no_progress_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from datasets import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    path = tmp_path / "t.jsonl"
    path.write_text('{"n": 1}')
    Taskset.load(path)
    assert capsys.readouterr().err == ""
    assert are_progress_bars_disabled() == before, "the bars of other programs are theirs"


def test_a_file_that_changed_is_read_anew(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"n": 1}')
    assert Taskset.load(path)[0].private == {"n": 1}
    path.write_text('{"n": 2}')
    assert Taskset.load(path)[0].private == {"n": 2}


@pytest.mark.parametrize("names", [{}, {"prompt": "question", "answer": "answer"}])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder", "object"])
def test_a_row_is_a_plain_value_unless_columns_are_named(kind: str, names: dict[str, str], tmp_path: Path):
    data = Dataset.from_list([{"question": f"{n}+1", "answer": n + 1} for n in range(3)])
    path = tmp_path / f"data.{kind}"
    {"jsonl": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet, "folder": data.save_to_disk}.get(
        kind, lambda path: None
    )(path)
    loaded = load_tasks(data if kind == "object" else str(path), dataset=DatasetConfig(columns=names))
    for n, task in enumerate(loaded):
        if names:
            assert task.given == task == Task(public={"prompt": f"{n}+1"}, private={"answer": n + 1})
        else:
            assert task.given == {"question": f"{n}+1", "answer": n + 1}
            assert task == Task.of(task.given), "a list of the same dicts gives the same task"


LINES = """
{"answer": 1, "when": "2026-01-01", "at": "2026-01-01T10:00:00Z"}
{"answer": 2.5, "n": 9007199254740993}
{"answer": "one", "when": null}
"""


@pytest.mark.parametrize("kind", ["a.jsonl", "lines.json", "list.json"])
def test_values_of_json_files_are_those_of_json(kind: str, tmp_path: Path):
    path, rows = tmp_path / kind, [json.loads(line) for line in LINES.strip().splitlines()]
    path.write_text(json.dumps(rows) if kind == "list.json" else LINES)
    given = [task.given for task in load_tasks(str(path))]
    assert json.dumps(given) == json.dumps(rows), "not even 1 became 1.0"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadTasks, match=r"'\.txt'"):
        Taskset.load(tmp_path / "t.txt")
    with pytest.raises(BadTasks, match=r"t\.jsonl$"):
        Taskset.load(tmp_path / "t.jsonl")
    (tmp_path / "t.csv").write_text("n\n1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"tapereel\[train\]"):
        Taskset.load(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.jsonl", b"", r"t\.jsonl .*\bempty\b"),
        ("t.csv", b"", r"t\.csv .*\bempty\b"),
        ("t.jsonl", b"\n\n", r"t\.jsonl .*\brows\b"),
        ("t.csv", b"q,a\n", r"t\.csv .*\brows\b"),
        (
            "t.jsonl",
            b'{"q": 1}\n\n{bad\n',
            r"t\.jsonl .*line 3\b.*JSON \(column 2: Expecting property name",
        ),
        ("t.jsonl", b'\xef\xbb\xbf{"q": 1}\n{bad\n', r"line 2\b.*JSON \(column 2\b"),
        ("t.jsonl", b'{"q": 1}\n3\n', r"line 2\b.*\bobject\b.*JSON"),
        ("t.jsonl", b"[" * 100_000, r"line 1\b.*JSON \("),
        ("t.json", b'[{"q": 1},\n{bad]', r"line 2\b.*JSON \(column 2\b"),
        ("t.json", b"3", r"line 1\b.*\blist\b.*JSON"),
        ("t.parquet", b"hi", r"t\.parquet .*ArrowInvalid: Parquet file size is 2 bytes"),
        ("t.csv", b'q,a\n"x,1\n', r"t\.csv .*ParserError"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_the_line_and_the_remedy(
    name: str, content: bytes, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadTasks, match=sentence):
        Taskset.load(tmp_path / name)
    assert capfd.readouterr().err == "", "what `datasets` logs of it is said once, by us"


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"q": 1}\n{"q": 2}\n')
    assert [task.private for task in Taskset.load(tmp_path / "t.jsonl")] == [{"q": 1}, {"q": 2}]


def test_a_row_that_makes_no_task_is_named_with_its_file(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"q": 1}\n{"q": 2, "z": 3}\n')
    with pytest.raises(BadTasks, match=r"t\.jsonl: item 0: .*'a'.*'q'$"):
        Taskset.load(tmp_path / "t.jsonl", row=columns("a"))


def test_reading_shuffling_and_splitting_leave_the_global_generator_alone():
    random.seed(5)
    before = random.getstate()
    next(Taskset(range(9)).cursor(3))
    assert random.getstate() == before


@pytest.mark.parametrize("task", ["\ud800", {"q": ["\udc80"]}, [[[]]]])
def test_a_task_that_no_tape_can_record_is_named_before_a_run_begins(task):
    if task == [[[]]]:
        for _ in range(5000):
            task = [task]
    with pytest.raises(BadTasks, match="item 1"):
        Taskset([0, task])


def test_a_huge_collection_is_refused_before_it_is_read():
    with pytest.raises(UsageError, match="10,000,000"):
        Taskset(range(10**9))


@pytest.mark.parametrize(
    ("tasks", "remedy"),
    [
        (np.arange(3), r"convert it with `\.tolist\(\)`"),
        ([{"q": np.array([1, 2])}], r"convert it with `\.tolist\(\)`"),
        ([(1, 2)], "make it a list"),
        ([{1, 2}], "make it a list"),
        (Task(public="6*7?"), r"pass \[task\]"),
    ],
)
def test_what_is_no_task_is_refused_with_the_remedy(tasks: Any, remedy: str) -> None:
    with pytest.raises(BadTasks, match=remedy):
        Taskset(tasks)
