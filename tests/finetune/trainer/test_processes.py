"""A whole training run over two processes, as a user launches it, and what becomes of it when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded import load_pretrained
from tapereel.envs.load_named import load_named
from tapereel.tapes.store import METRICS, Store, read_metrics

from ...cli.lab import SCENE, settings
from ...cli.world import EXAMPLE

pytestmark = [pytest.mark.kill, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    load_named(f"{EXAMPLE}:save_model")(str(folder))
    return str(folder)


def words(model: str, out: Path, *more: str) -> list[str]:
    micro = settings(
        "loop.updates=4",
        "loop.groups=8",
        "loop.group_size=8",
        "loop.max_lag=0",
        "loop.optimiser.lr=1e-2",
        "loop.sampling.max_tokens=1",
        "evaluation.limit=4",
        *more,
    )
    return ["train", *SCENE, "--model", model, "--out", str(out), *micro, "--json"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def weights(run: Path) -> dict[str, Any]:
    return dict(load_pretrained(str(run / "checkpoints" / "update-000004" / "hf")).model.state_dict())


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Euclidean, over all weights."""
    return sum(float((one[key] - other[key]).square().sum()) for key in one) ** 0.5


@pytest.mark.ledger("F89")
@pytest.mark.ledger("P5", "F75", "F90", "F91")
def test_accelerate_and_torchrun_train_what_one_process_trains(model: str, tmp_path: Path):
    """Same tapes by the same seeds, and weights as near as float32 sums in another order are; to the last digit, in
    float64, they are compared in tests/finetune/trainer/test_ranks.py."""
    binaries = Path(sys.executable).parent
    commands = {
        "one": [sys.executable, "-m", "tapereel.cli"],
        "copies": [
            str(binaries / "accelerate"),
            "launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "-m",
            "tapereel.cli",
        ],
        "parts": (parts := [str(binaries / "torchrun"), "--nproc-per-node", "2", "-m", "tapereel.cli"]),
        "together": parts,
    }
    changes = {
        "parts": ("processes.shard=true", "trackers=[tensorboard]"),
        "together": ("processes.sequence_parallel=2", "loop.optimiser.pack=true"),
    }
    for name, command in commands.items():
        done = subprocess.run(
            [*command, *words(model, tmp_path / name, *changes.get(name, ()))],
            capture_output=True,
            text=True,
            env=environment(MASTER_PORT=str(free_port())),
            timeout=200,
        )
        assert done.returncode == 0, by_the_ranks(done.stderr)
        assert done.stdout.count('"lineage"') == 1
    with Store.open(tmp_path / "one") as one:
        sampled = sorted((t.begin.seed, t.begin.attempt, t.reward) for t in one.tapes(split="train"))
    for name, ranks in (("one", 1), ("copies", 2), ("parts", 2), ("together", 2)):
        with Store.open(tmp_path / name) as store:
            on: Any = store.ledger(_lineage(tmp_path / name)).uses[0].info["on"]
            assert on["ranks"] == ranks
            assert store.books().closes
            assert sorted((t.begin.seed, t.begin.attempt, t.reward) for t in store.tapes(split="train")) == sampled
    trained = weights(tmp_path / "one")
    base = load_pretrained(model).model.state_dict()
    moved = distance(trained, base)
    assert moved > 0.1
    for name in ("copies", "parts", "together"):
        # Adam divides by the size of the gradient, so where that is next to nothing its rounding is what is learnt.
        assert distance(weights(tmp_path / name), trained) < 0.02 * moved
    assert list((tmp_path / "parts" / "trackers" / "tensorboard").glob("events*"))
    for name in ("copies", "parts", "together"):
        reproduce = ["reproduce", str(tmp_path / name), "--json"]
        done = subprocess.run(
            [*commands["parts"], *reproduce],
            capture_output=True,
            text=True,
            env=environment(MASTER_PORT=str(free_port())),
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + by_the_ranks(done.stderr)
        found = json.loads(done.stdout)
        assert (found["verdict"], found["updates"], found["published"]) == ("holds", 4, 5)
        assert found["trainers"] == found["checkpoints"] == 1
        done = subprocess.run([*commands["one"], *reproduce], capture_output=True, text=True, env=environment())
        assert done.returncode == 2, done.stdout + done.stderr
        command = f"torchrun --nproc-per-node 2 -m tapereel reproduce {tmp_path / name}"
        assert command in json.loads(done.stdout)["reason"]
    done = subprocess.run(
        [*commands["parts"], "reproduce", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        env=environment(MASTER_PORT=str(free_port())),
        timeout=200,
    )
    assert done.returncode
    assert done.stderr.count("tapereel reproduce: ") == 1, "only rank 0 prints"


def by_the_ranks(stderr: str) -> str:
    """The end of what the ranks wrote, without the launcher's own traceback, which is longer and doesn't say why."""
    return re.split(r'Traceback \(most recent call last\):\n  File "[^"]*/(?:torchrun|accelerate)"', stderr)[0][-6000:]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_ends_the_others_with_a_sentence(model: str, tmp_path: Path, dies: int):
    """No launcher here that would end them: they find out by themselves. What was recorded goes on with --resume."""
    out = tmp_path / "run"
    port = str(free_port())
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tapereel.cli",
                *words(model, out, "loop.updates=400", "processes.timeout=100"),
            ],
            env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    _until_it_trains(out, running)
    running[dies].send_signal(signal.SIGKILL)
    running[dies].wait(60)
    _, said = running[1 - dies].communicate(timeout=150)
    running[dies].communicate()
    assert running[1 - dies].returncode == 1, said[-2000:]
    assert f"rank {1 - dies} " in said
    assert "`--resume`" in said
    assert "Traceback" not in said
    assert read_metrics(out / METRICS)


def _until_it_trains(out: Path, running: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 120
    while not (out / METRICS).exists() or len(read_metrics(out / METRICS)) < 3:
        assert time.monotonic() < until
        assert all(one.poll() is None for one in running)
        time.sleep(0.2)


def _lineage(run: Path) -> str:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))["lineage"]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
