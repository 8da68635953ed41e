"""Tasks from the columns of data: what of a row the agent sees, and what it doesn't; and data sets of the Hugging Face
hub by name.

Files are `Taskset.load`'s matter. `datasets` is imported when something is read. Knows nothing of environments.
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

    One name: that column is the part. Several, or a mapping of new name -> column: the part is an object of them. seed:
    a column that goes into the private part as `seed`. A row without one of the columns is a BadTasks error.
    """

    def row(given: Any) -> Task:
        if not isinstance(given, Mapping):
            raise BadTasks(f"{given!r:.80} is no row with columns; it is a {type(given).__name__}")
        hidden = _part(given, private)
        if seed is not None:
            hidden = {
                **(hidden if isinstance(hidden, dict) else {"answer": hidden} if hidden is not None else {}),
                "seed": _column(given, seed),
            }
        name = "" if id is None else str(_column(given, id))
        return Task.model_validate({"id": name, "public": _part(given, public), "private": hidden})

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
    """The tasks in a data set of the hub, or of its copy in the local cache. Give a `revision` (a commit) to have the
    same tasks tomorrow. BadTasks says what to do where it can't be reached.

    Data sets that come with code of their own are not run: `datasets` refuses them.
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
            f"the data set {name!r} (split {split!r}) can't be had from the hub: {type(error).__name__}: "
            f"{why}. Offline, save it once where there is a network (load_dataset({name!r}, "
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
