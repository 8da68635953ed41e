"""Run by the Python of the TRL environment: `trackers_read.py NAME RUN` prints what the tracker NAME has of the run in
the folder RUN, by its own library: one JSON object, metric -> [[step, value], ...] in the order of steps.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "trackers"
STEPS = {"rollout": "rollout/episodes_so_far", "train": "train/update", "eval": "eval/update"}
"""The axis of a metric -> the metric that is its step."""
TABLE = "completions"
"""A table, which has no values at steps."""
BLOCK = 32 * 1024


def read_mlflow(folder: Path, run: str) -> Iterator[tuple[str, int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tapereel")
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.run_name == run
    for name in one.data.metrics:
        for point in client.get_metric_history(one.info.run_id, name):
            yield name, point.step, point.value


def read_trackio(folder: Path, run: str) -> Iterator[tuple[str, int, float]]:
    import os

    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_projects() == ["tapereel"]
    assert SQLiteStorage.get_runs("tapereel") == [run]
    for line in SQLiteStorage.get_logs("tapereel", run):
        for name, value in line.items():
            if name not in ("step", "timestamp", TABLE):
                yield name, line["step"], value


def read_wandb(folder: Path, run: str) -> Iterator[tuple[str, int, float]]:
    """wandb has no reader of offline runs in Python: its records are, inside the frames of its log (LevelDB's)."""
    from wandb.proto.wandb_internal_pb2 import Record

    names, ids = set(), set()
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))  # one for each process that drew
    for data in (data for file in files for data in frames(file.read_bytes())):
        record = Record.FromString(data)
        names.add(record.run.display_name)
        ids.add(record.run.run_id)
        items: dict[str, Any] = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        for name, value in items.items():
            axis = name.split("/")[0]
            if axis in STEPS and not name.startswith(TABLE):
                yield name, items[STEPS[axis]], value
    assert names == {"", run}
    assert len(ids - {""}) == 1


def frames(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind wandb's seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


READERS = {"wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}


def main(name: str, run: Path) -> None:
    found: dict[str, list[list[float]]] = {}
    for metric, step, value in READERS[name](run / FOLDER, run.name):
        found.setdefault(metric, []).append([step, value])
    print(json.dumps({metric: sorted(points) for metric, points in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
