"""Tasksets: distinct tasks from any source (a list, a function, a file, a data set on the hub), shuffled by a seed.

A `Taskset` reads its whole source when it is made. Duplicates (by `Task.hash`) are dropped and counted. `Taskset.split`
chooses a task's part by the task's hash. The task stays in this part when the set grows, is reordered or is generated
from another seed. `datasets` is imported when a table or data set is read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from itertools import accumulate, chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, overload

from pydantic import ValidationError
from pydantic_core import to_json

from ..tapes import BadPicture, Picture, Video
from ..tapes.common.arguments import check_arguments, shown
from ..tapes.common.hub import NotFound, snapshot, split_name
from ..tapes.decoding import DATA_URL
from ..tapes.errors import MissingExtra, UsageError
from ..tapes.records import Task

Row = Callable[[Any], Any]
"""Converts one item of a source to a `Task`, or to a bare value that becomes the private part of a task."""
TABLES = {".parquet": "from_parquet", ".csv": "from_csv"}
"""The method of `datasets.Dataset` that reads a table, by the file's suffix."""
TASK_FILES = (".jsonl", ".json", *TABLES)
ENDLESS = 1_000_000
"""Number of items, besides `size`, after which a source without a length is taken for one without an end."""

VIDEOS = ("videos", "video")
SHOWN = ("images", "image", *VIDEOS)
"""Columns that hold the images and videos for a prompt."""


class BadTasks(UsageError):
    """A source doesn't yield tasks. The message names the item and the reason."""


@check_arguments
class Taskset(Sequence[Task]):
    """Distinct tasks, in the order of their source.

    Examples: `Taskset([3, 7])`, `Taskset(generator_function, size=100)`, `Taskset(make_task, size=100)` for a function
    of the index, `Taskset(rows, row=to_task)`, `Taskset.load("tasks.jsonl", row=to_task)`.
    """

    def __init__(
        self,
        source: Annotated[
            Iterable[object] | Callable[..., object],
            "an iterable, a function that returns one, or a function of the index; to read a file, use Taskset.load",
        ],
        *,
        size: int | None = None,
        row: Row | None = None,
        name: str = "",
    ) -> None:
        """Read the whole source, or its first `size` distinct tasks. Raises BadTasks if an iterable has fewer.

        `source` is an iterable, a function without parameters that returns an iterable, or a function of the index. A
        function of the index needs `size`. It is called with 0 to size - 1, and duplicates are dropped. `row` converts
        each item. Without `row`, each value is a task, as is each row of a `Dataset` or of a DataFrame.
        """
        self.name = name
        """A label for messages. It may be empty."""
        self.dropped = 0
        """Number of duplicates that were left out."""
        self._hashes: dict[str, int] = {}
        self._tasks: list[Task] = []
        if size is not None and size < 1:
            raise BadTasks(f"size is {size}; it must be at least 1, or None to read the whole source")
        by_index = callable(source) and _takes_index(source)
        if by_index and size is None:
            raise BadTasks(f"{_label(source)} is a function of the index and has no end: pass `size`")
        items = _items(source)
        for k, item in enumerate(islice(items, size if by_index else None)):
            if k == ENDLESS + (size or 0) and not isinstance(items, Sized):
                raise BadTasks(
                    f"{_label(source)} has no end after {k:,} items, {len(self._tasks):,} of them distinct: set `size` "
                    "to fewer, or pass a list if it does end"
                )
            self._add(as_task(item, k, row))
            if len(self._tasks) == size:
                break
        if size is not None and not by_index and len(self._tasks) < size:
            raise BadTasks(
                f"size is {size}, but the source has {len(self._tasks)} distinct tasks "
                f"({self.dropped} duplicates): reduce `size`, or add tasks to the source"
            )

    @classmethod
    @check_arguments
    def load(cls, path: str | Path, *, row: Row | None = None, size: int | None = None, name: str = "") -> Taskset:
        """Return the tasks in a JSONL, JSON, Parquet or CSV file. `row` converts each row (a dict).

        Without `row`, each row is a task, like a dict in a list. Values of JSON are those of `json.loads`, and
        `datasets` reads Parquet and CSV. Raises BadTasks if the file is invalid. The message names the file, the row or
        line, and the fault.
        """
        path = Path(path)
        if path.suffix not in TASK_FILES:
            raise BadTasks(f"{path} has the suffix {path.suffix!r}; tasks are read from {', '.join(TASK_FILES)} files")
        if not path.is_file():
            raise BadTasks(f"there is no file {path}")
        if not path.stat().st_size:
            raise BadTasks(f"{path} is empty: a task file needs at least one row")
        rows = _table(path) if path.suffix in TABLES else _json_rows(path)
        try:
            return cls(rows, row=row, size=size, name=name or path.stem)
        except BadTasks as error:
            raise BadTasks(f"{path}: {error}") from error

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Taskset: ...
    def __getitem__(self, index: int | slice) -> Task | Taskset:
        if isinstance(index, slice):
            return self._picked(range(len(self._tasks))[index])
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __contains__(self, task: object) -> bool:
        return (task if isinstance(task, Task) else Task.of(task)).hash in self._hashes

    @property
    def hashes(self) -> Set[str]:
        """`Task.hash` of every task."""
        return self._hashes.keys()

    @property
    def digest(self) -> str:
        """The SHA-256 of all hashes in order, in hex. Tasksets with equal digests have the same tasks in the same
        order, so their cursors yield the same tasks."""
        return hashlib.sha256("".join(self._hashes).encode()).hexdigest()

    def split(self, *fractions: float, salt: str = "") -> tuple[Taskset, ...]:
        """Divide the tasks into disjoint parts of about these fractions: `train, held_out = tasks.split(0.9, 0.1)`.

        The fractions must add up to 1. A task's part depends only on its hash and on `salt`, so another salt gives an
        independent split.
        """
        numbers = all(isinstance(f, int | float) and f >= 0 for f in fractions)
        if not fractions or not numbers or abs(sum(fractions) - 1) > 1e-9:
            raise BadTasks(
                f"the fractions of a split must be 0 or more and add up to 1, not {list(fractions)}; for example "
                "split(0.9, 0.1)"
            )
        bounds = list(accumulate(fractions))
        parts: list[list[int]] = [[] for _ in fractions]
        for task_hash, k in self._hashes.items():
            # The hash is hashed again with the salt, so that another salt gives an independent split. The first 8 bytes
            # are a uniform point in [0, 1), so the part doesn't depend on the other tasks.
            digest = hashlib.sha256(salt.encode() + task_hash.encode()).digest()
            point = int.from_bytes(digest[:8], "big") / 2**64
            # Because of rounding, the bounds may end slightly below 1. A point above them belongs to the last part.
            parts[min(bisect_right(bounds, point), len(parts) - 1)].append(k)
        return tuple(self._picked(part) for part in parts)

    def cursor(self, seed: int = 0, *, shuffle: bool = True, start: int = 0) -> Iterator[Task]:
        """Yield tasks without end. Each epoch yields every task once, in a new order if `shuffle` is true.

        `start` is the number of tasks that an earlier cursor over the same tasks (same `digest`) has yielded. This
        cursor continues from there.
        """
        if not len(self):
            raise BadTasks(f"{self!r} has no tasks to draw")
        if start < 0:
            raise BadTasks(f"start is {start}; it must be 0 or more")
        epoch, position = divmod(start, len(self))
        epochs = (self._order(seed, k) if shuffle else range(len(self)) for k in count(epoch))
        return (self._tasks[k] for k in islice(chain.from_iterable(epochs), position, None))

    def _order(self, seed: int, epoch: int) -> Sequence[int]:
        # Python promises that `random()` of a seeded generator is the same in every version. For `shuffle()` there is
        # no promise, so a run resumed under another Python version might draw other tasks.
        rng = random.Random(f"{seed}/{epoch}")
        keys = [rng.random() for _ in self._tasks]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _add(self, task: Task) -> None:
        task_hash = task.hash
        if task_hash in self._hashes:
            self.dropped += 1
        else:
            self._hashes[task_hash] = len(self._tasks)
            self._tasks.append(task)

    def _picked(self, indexes: Iterable[int]) -> Taskset:
        part = Taskset((), name=self.name)
        hashes = list(self._hashes)
        for k in indexes:
            part._hashes[hashes[k]] = len(part._tasks)
            part._tasks.append(self._tasks[k])
        return part

    def __repr__(self) -> str:
        return f"<Taskset {self.name or 'without a name'}: {len(self)} tasks, {self.dropped} duplicates dropped>"


def overlap(a: Iterable[Task], b: Iterable[Task]) -> int:
    """Return how many tasks (by hash) `a` and `b` have in common. For training and held-out tasks, this must be 0."""
    first, second = (t.hashes if isinstance(t, Taskset) else {task.hash for task in t} for t in (a, b))
    return len(first & second)


def _label(source: Any) -> str:
    return getattr(source, "__qualname__", None) or repr(source)


def _takes_index(source: Callable[..., Any]) -> bool:
    free = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(source).parameters.values()
    needed = [p for p in parameters if p.kind in free and p.default is p.empty]
    if len(needed) > 1:
        raise BadTasks(
            f"{_label(source)} takes {len(needed)} arguments; a source of tasks takes none (and returns an "
            "iterable), or the index (and returns a task)"
        )
    return len(needed) == 1


def _items(source: Any) -> Iterable[Any]:
    if isinstance(source, Task):
        raise BadTasks("one Task is not a list of tasks: pass [task]")
    if isinstance(source, str | bytes | Mapping):
        raise BadTasks(
            f"the {type(source).__name__} {source!r:.60} is not a list of tasks; to read a file, use Taskset.load"
        )
    pandas = sys.modules.get("pandas")  # without this module, no DataFrame exists
    if pandas is not None and isinstance(source, pandas.DataFrame):
        missing = source.isna().to_dict("records")  # pandas writes NaN for a missing value
        rows = zip(source.to_dict("records"), missing, strict=True)
        return [{key: None if gone[key] else value for key, value in row.items()} for row, gone in rows]
    if isinstance(source, Iterable):
        return source
    if not callable(source):
        raise BadTasks(
            f"{source!r:.60} is not a source of tasks; pass an iterable, a function that returns one, or a "
            "function of the index"
        )
    return map(source, count()) if _takes_index(source) else _items(source())


def _remedy(value: object) -> str:
    if isinstance(value, tuple | set | frozenset):
        return ": make it a list"
    if isinstance(value, bytes) or type(value).__module__.partition(".")[0] == "PIL":
        return ", or pictures: tr.Picture.of(image)"
    return ": convert it with `.tolist()`" if hasattr(value, "tolist") else ""


def as_task(item: object, k: int, row: Row | None = None) -> Task:
    """Convert item `k` of a source to a task. Raises BadTasks if it can't be recorded as JSON."""
    try:
        task = Task.of(item if row is None else row(item))
    except (BadTasks, BadPicture) as error:
        raise BadTasks(f"item {k}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][::2]))  # between two keys is the type of the value
        found = first["input"]
        raise BadTasks(
            f"item {k} is not a task: {place} is {shown(found)}, and {first['msg']}; the parts of a task must "
            f"be JSON values (None, bool, int, finite float, str, list, dict){_remedy(found)}"
        ) from error
    try:
        to_json((task, task.hash))
    except (ValueError, RecursionError) as error:  # lone surrogates, for example
        raise BadTasks(f"item {k} can't be recorded: {type(error).__name__}: {error}") from error
    return task


def standard_row(names: Mapping[str, str]) -> Row:
    """Make a `row` function. `names` maps new names to columns: `{"prompt": "question", "answer": "answer"}`.

    `prompt` (a string, or chat messages as in TRL) and the names in `SHOWN` form the public part of a task. All other
    names form the private part. The function raises BadTasks if a column is missing.
    """
    public = {k: v for k, v in names.items() if k in ("prompt", *SHOWN)}
    return columns(public, {k: v for k, v in names.items() if k not in public})


def columns(
    public: str | Sequence[str] | Mapping[str, str],
    private: str | Sequence[str] | Mapping[str, str] = (),
    *,
    id: str | None = None,
    seed: str | None = None,
) -> Row:
    """Make a `row` function: `Taskset.load("qa.jsonl", row=columns("question", "answer", id="name"))`.

    If `public` or `private` is a single name, this part of the task is the value in that column. For several names, or
    a mapping from new names to columns, it is an object. `seed` names one more column for the private part. The private
    part is then always an object, with this column's value as `seed`, and a single private value as `answer`. The
    function raises BadTasks if a column is missing.
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
    row: Row | None = None,
    config: str | None = None,
    size: int | None = None,
) -> Taskset:
    """Return the tasks in a dataset (see `dataset_rows`). Without `row`, each row is a task."""
    found = dataset_rows(name, split, config=config)
    return Taskset(found, row=row, size=size, name=name)


def dataset_rows(name: str, split: str = "train", *, config: str | None = None) -> Iterable[Mapping[str, object]]:
    """Return the rows of a dataset on the hub (`org/name` or `org/name@revision`), in its local cache, or in a folder.

    `config` names the subset of the dataset. None uses the only subset, or else the subset `default` or `main`. Give a
    revision (a commit) to pin the rows. `datasets` refuses to run loading scripts of datasets. Raises BadTasks, with a
    remedy, if the dataset can't be loaded.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise MissingExtra("datasets", "train", f"reading {name}") from error
    id, revision = (name, None) if Path(name).is_dir() else split_name(name) or (name, None)
    try:
        with _quiet_datasets():
            try:
                return _loaded(id, config, split, revision)
            except OSError:
                # Offline, `datasets` finds only data that it has prepared before. The hub's cache may have the files.
                try:
                    folder = snapshot(id, revision, "dataset", local=True)
                except (NotFound, MissingExtra):
                    folder = None
                if folder is None:
                    raise
                return _loaded(str(folder), config, split, None)
    except Exception as error:  # `datasets` raises many types
        why = " ".join(str(error).split())[:300] or "no reason given"
        raise BadTasks(
            f"the data set {name!r} (split {split!r}) can't be loaded: {type(error).__name__}: {why}. Without a "
            f"network, run `hf download --repo-type dataset {id}` on a machine that has one and bring its cache "
            "(HF_HOME), or name a folder or file"
        ) from error


def _loaded(source: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import get_dataset_config_names, load_dataset, load_from_disk

    if (Path(source) / "state.json").is_file():  # written by `save_to_disk`: one split
        return load_from_disk(source)
    if (Path(source) / "dataset_dict.json").is_file():
        found: Any = load_from_disk(source)
        return found[split]
    try:
        return load_dataset(source, config, split=split, revision=revision)
    except ValueError as error:
        names = get_dataset_config_names(source, revision=revision) if "Config name is missing" in str(error) else []
        usual = next((name for name in ("default", "main") if name in names), None)
        if usual is None:
            raise
        return load_dataset(source, usual, split=split, revision=revision)


def _part(row: Mapping[str, Any], names: str | Sequence[str] | Mapping[str, str]) -> Any:
    if isinstance(names, str):
        return _column(row, names)
    pairs = names.items() if isinstance(names, Mapping) else [(name, name) for name in names]
    found = {name: _column(row, column) for name, column in pairs}
    found = {k: prompt_part(k, v) for k, v in found.items()}
    return {k: v for k, v in found.items() if v or k not in SHOWN} or None  # a row without pictures


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise BadTasks(f"a row has no column {name!r}; it has {', '.join(map(repr, row))}")
    return with_pictures_of(row[name])


def prompt_part(column: str, value: object) -> object:
    """Convert a column's value for the public part of a task, like `with_pictures_of`. It also raises BadPicture if a
    video column holds a value that isn't a video, such as frames without times."""
    found = with_pictures_of(value, urls=column in SHOWN)
    wrong = [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, Picture | list | dict)]
    if column in VIDEOS and wrong:
        raise BadPicture(
            f"the column {column!r} holds {wrong[0]!r:.80}, which isn't a video: write each video as "
            '{"frames": [image, ...], "fps": 30, "indices": [0, ...]}'
        )
    return found


def with_pictures_of(value: object, *, urls: bool = False) -> object:
    """Return a column's value, with images converted to `Picture` and videos to `Video`. An image is a PIL image,
    bytes, or a dict with `bytes`, as in `datasets`. With `urls`, a data URL is an image too. A video is a dict with
    `fps`, a list of images as `frames`, and optionally `indices`. Raises BadPicture if an image or video exceeds the
    limits."""
    if isinstance(value, list):
        return [with_pictures_of(one, urls=urls) for one in value]
    source: Any = value
    if isinstance(value, dict) and value.keys() <= Video.model_fields.keys() and value.get("fps") is not None:
        frames = with_pictures_of(value.get("frames"), urls=urls)
        # `Video.of` would read a file if a frame were a path.
        if isinstance(frames, list) and frames and all(isinstance(frame, Picture) for frame in frames):
            return Video.of(frames, fps=value["fps"], indices=value.get("indices"))
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        source = value["bytes"]
        if source is None:
            raise BadPicture(
                f"the image {value['path']!r:.100} has no bytes: decode the column, cast_column(..., Image())"
            )
    is_url = urls and isinstance(source, str) and DATA_URL.match(source) is not None
    return Picture.of(source) if is_url or isinstance(source, bytes) or hasattr(type(source), "getexif") else value


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`. Also hide its error log, because it raises the same errors."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import CRITICAL, get_verbosity, set_verbosity

    verbosity, quiet = get_verbosity(), are_progress_bars_disabled()
    set_verbosity(CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if not quiet:
            enable_progress_bars()


def _table(path: Path) -> Iterable[object]:
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtra("datasets", "train", f"reading tasks from {path.name}") from error
    if path.suffix == ".csv" and len([line for line in path.read_bytes().splitlines() if line.strip()]) < 2:
        raise BadTasks(f"{path} can't be read: it has no rows; a task file needs at least one")
    with TemporaryDirectory() as scratch, _quiet_datasets():
        # The rows are read once and kept in memory. A copy of them in the user's cache would never be used again.
        try:
            return getattr(Dataset, TABLES[path.suffix])(str(path), cache_dir=scratch, keep_in_memory=True)
        except Exception as error:  # `datasets` raises many types
            cause: BaseException = error
            while isinstance(cause.__cause__, Exception):
                cause = cause.__cause__
            why = next(iter(str(cause).splitlines()), "") or "no reason given"
            raise BadTasks(
                f"{path} can't be read: {type(cause).__name__}: {why}; every row needs the same columns, each of one "
                "type"
            ) from error


def _json_rows(path: Path) -> list[object]:
    """Return the rows of a JSON list, or of a file with one object on each line."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = [(k, line) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
    by_line = path.suffix == ".jsonl" or text.lstrip().startswith(b"{")
    remedy = "correct or remove the line, since every line must be one JSON object"
    if not by_line:
        remedy = "the file must be a JSON list of rows, or one row on each line"
    try:
        rows = [_json(line, dict, k) for k, line in lines] if by_line else _json(text, list)
    except BadTasks as error:
        raise BadTasks(f"{path} can't be read: {error}; {remedy}") from error
    if not rows:
        raise BadTasks(f"{path} can't be read: it has no rows; a task file needs at least one")
    return rows


def _json(text: bytes, wanted: type, line: int = 0) -> Any:
    """Return what the text holds. `line` is its number, or 0 for a whole file. Raises BadTasks if the text isn't JSON
    of the wanted type."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTasks(f"line {line or error.lineno} is not JSON (column {error.colno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise BadTasks(f"line {line or 1} is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(found, wanted):
        raise BadTasks(f"line {line or 1} is not {'an object' if wanted is dict else 'a list'}")
    return found
