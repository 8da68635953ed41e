"""Trackers: sends the lines of metrics.jsonl to TensorBoard, wandb, trackio or mlflow, through `accelerate`.

The file is always written first. Trackers get the numbers on three axes, each with a separate step:

    rollout/   what was sampled              over the episodes so far (`rollout/episodes_so_far`)
    train/     what the update did           over the updates (`train/update`)
    eval/      held-out tasks                over the updates (`eval/update`)

A tracker that fails never stops training. The failure is logged once, and the lost points are counted. When a run
begins, trackers also get its configuration, in which secrets are hidden. They write below the run directory, unless an
environment variable names a server (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

from ...tapes.common.config import Config
from ...tapes.common.config_yaml import settings_of
from ...tapes.common.redact import hide
from ...tapes.common.text import logger
from ...tapes.errors import MissingExtra
from ...tapes.store.disk import REAL, put_file
from ...tapes.store.run_directory import METRICS, RunDir, read_metrics, recorded_settings

log = logger("trackers")

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
FOLDER = "trackers"
"""The trackers' folder, below the run directory."""
IDS = "ids.json"
"""File in the folder `trackers` with each tracker's id for the run. With these ids, a resumed run continues the same
curves."""
ROLLOUT = frozenset({"reward", "component", "return", "episodes", "turns", "length", "ended", "truncated", "lag"})
ROLLOUT |= {"stale_tokens", "stale_share", "filtered_tokens"}
"""Keys of a metrics line that describe rollouts. A key with a slash does too if the part before its first slash is
listed here."""


class TrackedConfig(Config):
    """The trackers of a run."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that also get the metrics. metrics.jsonl is always written."""


_UNNAMED = re.compile(r"[^\w.\- :/]")
"""Characters that mlflow refuses in the name of a metric."""


Setting = bool | int | float | str
"""The value of a setting, as every tracker takes it. Lists, mappings and None are JSON text."""


class Point(NamedTuple):
    """Numbers for one axis at one step."""

    axis: Literal["rollout", "train", "eval"]
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
        update = cast(int, line.get("updates", line["update"]))
        values = {
            k: float(v)
            for k, v in line.items()
            if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v) and k not in ("update", "updates")
        }
        if line.get("phase") == "evaluation":
            return [_point("eval", update, "update", values)]
        sampled = {k: v for k, v in values.items() if k.split("/")[0] in ROLLOUT}
        trained = {k: v for k, v in values.items() if k not in sampled}
        if not sampled:
            return [_point("train", update, "update", trained)]
        self.episodes += int(values.get("episodes", 0))
        return [
            _point("rollout", self.episodes, "episodes_so_far", sampled),
            _point("train", update, "update", trained),
        ]


def _point(axis: Literal["rollout", "train", "eval"], step: int, name: str, values: Mapping[str, float]) -> Point:
    return Point(axis, step, {f"{axis}/{name}": float(step), **{f"{axis}/{k}": v for k, v in values.items()}})


class Trackers:
    """The trackers of one run. Call `close()` at the end of the run."""

    def __init__(
        self,
        names: Sequence[TrackerName],
        directory: Path,
        *,
        config: Mapping[str, object] | None = None,
        earlier: Sequence[Mapping[str, object]] = (),
        make: Callable[[str, Path], Tracker] | None = None,
    ) -> None:
        """`config` is the run's configuration as nested groups. `earlier` are the lines from earlier processes of the
        run. Their episodes are counted, but neither the lines nor the configuration are sent again."""
        self.failures: dict[str, int] = {}
        """Number of points that each tracker lost."""
        self._axes = Axes()
        for line in earlier:
            self._axes.points(line)
        self._trackers: dict[str, Tracker | None] = {}
        make = make or start_tracker
        settings = {} if earlier else flat(config or {})
        for name in names:
            tracker = self._trackers[name] = self._guarded(name, lambda name=name: make(name, directory), lost=0)
            if tracker is not None and settings:
                self._guarded(name, lambda tracker=tracker: tracker.store_init_configuration(settings), lost=0)

    def line(self, line: Mapping[str, object]) -> None:
        """Send one line of metrics.jsonl."""
        for point in self._axes.points(line):
            for name, tracker in self._trackers.items():
                if tracker is None:
                    self.failures[name] += 1
                else:
                    self._guarded(name, lambda tracker=tracker, point=point, name=name: _log(name, tracker, point))

    def close(self) -> None:
        """End every tracker, and log the number of lost points."""
        for name, tracker in self._trackers.items():
            if tracker is not None:
                self._guarded(name, tracker.finish, lost=0)
            if self.failures.get(name):
                log.warning("tracker %s: %d points were lost; metrics.jsonl has them all", name, self.failures[name])
        self._trackers = {}

    def _guarded(self, name: str, work: Callable[[], Any], lost: int = 1) -> Any:
        try:
            return work()
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
def tracking(run: RunDir, names: Sequence[TrackerName]) -> Iterator[None]:
    """Send the run's metrics to these trackers inside the block. `results.lost_points` counts lost points."""
    if not names:
        yield
        return
    config = recorded_settings(run.path)
    trackers = Trackers(names, run.path, config=config, earlier=read_metrics(run.path / METRICS))
    run.listeners.append(trackers.line)
    try:
        yield
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


def start_tracker(name: str, directory: Path) -> Tracker:
    """Start a tracker for the run in `directory`. It works offline unless an environment variable names a server, and
    continues the curves from an earlier process."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # some of accelerate's trackers read from this state which process they run in
    folder = (directory / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run, ids = directory.resolve().name, folder / IDS
    known: dict[str, str] = json.loads(ids.read_text()) if ids.exists() else {}
    arguments: dict[str, Any]
    if name == "tensorboard":
        arguments = {"run_name": "tensorboard", "logging_dir": str(folder)}
    elif name == "wandb":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb sends telemetry even from offline runs
        known.setdefault("wandb", secrets.token_hex(4))
        arguments = {
            "run_name": "tapereel",
            "name": run,
            "id": known["wandb"],
            "dir": str(folder),
            "resume": "allow",
            "save_code": False,
            "mode": os.environ.get("WANDB_MODE", "offline"),
        }
    elif name == "trackio":
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        arguments = {
            "run_name": "tapereel",
            "name": run,
            "resume": "allow",
            "embed": False,
            "space_id": os.environ.get("TRACKIO_SPACE_ID"),
        }
    else:
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        arguments = {
            "experiment_name": "tapereel",
            "run_name": run,
            "run_id": known.get("mlflow"),
            "logging_dir": str(folder / "mlflow"),
        }
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](**arguments)
    tracker.start()
    if name == "mlflow":
        known["mlflow"] = tracker.active_run.info.run_id
    put_file(REAL, ids, json.dumps(known).encode())
    if name == "wandb":
        for axis, step in (("rollout", "episodes_so_far"), ("train", "update"), ("eval", "update")):
            tracker.tracker.define_metric(f"{axis}/*", step_metric=f"{axis}/{step}")
    return tracker


def _log(name: str, tracker: Tracker, point: Point) -> None:
    if name == "mlflow":  # mlflow refuses the whole point for one bad character, such as the @ in `reward@agent`
        point = point._replace(values={_UNNAMED.sub("_", key): value for key, value in point.values.items()})
    # wandb has one step counter for all axes, and drops a point whose step is lower than the last one. So each axis
    # sends the step as a value instead.
    tracker.log(point.values, step=None if name == "wandb" else point.step)
