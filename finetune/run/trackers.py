"""Trackers: sends the lines of metrics.jsonl to TensorBoard, wandb, trackio or mlflow, through `accelerate`.

The file is always written first. Trackers get the numbers on three axes, each with a separate step:

    rollout/   what was sampled              over the episodes so far (`rollout/episodes_so_far`)
    train/     what the update did           over the updates (`train/update`)
    eval/      held-out tasks                over the updates (`eval/update`)

They also get a table of episodes as text (`completions`). A tracker that fails never stops training. The
failure is logged once, and the lost points are counted. When a run begins, trackers also get its configuration, in
which secrets are hidden. They write below the run directory, unless an environment variable names a server (WANDB_MODE,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, NamedTuple, Protocol, cast

from ...tapes import Tape
from ...tapes.common.config import Config
from ...tapes.common.config_yaml import settings_of
from ...tapes.common.redact import hide
from ...tapes.common.text import logger
from ...tapes.errors import MissingExtra
from ...tapes.store.disk import REAL, put_file
from ...tapes.store.run_directory import METRICS, RunDir, read_metrics, recorded_settings
from ...tapes.transcript import shown

log = logger("trackers")

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Axis = Literal["rollout", "train", "eval"]
STEPS: dict[Axis, str] = {"rollout": "episodes_so_far", "train": "update", "eval": "update"}
"""The name of each axis's step."""
FOLDER = "trackers"
"""The trackers' folder, below the run directory."""
IDS = "ids.json"
"""File in the folder `trackers` with each tracker's id for the run. With these ids, a resumed run continues the same
curves."""
ROLLOUT = frozenset({"reward", "component", "return", "episodes", "turns", "length", "ended", "truncated", "lag"})
ROLLOUT |= {"stale_tokens", "stale_share", "filtered_tokens"}
"""Keys of a metrics line that describe rollouts. A key with a slash does too if the part before its first slash is
listed here."""
TABLE, COLUMNS, MOST = "completions", ("update", "tape", "prompt", "completion", "reward"), 32
"""Name and columns of the table of episodes, and the largest number of rows from one update."""
_UNNAMED = re.compile(r"[^\w.\- :/]")
"""Characters that mlflow refuses in the name of a metric."""
Setting = bool | int | float | str
"""The value of a setting, as every tracker takes it. Lists, mappings and None are JSON text."""


class TrackingConfig(Config):
    """How the run is called in the trackers. TensorBoard uses none of it."""

    project: str | None = None
    """The project, in mlflow the experiment. None means `WANDB_PROJECT`, or `tapereel`."""
    group: str | None = None
    """The group of runs in wandb and trackio, in mlflow the tag `group`."""
    name: str | None = None
    """The name of the run. None means the name of its folder."""


class TrackedConfig(Config):
    """The trackers of a run, and how it is called there."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that also get the metrics. metrics.jsonl is always written."""
    tracking: TrackingConfig = TrackingConfig()


class Point(NamedTuple):
    """Numbers for one axis at one step."""

    axis: Axis
    step: int
    values: dict[str, float]
    """Numbers by name. Names begin with the axis, as in `train/loss`. The step is one of the numbers, because some
    trackers need it as a value."""


class Tracker(Protocol):
    """The methods of a tracker in `accelerate.tracking` that are used here."""

    def store_init_configuration(self, values: dict[str, Setting]) -> None: ...
    def log(self, values: dict[str, float], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


class Axes:
    """Converts lines of metrics.jsonl to points. It needs every line, in order, because it counts the episodes."""

    def __init__(self) -> None:
        self.episodes = 0

    def points(self, line: Mapping[str, object]) -> list[Point]:
        """Return the points for a line. Values that aren't finite numbers are left out."""
        update, found = cast(int, line.get("updates", line["update"])), dict[Axis, dict[str, float]]()
        for key, value in line.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
            if number and key not in ("update", "updates"):
                trains: Axis = "rollout" if key.split("/")[0] in ROLLOUT else "train"
                axis: Axis = "eval" if line.get("phase") == "evaluation" else trains
                found.setdefault(axis, {})[f"{axis}/{key}"] = float(cast(float, value))
        if line.get("phase") == "evaluation":
            order: tuple[Axis, ...] = ("eval",)
        else:
            self.episodes += int(found.get("rollout", {}).get("rollout/episodes", 0))
            order = ("rollout", "train") if "rollout" in found else ("train",)
        steps = {"rollout": self.episodes, "train": update, "eval": update}
        return [
            Point(axis, steps[axis], {f"{axis}/{STEPS[axis]}": float(steps[axis]), **found.get(axis, {})})
            for axis in order
        ]


class Trackers:
    """The trackers of one run. Call `close()` at the end of the run."""

    def __init__(
        self,
        names: Sequence[TrackerName],
        directory: Path,
        *,
        config: Mapping[str, object] | None = None,
        earlier: Sequence[Mapping[str, object]] = (),
        make: Callable[[TrackerName, Path], Tracker] | None = None,
    ) -> None:
        """`config` is the run's configuration as nested groups. `earlier` are the lines from earlier processes of the
        run. Their episodes are counted, but neither the lines nor the configuration are sent again."""
        self.failures: dict[str, int] = {}
        """Number of points that each tracker lost."""
        self._axes = Axes()
        for line in earlier:
            self._axes.points(line)
        config = config or {}
        about = TrackingConfig.model_validate(config.get("tracking") or {})
        make = make or (lambda name, folder: start_tracker(name, folder, about))
        settings = {} if earlier else flat(config)
        self._trackers: dict[TrackerName, Tracker | None] = {}
        for name in names:
            tracker = self._trackers[name] = self._guarded(name, make, name, directory, lost=0)
            if tracker is not None and settings:
                self._guarded(name, tracker.store_init_configuration, settings, lost=0)

    def line(self, line: Mapping[str, object]) -> None:
        """Send one line of metrics.jsonl."""
        for point in self._axes.points(line):
            for name, tracker in self._trackers.items():
                if tracker is None:
                    self.failures[name] += 1
                else:
                    self._guarded(name, _log, name, tracker, point)

    def episodes(self, update: int, tapes: Sequence[Tape]) -> None:
        """Send some of an update's episodes as text."""
        rows = [_row(update, tape) for tape in tapes[:MOST]]
        for name, tracker in self._trackers.items():
            if tracker is not None:
                self._guarded(name, _log_table, name, tracker, rows, update, lost=0)

    def close(self) -> None:
        """End every tracker, and log the number of lost points."""
        for name, tracker in self._trackers.items():
            if tracker is not None:
                self._guarded(name, tracker.finish, lost=0)
            if self.failures.get(name):
                log.warning("tracker %s: %d points were lost; metrics.jsonl has them all", name, self.failures[name])
        self._trackers = {}

    def _guarded(self, name: str, work: Callable[..., Any], *arguments: object, lost: int = 1) -> Any:
        try:
            return work(*arguments)
        except Exception as error:  # trackers can raise anything (full disk, lost server) and must not stop training
            if name not in self.failures:
                log.warning(
                    "tracker %s FAILED, and training continues without it (%s: %s); metrics.jsonl is complete",
                    name,
                    type(error).__name__,
                    error,
                )
            self.failures[name] = self.failures.get(name, 0) + lost
            return None


@contextmanager
def tracking(run: RunDir, names: Sequence[TrackerName]) -> Iterator[Trackers | None]:
    """Send the run's metrics to these trackers inside the block. `results.lost_points` counts lost points."""
    if not names:
        yield None
        return
    config = recorded_settings(run.path)
    trackers = Trackers(names, run.path, config=config, earlier=read_metrics(run.path / METRICS))
    run.listeners.append(trackers.line)
    try:
        yield trackers
    finally:
        run.listeners.remove(trackers.line)
        trackers.close()
        if trackers.failures:
            run.results.lost_points = trackers.failures


def flat(config: Mapping[str, object]) -> dict[str, Setting]:
    """Return the value of each setting by its dotted key, with secrets hidden."""
    values = {".".join(keys): value for keys, value in settings_of(hide(config))}
    return {key: value if isinstance(value, Setting) else json.dumps(value) for key, value in values.items()}


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise MissingExtra if a tracker's package isn't installed. This is called before the run begins, to fail
    early."""
    for name in names:
        for package, extra in (("accelerate", "train"), (name, "track" if name == "tensorboard" else name)):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(package, extra, f"the tracker {name!r}")


def start_tracker(name: TrackerName, directory: Path, about: TrackingConfig) -> Tracker:
    """Start a tracker for the run in `directory`. It works offline unless an environment variable names a server, and
    continues the curves from an earlier process."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # some of accelerate's trackers read from this state which process they run in
    folder = (directory / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ids = folder / IDS
    known: dict[str, str] = json.loads(ids.read_text()) if ids.exists() else {}
    run, project = about.name or directory.resolve().name, about.project or os.environ.get("WANDB_PROJECT", "tapereel")
    group = {"group": about.group} if about.group else {}
    named = {"run_name": project, "name": run, "resume": "allow", **group}
    arguments: dict[str, Any]
    match name:
        case "tensorboard":
            arguments = {"run_name": "tensorboard", "logging_dir": str(folder)}
        case "wandb":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb sends telemetry even from offline runs
            known.setdefault("wandb", secrets.token_hex(4))
            mode = os.environ.get("WANDB_MODE", "offline")
            arguments = {**named, "id": known["wandb"], "dir": str(folder), "save_code": False, "mode": mode}
        case "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
            arguments = {**named, "embed": False, "space_id": os.environ.get("TRACKIO_SPACE_ID")}
        case "mlflow":
            os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
            arguments = {"experiment_name": project, "run_name": run, "run_id": known.get("mlflow")}
            arguments |= {"logging_dir": str(folder / "mlflow"), "tags": group or None}
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](**arguments)
    tracker.start()
    if name == "mlflow":
        known["mlflow"] = tracker.active_run.info.run_id
    put_file(REAL, ids, json.dumps(known).encode())
    if name == "wandb":
        for axis, step in STEPS.items():
            tracker.tracker.define_metric(f"{axis}/*", step_metric=f"{axis}/{step}")
    return tracker


def _log(name: TrackerName, tracker: Tracker, point: Point) -> None:
    if name == "mlflow":  # mlflow refuses the whole point for one bad character, such as the @ in `reward@agent`
        point = point._replace(values={_UNNAMED.sub("_", key): value for key, value in point.values.items()})
    # wandb has one step counter for all axes, and drops a point whose step is lower than the last one. So each axis
    # sends the step as a value instead.
    tracker.log(point.values, step=None if name == "wandb" else point.step)


def _row(update: int, tape: Tape) -> dict[str, object]:
    first, *others = (shown(entry.step) for entry in tape.entries) if tape.entries else ("",)
    values = update, tape.id, first, "\n".join(others), tape.reward
    return dict(zip(COLUMNS, values, strict=True))


def _log_table(name: TrackerName, tracker: Any, rows: Sequence[Mapping[str, object]], update: int) -> None:
    match name:
        case "tensorboard":  # Markdown, in which a line that begins with four spaces is shown as it is
            text = ("\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows)
            tracker.writer.add_text(TABLE, indent("\n\n".join(text), "    ", lambda line: True), update)
        case "wandb":
            tracker.log_table(TABLE, columns=list(COLUMNS), data=[list(row.values()) for row in rows])
        case "trackio":
            tracker.log({TABLE: importlib.import_module("trackio").Table(data=list(rows))}, step=update)
        case "mlflow":
            columns, run = {column: [row[column] for row in rows] for column in COLUMNS}, tracker.active_run.info.run_id
            importlib.import_module("mlflow").log_table(columns, f"{TABLE}.json", run_id=run)
