"""Tasksets: distinct tasks from any source, shuffled by a seed, with cursors that can be resumed.

A `Taskset` is finite and read whole when it is made. A `TaskStream` has no end and is read on demand. Duplicates (by
`Task.hash`) are dropped and counted. The side of a split on which a task falls depends on its hash and the fractions
only, so it stays the same when the set grows, is reordered or is generated from another seed.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from pydantic import ValidationError

from ..tapes.errors import MissingExtra, UsageError
from ..tapes.records import Task
from .task_files import quiet_datasets, unreadable

Row = Callable[[Any], Any]
"""Converts one item of a source to a `Task`, or to a bare value, which becomes the private part of a task."""


class BadTasks(UsageError):
    """A source doesn't yield tasks, or a cursor belongs to other tasks; the message names the item and the reason."""


class Taskset(Sequence[Task]):
    """Distinct tasks, in the order of their source.

    `Taskset([3, 7])`, `Taskset(generator_function, size=100)`, `Taskset(make_task, size=100)` for a function of the
    index, `Taskset(rows, row=to_task)`, `Taskset.load("tasks.jsonl", row=to_task)`.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[..., Any],
        *,
        size: int | None = None,
        row: Row | None = None,
        name: str = "",
    ) -> None:
        """Read `source` to its end, or until `size` distinct tasks are found (fewer is an error).

        source: an iterable, a function without parameters that returns an iterable, or a function of the index, which
        needs `size` and is called for 0 to size - 1.
        """
        self.name = name
        """A label for messages; may be empty."""
        self.dropped = 0
        """Number of duplicates that were left out."""
        self._hashes: dict[str, int] = {}
        self._tasks: list[Task] = []
        if size is not None and size < 1:
            raise BadTasks(f"size is {size}; it must be at least 1, or None to read the whole source")
        by_index = callable(source) and _takes_index(source)
        if by_index and size is None:
            raise BadTasks(
                f"{_label(source)} is a function of the index and has no end: pass `size`, or use a TaskStream"
            )
        for k, item in enumerate(islice(_items(source), size if by_index else None)):
            self._add(_task(item, k, row))
            if len(self._tasks) == size:
                break
        if size is not None and not by_index and len(self._tasks) < size:
            raise BadTasks(
                f"size is {size}, but the source has {len(self._tasks)} distinct tasks "
                f"({self.dropped} duplicates): reduce `size`, or add tasks to the source"
            )

    @classmethod
    def load(cls, path: str | Path, *, row: Row | None = None, size: int | None = None, name: str = "") -> Taskset:
        """The tasks in a JSONL, JSON, Parquet or CSV file, read by `datasets`; `row` converts each row (a dict).

        Without `row`, the whole row is the private part of its task. Pass a `Dataset` object to `Taskset` directly: it
        is an iterable of rows. BadTasks names the file, the row or line, and the fault.
        """
        path = Path(path)
        kinds = {".jsonl": "from_json", ".json": "from_json", ".parquet": "from_parquet", ".csv": "from_csv"}
        if path.suffix not in kinds:
            raise BadTasks(f"{path} has the suffix {path.suffix!r}; tasks are read from {', '.join(kinds)} files")
        if not path.is_file():
            raise BadTasks(f"there is no file {path}")
        try:
            from datasets import Dataset
        except ImportError as error:
            raise MissingExtra("datasets", "train", f"reading tasks from {path.name}") from error
        if not path.stat().st_size:
            raise BadTasks(f"{path} is empty: a task file needs at least one row")
        with TemporaryDirectory() as scratch, quiet_datasets():
            # The rows are read once and kept in memory; a copy in the user's cache would never be used again.
            try:
                rows = getattr(Dataset, kinds[path.suffix])(str(path), cache_dir=scratch, keep_in_memory=True)
            except Exception as error:  # `datasets` raises many types, and none names the line
                raise BadTasks(f"{path} can't be read: {unreadable(path, error)}") from error
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
        """SHA-256 over the hashes in order (hex): two tasksets with the same digest have the same cursors."""
        return hashlib.sha256("".join(self._hashes).encode()).hexdigest()

    def split(self, *fractions: float, salt: str = "") -> tuple[Taskset, ...]:
        """Disjoint parts, about `fractions` of the whole each: `train, held_out = tasks.split(0.9, 0.1)`.

        The fractions add up to 1. A task's hash and `salt` decide its part; another salt gives an independent split.
        """
        sides = Sides(fractions, salt)
        parts: list[list[int]] = [[] for _ in fractions]
        for task_hash, k in self._hashes.items():
            parts[sides.of(task_hash)].append(k)
        return tuple(self._picked(part) for part in parts)

    def cursor(self, seed: int = 0, *, shuffle: bool = True) -> Cursor:
        """An endless iterator: every task once per epoch, each epoch in a new order."""
        return Cursor(self, seed, shuffle=shuffle)

    def resume(self, state: Mapping[str, Any]) -> Cursor:
        """The cursor whose `state()` this is. BadTasks if the taskset is not the one that the cursor read: the same
        position would then name other tasks."""
        wrong = set(state) ^ {"seed", "shuffle", "epoch", "position", "digest"}
        if wrong:
            raise BadTasks(f"not the state of a cursor over a taskset: {sorted(wrong)} is missing or unknown")
        if state["digest"] != self.digest:
            raise BadTasks(
                f"the cursor belongs to a taskset with digest {state['digest'][:12]}, but this one has "
                f"{self.digest[:12]} ({len(self)} tasks): resume with the original tasks"
            )
        cursor = Cursor(self, int(state["seed"]), shuffle=bool(state["shuffle"]))
        cursor._seek(int(state["epoch"]), int(state["position"]))
        return cursor

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


class TaskStream(Iterable[Task]):
    """Tasks without an end or a length. Each pass calls the source function again, so it must be deterministic.

    `TaskStream(make_task)` for a function of the index, or `TaskStream(generator_function)`. `take(n)` returns a
    `Taskset`.
    """

    def __init__(self, source: Callable[..., Any], *, row: Row | None = None, name: str = "") -> None:
        if not callable(source):
            raise BadTasks(
                f"a TaskStream needs a function that it can call for each pass, not {_label(source)}: use a Taskset"
            )
        self.name = name
        self._source = source
        self._row = row
        self._keep: Callable[[str], bool] = _every

    def __iter__(self) -> Iterator[Task]:
        seen: set[str] = set()
        for k, item in enumerate(_items(self._source)):
            task = _task(item, k, self._row)
            task_hash = task.hash
            if task_hash not in seen and self._keep(task_hash):
                seen.add(task_hash)
                yield task

    def take(self, size: int) -> Taskset:
        """The first `size` distinct tasks."""
        return Taskset(self, size=size, name=self.name)

    def split(self, *fractions: float, salt: str = "") -> tuple[TaskStream, ...]:
        """As `Taskset.split`: a task falls on the same side in both classes."""
        sides = Sides(fractions, salt)
        return tuple(self._where(sides, k) for k in range(len(fractions)))

    def _where(self, sides: Sides, part: int) -> TaskStream:
        stream, before = TaskStream(self._source, row=self._row, name=self.name), self._keep
        stream._keep = lambda task_hash: before(task_hash) and sides.of(task_hash) == part
        return stream

    def cursor(self, position: int = 0) -> StreamCursor:
        """The tasks from `position` on (earlier tasks are generated again and skipped)."""
        return StreamCursor(self, position)

    def resume(self, state: Mapping[str, Any]) -> StreamCursor:
        """The cursor whose `state()` this is."""
        if set(state) != {"position"}:
            raise BadTasks(f"not the state of a cursor over a stream of tasks: {sorted(state)}")
        return self.cursor(int(state["position"]))


class Cursor(Iterator[Task]):
    """A position in the endless shuffled epochs of a taskset. Made by `Taskset.cursor`; for one reader."""

    def __init__(self, tasks: Taskset, seed: int, *, shuffle: bool) -> None:
        if not len(tasks):
            raise BadTasks(f"{tasks!r} has no tasks to draw")
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """Completed passes."""
        self.position = 0
        """Tasks already drawn in this epoch."""
        self._digest = tasks.digest
        self._order = self._permuted()

    def _permuted(self) -> Sequence[int]:
        n = len(self.tasks)
        if not self.shuffle:
            return range(n)
        # Python promises that `random()` of a seeded generator is the same in every version; `shuffle()` isn't covered.
        # With `shuffle()`, a run resumed under another Python would draw other tasks.
        rng = random.Random(f"{self.seed}/{self.epoch}")
        keys = [rng.random() for _ in range(n)]
        return sorted(range(n), key=keys.__getitem__)

    def _seek(self, epoch: int, position: int) -> None:
        if epoch < 0 or not 0 <= position <= len(self.tasks):
            raise BadTasks(f"epoch {epoch}, position {position} is outside {self.tasks!r}")
        self.epoch, self.position = epoch, position
        self._order = self._permuted()

    def __next__(self) -> Task:
        if self.position == len(self._order):
            self._seek(self.epoch + 1, 0)
        self.position += 1
        return self.tasks[self._order[self.position - 1]]

    def state(self) -> dict[str, Any]:
        """The JSON that `Taskset.resume` needs to continue with the next task."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "digest": self._digest,
        }


class StreamCursor(Iterator[Task]):
    """A position in a stream of tasks. Made by `TaskStream.cursor`."""

    def __init__(self, stream: TaskStream, position: int) -> None:
        self.position = position
        """Tasks already drawn."""
        self._rest = islice(iter(stream), position, None)

    def __next__(self) -> Task:
        task = next(self._rest)
        self.position += 1
        return task

    def state(self) -> dict[str, Any]:
        """The JSON that `TaskStream.resume` needs to continue with the next task."""
        return {"position": self.position}


class Sides:
    """Assigns each task hash to a part of a split."""

    def __init__(self, fractions: Sequence[float], salt: str = "") -> None:
        if not fractions or any(f < 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-9:
            raise BadTasks(
                f"the fractions of a split must be 0 or more and add up to 1, not {list(fractions)}; for example "
                "split(0.9, 0.1)"
            )
        self._bounds = [sum(fractions[: k + 1]) for k in range(len(fractions))]
        self._salt = salt.encode()

    def of(self, task_hash: str) -> int:
        """Index of the part."""
        # Hashed again with the salt: another salt gives an independent split. The first 8 bytes are a uniform point in
        # [0, 1), so the part doesn't depend on the other tasks.
        point = int.from_bytes(hashlib.sha256(self._salt + task_hash.encode()).digest()[:8], "big") / 2**64
        # The bounds may add up to slightly less than 1 by rounding; such a point belongs to the last part.
        return next((k for k, bound in enumerate(self._bounds) if point < bound), len(self._bounds) - 1)


def overlap(a: Iterable[Task], b: Iterable[Task]) -> int:
    """The number of tasks that occur in both, by hash. Assert that it is 0 for training and held-out tasks."""
    first, second = (t.hashes if isinstance(t, Taskset) else {task.hash for task in t} for t in (a, b))
    return len(first & second)


def _every(task_hash: str) -> bool:
    return True


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


def _items(source: Any) -> Iterator[Any]:
    if isinstance(source, str | bytes | Mapping):
        raise BadTasks(
            f"the {type(source).__name__} {source!r:.60} is not a list of tasks; to read a file, use Taskset.load"
        )
    if not callable(source) or isinstance(source, Iterable):
        if not isinstance(source, Iterable):
            raise BadTasks(
                f"{source!r:.60} is not a source of tasks; pass an iterable, a function that returns one, or a "
                "function of the index"
            )
        return iter(source)
    if _takes_index(source):
        return map(source, count())
    return _items(source())


def _task(item: Any, k: int, row: Row | None) -> Task:
    try:
        return Task.of(item if row is None else row(item))
    except BadTasks as error:
        raise BadTasks(f"item {k}: {error}") from error
    except ValidationError as error:
        raise BadTasks(
            f"item {k} is not a task: {error.errors()[0]['msg']} ({item!r:.80}); the parts of a task must be JSON "
            "values (None, bool, int, float, str, list, dict)"
        ) from error
