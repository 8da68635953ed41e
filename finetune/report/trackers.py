"""Trackers: the lines of metrics.jsonl, drawn elsewhere too, by TensorBoard, wandb, trackio or mlflow (`accelerate`).

The file comes first and is always written; a tracker gets what it says, on three axes with a step of their own:

    rollout/   what was sampled              over the episodes so far (`rollout/episodes_so_far`)
    train/     what the update did           over the updates (`train/update`)
    eval/      held-out tasks                over the updates (`eval/update`)

A tracker that fails costs its drawing and nothing else: the failure is said once, aloud, every line that it lost is
counted, and training goes on. Only numbers are passed on, none of the configuration, so no secret is; and nothing
leaves the machine unless the environment says so (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID): by default all of
them write below the run directory.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ...tapes.errors import MissingExtra
from ...tapes.store.disk import REAL, put_file
from ...tapes.store.run_directory import METRICS, RunDir, read_metrics

log = logging.getLogger("tapereel.trackers")

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
FOLDER = "trackers"
"""Below the run directory."""
IDS = "ids.json"
"""In that folder: tracker -> what it calls the run."""
ROLLOUT = frozenset({"reward", "episodes", "turns", "lag", "truncated", "stale_tokens", "filtered_tokens"})
"""Keys of a line that tell of what was sampled; so do those that begin with these and a slash."""


_UNNAMED = re.compile(r"[^\w.\- :/]")
"""What no name of a metric may have in mlflow."""


class Point(NamedTuple):
    """Numbers of one axis at one step."""

    axis: Literal["rollout", "train", "eval"]
    step: int
    values: dict[str, float]
    """Each under its axis: `train/loss`; with the step itself, for trackers whose axes have steps of their own."""


class Tracker(Protocol):
    """What `accelerate.tracking` has of each."""

    def log(self, values: dict[str, float], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


class Axes:
    """Lines of metrics.jsonl as points. It counts episodes, so it must be given every line, in order."""

    def __init__(self) -> None:
        self.episodes = 0

    def points(self, line: Mapping[str, Any]) -> list[Point]:
        """The points of a line; what is no finite number has none."""
        update = int(line.get("updates", line["update"]))
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
    """The trackers of one run. `close()` at its end."""

    def __init__(
        self,
        names: Sequence[TrackerName],
        directory: Path,
        *,
        past: Iterable[Mapping[str, Any]] = (),
        make: Callable[[str, Path], Tracker] | None = None,
    ) -> None:
        """past: the lines that an earlier process of the run wrote; they are counted and not drawn again."""
        self.failures: dict[str, int] = {}
        """tracker -> points that it did not take."""
        self._axes = Axes()
        for line in past:
            self._axes.points(line)
        self._trackers: dict[str, Tracker | None] = {}
        make = make or start_tracker
        for name in names:
            self._trackers[name] = self._guarded(name, lambda name=name: make(name, directory), lost=0)

    def line(self, line: Mapping[str, Any]) -> None:
        """Draw one line of metrics.jsonl."""
        for point in self._axes.points(line):
            for name, tracker in self._trackers.items():
                if tracker is None:
                    self.failures[name] += 1
                else:
                    self._guarded(name, lambda tracker=tracker, point=point, name=name: _log(name, tracker, point))

    def close(self) -> None:
        """End every tracker, and say what was lost."""
        for name, tracker in self._trackers.items():
            if tracker is not None:
                self._guarded(name, tracker.finish, lost=0)
            if self.failures.get(name):
                log.warning("tracker %s: %d points were lost; metrics.jsonl has them all", name, self.failures[name])
        self._trackers = {}

    def _guarded(self, name: str, work: Callable[[], Any], lost: int = 1) -> Any:
        try:
            return work()
        except Exception as error:  # whatever a tracker raises, a full disk or a server gone, training goes on
            if name not in self.failures:
                log.warning(
                    "tracker %s FAILED and training goes on without it (%s: %s); metrics.jsonl is complete",
                    name,
                    type(error).__name__,
                    error,
                )
            self.failures[name] = self.failures.get(name, 0) + lost
            return None


@contextmanager
def tracking(run: RunDir, names: Sequence[TrackerName]) -> Iterator[None]:
    """The run's metrics go to these trackers as well; what they lost is in `results["lost_points"]`."""
    if not names:
        yield
        return
    trackers = Trackers(names, run.path, past=read_metrics(run.path / METRICS))
    run.listeners.append(trackers.line)
    try:
        yield
    finally:
        run.listeners.remove(trackers.line)
        trackers.close()
        if trackers.failures:
            run.results["lost_points"] = trackers.failures


def check_trackers(names: Iterable[TrackerName]) -> None:
    """MissingExtra where a tracker's package is not installed: before a run begins, not at its first line."""
    for name in names:
        for package, extra in (("accelerate", "train"), (name, "track" if name == "tensorboard" else name)):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(package, extra, f"the tracker {name!r}")


def start_tracker(name: str, directory: Path) -> Tracker:
    """A tracker at work on the run in `directory`, offline unless the environment says otherwise. What an earlier
    process of the run drew is gone on with."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # some of accelerate's trackers ask it which process they are in
    folder = (directory / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run, ids = directory.resolve().name, folder / IDS
    known: dict[str, str] = json.loads(ids.read_text()) if ids.exists() else {}
    given: dict[str, Any]
    if name == "tensorboard":
        given = {"run_name": "tensorboard", "logging_dir": str(folder)}
    elif name == "wandb":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry, which offline runs send too
        known.setdefault("wandb", secrets.token_hex(4))
        given = {
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
        given = {
            "run_name": "tapereel",
            "name": run,
            "resume": "allow",
            "embed": False,
            "space_id": os.environ.get("TRACKIO_SPACE_ID"),
        }
    else:
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        given = {
            "experiment_name": "tapereel",
            "run_name": run,
            "run_id": known.get("mlflow"),
            "logging_dir": str(folder / "mlflow"),
        }
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](**given)
    tracker.start()
    if name == "mlflow":
        known["mlflow"] = tracker.active_run.info.run_id
    put_file(REAL, ids, json.dumps(known).encode())
    if name == "wandb":
        for axis, step in (("rollout", "episodes_so_far"), ("train", "update"), ("eval", "update")):
            tracker.tracker.define_metric(f"{axis}/*", step_metric=f"{axis}/{step}")
    return tracker


def _log(name: str, tracker: Tracker, point: Point) -> None:
    if name == "mlflow":  # it refuses a point whole for one name with another character, as of `reward@agent`
        point = point._replace(values={_UNNAMED.sub("_", key): value for key, value in point.values.items()})
    # wandb has one count of its own for all axes, which must never go back; each axis brings its step as a number.
    tracker.log(point.values, step=None if name == "wandb" else point.step)
