"""The runs in a folder: a row of facts for each, and the comparison of two of them, task by task.

A run is named by a key, which is a hash of its path below the folder. Requests name runs only by their keys, so no text
from a request reaches the disk. Links are not followed, so every run lies inside the folder. If something in a run
can't be read, its row says so and shows the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from pydantic import Field

from ..common.config_yaml import YamlProblem
from ..common.stats import mean_of
from ..common.text import safe
from ..errors import NoSuchTape, TapereelError
from ..store.disk import METRICS
from ..store.run_directory import RESULTS, Results, read_metrics, recorded_config
from ..store.segment import segment_names
from ..store.store import Store
from ..store.summary import Summary, attempts_of
from ..value import Value
from .live import state_of
from .overview import NO_METRICS
from .run_view import Insight, RunView

DEPTH = 2
"""Runs are looked for in this number of levels below the folder."""
LAST = 5
"""The reward of a training run is the mean of this number of its last updates, as on the overview."""
AFTER = "eval-after-sampled"
"""The split that a comparison begins with, if both runs have it."""

Compare = Callable[[Path, str | None, Path, str | None], Value]
"""A function of (run, split, other run, its split). It returns the comparison: the scores of
both, and their difference, paired by task. `agents` provides it."""


class RunRow(Value):
    """The facts about a run in the list. A fact that isn't known is None."""

    state: str
    """`running`, `finished`, `stopped` (closed before its last update), `died` (its writer is gone), `not sealed` (it
    is unknown whether its writer lives) or `broken` (bytes changed or can't be read)."""
    model: str | None = None
    recipe: str | None = None
    """The recipe of a training run."""
    tapes: int | None = None
    updates: int | None = None
    """Number of updates that the loop has made."""
    updates_planned: int | None = None
    reward: float | None = None
    """Mean reward of the last updates or, without training, of all scored tapes."""
    before: float | None = None
    """Mean held-out reward before the loop."""
    after: float | None = None
    problems: tuple[str, ...] = Field(default=())
    """One sentence for each part of the run that is missing or can't be read."""


class Entry(TypedDict):
    """A run in the list."""

    key: str
    name: str


class RunList(TypedDict):
    """The first answer that the page of a folder needs."""

    run: str
    path: str
    runs: list[Entry]


class Runs:
    """The runs in a folder, open for reading. Use it as a context manager. It serves one caller at a time, except for
    `row` and `compared`, which may run in another thread."""

    def __init__(
        self,
        folder: str | Path,
        *,
        insight: Callable[[Store], Insight] | None = None,
        compare: Compare | None = None,
    ) -> None:
        """`insight` is passed to the view of each run. Without `compare`, a comparison has no intervals."""
        self.folder = Path(folder)
        self._insight, self._compare = insight, compare
        self._found: dict[str, Path] = {}
        self._views: dict[str, RunView] = {}

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for view in self._views.values():
            view.store.close()

    def overview(self) -> RunList:
        """Look for runs, and return their names in order. Runs may appear and vanish."""
        self._found = {_key(path, self.folder): path for path in find_runs(self.folder)}
        return {
            "run": safe(os.path.basename(os.path.abspath(self.folder))),
            "path": safe(str(self.folder)),
            "runs": [{"key": key, "name": self._name(path)} for key, path in self._found.items()],
        }

    def _name(self, path: Path) -> str:
        return safe(str(path.relative_to(self.folder)))

    def path(self, key: str) -> Path:
        """Return the path of the run with this key. Raises NoSuchTape if the folder has no such run now."""
        if key not in self._found:
            self.overview()
        path = self._found.get(key)
        if path is None or not _is_run(path):
            raise NoSuchTape(f"no run {key} is in {self.folder}: it was removed, or the link is of another folder")
        return path

    def view(self, key: str) -> RunView:
        """Return the view of the run with this key. It stays open."""
        path = self.path(key)
        if key not in self._views:
            self._views[key] = RunView(path, insight=self._insight)
        return self._views[key]

    def row(self, key: str) -> RunRow:
        """Return the facts about a run."""
        return _row(self.path(key))

    def compared(self, first: str, second: str, split: str | None, against: str | None) -> dict[str, object]:
        """Compare two runs task by task. `split` and `against` select the splits of the first and the second run. If
        they are None, the held-out tasks after training are compared if both runs have them, and otherwise all tapes.
        An empty string stands for all tapes."""
        paths = self.path(first), self.path(second)
        tapes, splits, problems = list[list[Summary]](), list[list[str]](), list[str]()
        for path in paths:
            try:
                with Store.open(path) as store:
                    store.strict = False
                    tapes.append(store.summaries(closed=True))
            except (TapereelError, OSError) as error:
                tapes.append([])
                problems.append(str(error))
            splits.append(sorted({one.split for one in tapes[-1]}))
        usual = AFTER if all(AFTER in some for some in splits) else ""
        chosen = [usual if split is None else split, against if against is not None else split or usual]
        sides = [
            attempts_of(one for one in some if not name or one.split == name)
            for some, name in zip(tapes, chosen, strict=True)
        ]
        scores: Value | None = None
        try:
            if self._compare is not None and all(sides):
                scores = self._compare(paths[0], chosen[0] or None, paths[1], chosen[1] or None)
        except (TapereelError, OSError) as error:
            problems.append(str(error))
        return {
            "names": [self._name(path) for path in paths],
            "splits": splits,
            "chosen": chosen,
            "scores": None if scores is None else scores.model_dump(mode="json"),
            "tasks": list(_tasks(sides[0], sides[1])),
            "problems": problems,
        }


def find_runs(folder: Path) -> list[Path]:
    """Return the runs below `folder`, in the order of their paths. Folders that can't be read are skipped, and links
    aren't followed."""
    found = list[Path]()
    level = [folder]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _folders(outer)]
        found += filter(_is_run, level)
    return sorted(found)


def is_run(path: str | Path) -> bool:
    """Return whether this folder is itself a run, as `Store.open` understands it."""
    return (Path(path) / "tapes").is_dir()


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    tapes = path / "tapes"
    try:
        return not path.is_symlink() and not tapes.is_symlink() and bool(segment_names(os.listdir(tapes)))
    except OSError:
        return False


def _key(path: Path, folder: Path) -> str:
    return hashlib.sha256(os.fsencode(path.relative_to(folder))).hexdigest()[:12]


def _row(path: Path) -> RunRow:
    problems = list[str]()
    settings, results = dict[str, object](), Results()
    try:
        settings |= recorded_config(path)
    except FileNotFoundError:
        pass  # tapes of another program have no settings
    except (TapereelError, OSError, YamlProblem) as error:
        problems.append(str(error))
    loop, engine = settings.get("loop"), settings.get("engine")
    planned = updates if isinstance(loop, dict) and isinstance(updates := loop.get("updates"), int) else None
    model = engine.get("model") if isinstance(engine, dict) else None
    lines = None
    try:
        if (path / METRICS).exists():
            lines = [line for line in read_metrics(path / METRICS) if line.get("phase") == "rl"]
        elif planned is not None:
            problems.append(NO_METRICS)
        if (path / RESULTS).exists():
            results = Results.read(path)
    except (TapereelError, OSError) as error:
        problems.append(str(error))
    state, scored, tapes = "broken", list[float](), None
    try:
        with Store.open(path) as store:
            breaks = store.index.refresh()
            rewards = store.index.rewards()
            tapes, scored = len(rewards), [reward for reward in rewards.values() if reward is not None]
            corrupt = [str(one) for one in breaks.values() if one.verdict == "corrupt"]
            corrupt += map(str, store.index.unread())
            problems += corrupt
            if not corrupt:
                state = state_of(store)
            if state == "closed":
                short = lines is not None and planned is not None and len(lines) < planned
                state = "stopped" if short else "finished"
    except (TapereelError, OSError, ValueError) as error:
        problems.append(str(error))
    last = [float(str(line["reward"])) for line in lines or () if line.get("reward") is not None][-LAST:]
    before, after = (part["sampled"].mean if part else None for part in (results.before, results.after))
    return RunRow(
        state=state,
        model=None if model is None else safe(str(model)),
        recipe=safe(str(loop.get("recipe") or "reward")) if isinstance(loop, dict) else None,
        tapes=tapes,
        updates=None if lines is None else len(lines),
        updates_planned=planned,
        reward=mean_of(last if planned is not None else scored),
        before=before,
        after=after,
        problems=tuple(map(safe, problems)),
    )


def _tasks(a: dict[str, list[Summary]], b: dict[str, list[Summary]]) -> Iterator[dict[str, object]]:
    """Yield a row for each task of the two sides. The mean reward of a side is None if it scored nothing."""
    for task in dict.fromkeys([*a, *b]):
        sides = a.get(task, []), b.get(task, [])
        first = next(one for side in sides for one in side)
        yield {
            "task": first.task or task[:12],
            "rewards": [mean_of([s.reward for s in side if s.trainable and s.reward is not None]) for side in sides],
            "attempts": [len(side) for side in sides],
            "tapes": [min(side, key=lambda s: s.attempt).id if side else None for side in sides],
        }
