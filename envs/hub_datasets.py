"""Tasks from the columns of a table (public and private columns), and data sets of the Hugging Face hub by name.

`Taskset.load` reads files. `datasets` is imported when a data set is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..tapes.errors import MissingExtra
from ..tapes.records import Task
from .task_files import quiet_datasets
from .taskset import BadTasks, Row, Taskset


def columns(
    public: str | Sequence[str] | Mapping[str, str],
    private: str | Sequence[str] | Mapping[str, str] = (),
    *,
    id: str | None = None,
    seed: str | None = None,
) -> Row:
    """A `row` for tasksets: `Taskset.load("qa.jsonl", row=columns("question", "answer", id="name"))`.

    public, private: one name takes the value of that column; several names, or a mapping of new name -> column, make an
    object. seed: a column that goes into the private part as `seed`. A row that lacks a column is a BadTasks error.
    """

    def row(record: Any) -> Task:
        if not isinstance(record, Mapping):
            raise BadTasks(f"{record!r:.80} is a {type(record).__name__}, not a row with columns: give a mapping")
        hidden = _part(record, private)
        if seed is not None:
            hidden = {
                **(hidden if isinstance(hidden, dict) else {"answer": hidden} if hidden is not None else {}),
                "seed": _column(record, seed),
            }
        name = "" if id is None else str(_column(record, id))
        return Task.model_validate({"id": name, "public": _part(record, public), "private": hidden})

    return row


def hub_tasks(
    name: str,
    split: str = "train",
    *,
    row: Row,
    config: str | None = None,
    revision: str | None = None,
    size: int | None = None,
) -> Taskset:
    """The tasks in a data set of the hub, or of its copy in the local cache.

    Give a `revision` (a commit) to pin the tasks. BadTasks says what to do if the data set can't be reached. Loading
    scripts of data sets never run: `datasets` refuses them.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra("datasets", "train", f"reading {name}") from error
    try:
        with quiet_datasets():
            found: Any = load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else "no reason given"
        raise BadTasks(
            f"the data set {name!r} (split {split!r}) can't be loaded from the hub: {type(error).__name__}: "
            f"{why}. Without a network, save it first on a machine that has one (load_dataset({name!r}, "
            f"split={split!r}).to_parquet('tasks.parquet')) and use "
            "Taskset.load('tasks.parquet')"
        ) from error
    return Taskset(found, row=row, size=size, name=name)


def _part(row: Mapping[str, Any], names: str | Sequence[str] | Mapping[str, str]) -> Any:
    if isinstance(names, str):
        return _column(row, names)
    pairs = names.items() if isinstance(names, Mapping) else [(name, name) for name in names]
    return {name: _column(row, column) for name, column in pairs} or None


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise BadTasks(f"a row has no column {name!r}; it has {', '.join(map(repr, row))}")
    return row[name]
