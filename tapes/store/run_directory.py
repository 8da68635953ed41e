"""A run directory has the run's configuration, its results so far, its metrics and its store.

The configuration is written when the run begins. When the run is resumed, only a few settings may differ. If a new
value is recorded, it replaces the old value in the file, and a comment at the top of the file gives the old value.
`results.json` is written again after each result that a resumed process must not compute again.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import reduce
from itertools import takewhile
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from ..common.config import AT_RESUME, FORMAT, ConfigError, check_version, dump_config, load_config, translated
from ..common.config_yaml import Group, YamlProblem, nested, read_yaml, settings_of
from ..common.text import counted, logger
from ..errors import Corrupt, NotATape, UsageError
from ..value import Value
from .books import Books
from .disk import METRICS, REAL, counted_lines, open_regular, put_file, read_file
from .lease import Lease
from .store import Store

log = logger("run")
_Line = TypeAdapter(dict[str, JsonValue])
Check = Callable[[], object]
CONFIG, RESULTS, RECIPES = "config.yaml", "results.json", "recipes.json"


class HeldOut(Value):
    """The rewards of one evaluation on held-out tasks."""

    mean: float | None
    """Mean reward of the scored episodes, or None if there are none."""
    error: float | None
    """Standard error of the mean."""
    n: int
    """Number of scored episodes."""
    metrics: dict[str, float]
    """Mean of every reward component and metric."""
    lengths: dict[str, float | None] = Field(default={})
    """Statistics on turns, tokens and ends of the episodes, under the same names as in the metrics."""
    reward: dict[str, float | int | None] | None
    """Mean reward over tasks (`value`), its interval (`low` and `high`), and the number of tasks (`tasks`)."""
    pass_at: dict[str, dict[str, float | int | None] | None]
    """pass@k with its interval, by k."""
    agents: dict[str, float | None] | None = None
    """Mean reward of each agent, by path. Set if each agent has its own reward."""
    change: dict[str, float | int | None] | None = None
    """Difference from the evaluation before training, over the tasks that both scored. It has the same keys as `reward`
    and the means over these tasks (`first` after training, `second` before). Set only in the final evaluation."""
    pass_change: dict[str, dict[str, float | int | None] | None] = Field(default={}, exclude_if=operator.not_)
    """The same for pass@k, by k."""


Evaluations = dict[str, HeldOut]
"""The rewards of each evaluation (`sampled`, `greedy`)."""


class PlayerResults(BaseModel):
    """The results of one player."""

    base: str | None = None
    """Digest of the weights that the player's model began with."""


class Lengthened(Value):
    """An earlier length of a run that was made longer."""

    updates: int
    """The earlier length of the loop in updates, or the smaller number of updates after which a reward that was
    reached ended the loop."""
    done: int
    """Number of updates that the loop had made when this value was changed."""


class CodeVersion(Value):
    """The code of a run's agent, environment and rewards, from one point of the run on."""

    digests: dict[str, str]
    """A digest for each part of the code, and the version of Python, on which digests depend."""
    changed: tuple[str, ...] = ()
    """The parts that differ from the previous version. Empty for the first one."""
    updates: int = 0
    """Number of updates that were recorded when a process began with this code."""
    episodes: int = 0
    """Number of episodes that had begun by then. Later ones are played and scored by this code."""

    def after(self, digests: Mapping[str, str], updates: int, episodes: int) -> CodeVersion | None:
        """Return the next version, or None if these digests are the same."""
        python = [name for name in ("python",) if self.digests.get(name) != digests.get(name)]
        names = python or list(dict.fromkeys([*digests, *self.digests]))
        changed = tuple(name for name in names if self.digests.get(name) != digests.get(name))
        if not changed:
            return None
        return CodeVersion(digests=dict(digests), changed=changed, updates=updates, episodes=episodes)

    def __str__(self) -> str:
        what = "Python's version" if "python" in self.changed else f"the code of {', '.join(self.changed)}"
        return (
            f"{what} changed after {counted(self.updates, 'update')} and {counted(self.episodes, 'episode')}: only "
            "later episodes have the new one"
        )


class Results(BaseModel):
    """The results of a run so far. The file has only the fields that differ from their defaults."""

    model_config = ConfigDict(extra="allow")

    format: int = 0
    """Number of the format of the run's settings. It is 0 if the run was begun with an unreleased commit."""
    lineage: str = ""
    """The lineage that the run trains. Empty in a run without training."""
    base: str | None = None
    """Digest of the weights that the model began with."""
    players: dict[str, PlayerResults] = {}
    task_rates: dict[str, tuple[int, int]] = {}
    """(Number passed, number tried) of each task, by hash. The curriculum read these numbers when the run began."""
    imitated: list[str] | None = None
    """Ids of the tapes for the warm start, as copied into this run."""
    corpus: list[str] | None = None
    """Ids of the tapes from the corpus, or None until all of them are written."""
    corpus_digest: str | None = None
    """Digest of the texts in the corpus when the run began."""
    seconds: dict[str, float] = {}
    reapplied: int = 0
    """Number of updates that resumed processes applied again."""
    before: Evaluations | None = None
    evaluations: dict[str, Evaluations] = {}
    """The evaluations during the loop, by the number of updates that the loop had made."""
    idle_share: float | None = None
    lengths: list[Lengthened] = []
    code: list[CodeVersion] = []
    """The versions of the user's code, oldest first. Empty if the run was begun by an earlier version of Tapereel."""
    after: Evaluations | None = None
    lost_points: dict[str, int] = {}
    """Number of data points that each tracker failed to receive."""
    books: Books | None = None
    books_close: bool | None = None
    summary: JsonValue = None
    """The summary of the last process that came to the end of the run. In its texts, `{run}` is the path of the run,
    which may be moved later. None if no process has ended yet, or if an earlier version of Tapereel wrote the run."""

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """Read the results of the run at `path`. Raises OSError, or NotATape if the file doesn't hold results."""
        try:
            return cls.model_validate_json(read_file(Path(path) / RESULTS))
        except ValueError as error:
            raise NotATape(f"{Path(path) / RESULTS} holds no results: {str(error).splitlines()[0]}") from error

    def write(self, path: Path, check: Check = lambda: None) -> None:
        """Write the results of the run at `path`. They are durable when this returns. `check` is called before the old
        file is replaced, and may raise an error to keep the old file."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"
        put_file(REAL, path / RESULTS, text.encode(), check=check)


Change = Callable[["RunDir", Any, Any], str]
"""A function that `open_run` calls when a setting has changed, with (run, old value, new value). It returns a phrase
for the configuration file that describes when the setting was changed. It may also adapt the results to the new value,
or raise UsageError to refuse the change."""


class RunDir:
    """A run directory with its store open for writing. `open_run` creates it."""

    def __init__(self, path: Path, results: Results, store: Store, *, resumed: bool) -> None:
        self.path = path
        self.results = results
        """The results so far. Call `save()` to write them."""
        self.store = store
        self.sealed = ExitStack()
        """Callbacks on this stack run after the store is sealed, while this process still holds the lease. They also
        run if an error ends the run."""
        self.resumed = resumed
        """True if an earlier process began the run."""
        self.listeners: list[Callable[[Mapping[str, object]], None]] = []
        """Functions that are called with each line of metrics after it was written to the file."""

    @property
    def fruitless(self) -> bool:
        """Whether the run has no usable result yet, because every episode so far was ended by a fault in the
        environment, the model or Tapereel."""
        return not any(summary.trainable for summary in self.store.summaries(closed=True))

    def save(self) -> None:
        """Write the results, which are durable when this returns. Raises LeaseLost if this process has lost its
        lease."""
        self.results.write(self.path, self.store.check_lead)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the context to `results.seconds[name]`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(name, time.perf_counter() - started)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to `results.seconds[name]`."""
        table = self.results.seconds
        table[name] = round(table.get(name, 0.0) + seconds, 3)

    def summarise(self, summary: BaseModel) -> None:
        """Save the summary of the run with the results."""
        path = json.dumps(str(self.path.absolute()), ensure_ascii=False)[1:-1]
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", "{run}", summary.model_dump_json())
        self.results.summary = json.loads(text)
        self.save()

    def metrics(self, line: Mapping[str, object]) -> None:
        """Append `line` to metrics.jsonl. If this process has a lease, the lease's epoch is added as the first value.
        Then call the listeners. Raises LeaseLost if this process has lost its lease."""
        lead = {} if self.store.lease is None else {"lead": self.store.lease.epoch}
        append_metrics(self.path / METRICS, {**lead, **line}, check=self.store.check_lead)
        for listener in self.listeners:
            listener(line)

    def drop_metrics(self, where: Callable[[dict[str, JsonValue]], bool]) -> None:
        """Remove the lines of metrics.jsonl for which `where(line)` is true."""
        _keep_counted(self.path / METRICS, self.store.check_lead, lambda line: not where(_Line.validate_json(line)))


@contextmanager
def open_run(
    path: str | Path,
    config: BaseModel,
    *,
    resume: bool = False,
    free: Collection[str] = (),
    changes: Mapping[str, Change] | None = None,
    engines: Collection[str] = (),
    begin: Callable[[], Results] = Results,
    code: Mapping[str, str] | None = None,
) -> Iterator[RunDir]:
    """Begin the run at `path`, or resume it. `begin()` returns the first results of a new run. `code` has digests of
    the user's code. If they changed before a resume, this is logged and recorded in the results.

    When a run is resumed, these settings may differ from its configuration file:

    * The settings in `free` (dotted keys) and all `FreeAtResume` settings. The file keeps their old values.
    * A setting in `changes`, if its function allows the change. The file gets the new value.
    * A setting in the groups `engines`, if no episode has a result yet. The file gets the new value.

    Raises UsageError if a run exists at `path` and `resume` is false, or the reverse, if another program wrote the
    tapes there, or if another process leads the run. Raises ConfigError if the run has a different configuration. The
    store is sealed when the context ends.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; a run is a folder, so choose another path (`out=...`)")
    found = (path / CONFIG).exists()
    if found and not resume:
        raise UsageError(f"{path} holds a run already; continue it with `resume=True`, or choose another (`out=...`)")
    if resume and not found:
        raise UsageError(f"{path} holds no run: name its folder (`out=...`), or begin a run without `resume=True`")
    if not found and (path / "tapes").exists():
        raise UsageError(f"{path} holds tapes of another program (it has no {CONFIG}); choose another path (`out=...`)")
    changes = changes or {}
    if found:
        _check_config(path, config, (*free, *changes, *engines))
    results = Results() if found else begin().model_copy(update={"format": FORMAT})
    with Lease(path) as lease, ExitStack() as after_sealing:
        if (path / CONFIG).exists() != found:
            raise UsageError(f"{path} was begun by another process at the same moment; choose another path (`out=...`)")
        for name in (CONFIG, RESULTS, METRICS, RECIPES, "teacher/*"):
            for part in path.glob(f"{name}.*-*.part"):
                part.unlink(missing_ok=True)  # so that an earlier lead, paused before its rename, can't rename it
        if found:
            # The results are read under the lease, because until now, the previous lead may have written results.
            results = Results.read(path)
            _keep_counted(path / METRICS, lease.check)
        else:
            # The results are written first. A crash between the two writes leaves no configuration, so the run is begun
            # again. In the other order, the crash would leave a run that looks begun but has no results to resume from.
            results.write(path, lease.check)
            put_file(REAL, path / CONFIG, dump_config(config).encode(), check=lease.check)
        with Store.open(path, write=True) if (path / "tapes").is_dir() else Store.create(path) as store:
            store.take_lead(lease)
            run = RunDir(path, results, store, resumed=found)
            after_sealing.enter_context(run.sealed)
            if found:
                if edited := store.edited():
                    raise Corrupt(f"{edited[0]}. Restore the file from a copy: a resumed run would build on the edit")
                if not run.fruitless:
                    _check_config(path, config, (*free, *changes))
            files = [path / name for name in (CONFIG, RESULTS, METRICS, RECIPES)]
            store.record_files(*files, open=True)
            if found:
                # This precedes changes to the files. A crash must not leave changed files with old digests.
                store.writer.sync()
                _change(run, config, free, {**changes, **dict.fromkeys(engines, _corrected)})
            _note_code(run, code or {})
            try:
                yield run
            finally:
                # A writer that failed can't record digests. The files then have no digests, as after a crash.
                if store.writer.failure is None:
                    store.record_files(*files)


def _note_code(run: RunDir, code: Mapping[str, str]) -> None:
    """Record the code that this process uses, if it is not the code of the process before."""
    known, lineage = run.results.code, run.results.lineage
    updates = run.store.ledger(lineage).next_update if lineage and run.resumed else 0
    episodes = len(run.store.summaries()) if run.resumed else 0
    first = CodeVersion(digests=dict(code), updates=updates, episodes=episodes)
    found = known[-1].after(code, updates, episodes) if known else first
    if not code or found is None:
        return
    if known:
        log.warning(f"{run.path}: {found}")
    known.append(found)
    run.save()


def recorded_summary(path: str | Path) -> str | None:
    """Return the summary of the run at `path` as JSON, or None if it has none yet."""
    try:
        found = Results.read(path).summary
    except (FileNotFoundError, NotADirectoryError):
        return None
    here = json.dumps(str(Path(path).absolute()), ensure_ascii=False)[1:-1]
    return None if found is None else json.dumps(found, ensure_ascii=False).replace("{run}", here)


def code_changes(path: str | Path) -> tuple[str, ...]:
    """Return a sentence about each change of the user's code during the run at `path`."""
    try:
        return tuple(str(one) for one in Results.read(path).code if one.changed)
    except (FileNotFoundError, NotADirectoryError):
        return ()


def recorded_settings(path: str | Path) -> Group:
    """Return the result of `recorded_config`, or an empty group if the run has no readable configuration."""
    try:
        return recorded_config(path)
    except (FileNotFoundError, NotADirectoryError, YamlProblem):
        return {}


def recorded_config(path: str | Path) -> Group:
    """Return the configuration of the run at `path` as nested groups.

    Raises OSError or YamlProblem if it can't be read, and OtherVersion if another version wrote it."""
    check_version(Path(path))
    try:
        text = read_file(Path(path) / CONFIG).decode()
    except UnicodeDecodeError as error:
        raise YamlProblem(f"it is not UTF-8 text: {error}") from None
    return nested((keys, value) for keys, value, _ in translated(list(read_yaml(text))))


def append_metrics(path: Path, line: Mapping[str, object], *, check: Check = lambda: None) -> None:
    """Append one JSON line, which is durable when this returns. NaN and infinities become null, which every JSON reader
    accepts.

    `check` is called after the file is opened. If a later lead replaces the file between `check` and the write, the
    line goes to the old file and doesn't reach the new one.
    """
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    data = json.dumps(clean).encode() + b"\n"
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        check()
        file.write(data)
        file.flush()
        REAL.sync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, JsonValue]]:
    """Return the complete lines in a metrics.jsonl as they were passed to `RunDir.metrics`, or an empty list if the
    file is missing. Lines from a lead that had already been replaced are left out. Raises NotATape if a line isn't a
    JSON object."""
    try:
        lines = counted_lines(read_file(path))
    except FileNotFoundError:
        return []
    found = list[dict[str, JsonValue]]()
    # A last line without a newline is still being written, or was cut off by a crash.
    for k, line in enumerate(line for line in lines if line.endswith(b"\n")):
        try:
            found.append(_Line.validate_json(line))
        except ValueError:
            raise NotATape(f"{path}: line {k + 1} isn't a JSON object: restore the file from a copy") from None
        found[-1].pop("lead", None)
    return found


def _differences(path: Path, config: BaseModel, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Return (value in the file, current value) of each setting that differs and isn't free, by dotted key."""
    both = (load_config(type(config), path / CONFIG), config)
    then, now = (dict(settings_of(one.model_dump(mode="json", context=AT_RESUME))) for one in both)
    keys = {".".join(key): key for key in {**then, **now} if then.get(key) != now.get(key)}
    return {name: (then.get(key), now.get(key)) for name, key in keys.items() if not _is_in(name, free)}


def _is_in(key: str, groups: Iterable[str]) -> bool:
    return f"{key}.".startswith(tuple(f"{one}." for one in groups))


def _check_config(path: Path, config: BaseModel, free: Collection[str]) -> None:
    differ = _differences(path, config, free)
    verb = "differs" if len(differ) == 1 else "differ"
    if differ:
        raise ConfigError(
            f"{path} was begun with another configuration ({path / CONFIG}): {', '.join(differ)} {verb}; resume it "
            "with the settings in that file, or choose another path (`out=...`)"
        )


def _corrected(run: RunDir, then: object, now: object) -> str:
    return "before any episode had a result"


def _change(run: RunDir, config: BaseModel, free: Collection[str], changes: Mapping[str, Change]) -> None:
    differ = _differences(run.path, config, free)
    values, notes = load_config(type(config), run.path / CONFIG).model_dump(mode="json"), list[str]()
    for group, change in changes.items():
        *above, last = group.split(".")
        for key, (then, now) in differ.items():
            if _is_in(key, [group]):
                when = change(run, then, now)
                notes.append(f"# {key} was {then!r} until {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, {when}.\n")
                reduce(getitem, above, values)[last] = reduce(getitem, above, config.model_dump(mode="json"))[last]
    if not notes:
        return
    # The results are written first, as when a run begins. After a crash between the two writes, the next resume repeats
    # the change, and results that the change removed are computed again.
    run.save()
    text = read_file(run.path / CONFIG).decode()
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    text = head + "".join(notes) + dump_config(type(config).model_validate(values))
    put_file(REAL, run.path / CONFIG, text.encode(), check=run.store.check_lead)


def _keep_counted(path: Path, check: Check, where: Callable[[bytes], bool] = lambda line: True) -> None:
    """Replace the metrics file with a copy of the lines that count and for which `where(line)` is true. An earlier lead
    may still have the old file open, and then can't append to the new file. A last line without a newline is dropped,
    since the next line would extend it."""
    if path.exists():
        lines = [line for line in counted_lines(read_file(path)) if line.endswith(b"\n")]
        put_file(REAL, path, b"".join(filter(where, lines)), check=check)
