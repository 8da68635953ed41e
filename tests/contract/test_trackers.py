"""wandb, trackio and mlflow draw a whole `tapereel train`, offline: what their own libraries read back is what
metrics.jsonl says, and nobody tried to reach a network.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapereel.envs.load_named import load_named
from tapereel.finetune.run import Axes
from tapereel.tapes.store import read_metrics

from ..cli.lab import EXAMPLE, MICRO, SCENE, settings
from . import trl_env

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
NAMES = ("wandb", "trackio", "mlflow")


@pytest.fixture(scope="module")
def outside() -> Iterator[socket.socket]:
    """The proxy that every request to a network would go through. It answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        yield proxy


def ran(outside: socket.socket, *words: str | Path) -> str:
    """What a program says that the environment's Python runs, with no network but through `outside`."""
    if not trl_env.DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.trl_env")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("WANDB", "TRACKIO", "MLFLOW")) and "proxy" not in name.lower()
    }
    proxy = f"http://127.0.0.1:{outside.getsockname()[1]}"
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
    done = subprocess.run(
        [trl_env.PYTHON, *words],
        env={**kept, **trl_env.ENVIRONMENT, **proxies},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(outside: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    load_named(f"{EXAMPLE}:save_model")(str(folder / "model"))
    more = settings(
        *MICRO,
        f"trackers=[{','.join(NAMES)}]",
        "evaluation.every=1",
        "evaluation.greedy=true",
        'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
    )
    ran(
        outside,
        "-m",
        "tapereel.cli",
        "train",
        *SCENE,
        "--model",
        folder / "model",
        "--out",
        folder / "run",
        *more,
    )
    return folder / "run"


@pytest.mark.ledger("F87", "F88")
@pytest.mark.parametrize("name", NAMES)
def test_what_was_drawn_is_read_back(name: str, trained: Path, outside: socket.socket) -> None:
    lines, axes = read_metrics(trained / "metrics.jsonl"), Axes()
    expected: dict[str, list[tuple[int, float]]] = {}
    for point in (point for line in lines for point in axes.points(line)):
        for metric, value in point.values.items():
            expected.setdefault(metric, []).append((point.step, value))
    assert {"rollout/reward", "train/loss", "eval/sampled"} <= set(expected)
    assert len(expected["train/loss"]) == 3
    found = json.loads(ran(outside, Path(__file__).with_name("trackers_read.py"), name, trained))
    assert set(found) == set(expected)
    for metric, points in expected.items():
        assert [step for step, _ in found[metric]] == [step for step, _ in sorted(points)], metric
        assert [value for _, value in found[metric]] == pytest.approx([value for _, value in sorted(points)], rel=1e-12)


def test_nothing_was_lost_and_nobody_asked_a_network(trained: Path, outside: socket.socket) -> None:
    assert "lost_points" not in json.loads((trained / "results.json").read_text())
    with pytest.raises(TimeoutError):
        outside.accept()


DRAW = """
import sys
from pathlib import Path
from tapereel.finetune.run.trackers import Trackers

run, done = Path(sys.argv[1]), int(sys.argv[2])
lines = [{"update": k, "loss": k / 8, "reward": k / 4, "episodes": 2} for k in range(4)]
trackers = Trackers(sys.argv[3:], run, earlier=lines[:done])
for line in lines[done:done + 2]:
    trackers.line(line)
trackers.close()
assert not trackers.failures, trackers.failures
"""


def test_a_resumed_run_goes_on_with_what_was_drawn(outside: socket.socket, tmp_path: Path) -> None:
    for done in (0, 2):
        ran(outside, "-c", DRAW, tmp_path / "run", str(done), *NAMES)
    for name in NAMES:
        found = json.loads(ran(outside, Path(__file__).with_name("trackers_read.py"), name, tmp_path / "run"))
        assert found["train/loss"] == [[0, 0.0], [1, 0.125], [2, 0.25], [3, 0.375]], name
        assert found["rollout/reward"] == [[2, 0.0], [4, 0.25], [6, 0.5], [8, 0.75]], name
