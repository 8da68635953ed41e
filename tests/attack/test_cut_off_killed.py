"""`tapereel train` by PPO on episodes that are cut off, killed and resumed: the unkilled run's weights, reproduced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.envs.load_named import load_named
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes import Status
from tapereel.tapes.store import METRICS, Store, read_metrics

from ..finetune.loop import lab
from ..finetune.run import stage

pytestmark = [pytest.mark.kill, pytest.mark.timeout(300)]
WORLD = str(Path(__file__).with_name("cut_off_world.py"))
CRITIC = {"clip": None, "passes": 2, "optimiser": {"lr": 3e-3}}
DISCOUNTED = {"credit": {"clock": "turn", "gamma": 0.9}}


def alone(models: Path, **loop: Any) -> dict[str, Any]:
    return {
        # Another process imports it, and knows the checkout as `tapereel`, whatever its folder is called.
        "agent": f"tapereel.{lab.__name__.partition('.')[2]}:Speaker",
        "env": f"{WORLD}:Steady",
        "tasks": ["1", "2", "3", "9"],
        "engine": {"kind": "embedded", "model": str(models / "alone"), "slots": 32},
        "evaluation": {"fraction": 0.0},
        "loop": {
            "recipe": "ppo",
            "changes": DISCOUNTED,
            "updates": 4,
            "groups": 4,
            "group_size": 2,
            "max_lag": 0,
            "checkpoint_every": 2,
            "keep_checkpoints": 3,
            "sampling": {"max_tokens": 2},
            # The fourth task meets this limit before its own end.
            "limits": {"turns": 4, "agent_seconds": 60.0},
            "optimiser": {"lr": 1e-3},
            "critic": CRITIC,
            **loop,
        },
    }


def pair(models: Path) -> dict[str, Any]:
    limits = {"turns": 3, "agent_seconds": 60.0}
    one = stage.settings(models, env=f"{WORLD}:Going", recipe="ppo", limits=limits, critic=CRITIC, updates=3)
    return {**one, "loop": {**one["loop"], "changes": DISCOUNTED, "checkpoint_every": 2}}


FORKS = {"attempts": 1, "turns": 1, "continuations": 2}
WAYS = {
    "a body of its own, epochs": lambda models: alone(models, epochs=2, minibatches=2),
    "a head alone, two batches": lambda models: alone(models, rollouts=2, critic={**CRITIC, "body": "policy"}),
    "forks": lambda models: alone(
        models, forks=FORKS, changes={**DISCOUNTED, "baseline": {"kind": "mean", "by": "fork"}}
    ),
    "players, by agent": pair,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models: Any = load_named(f"{stage.EXAMPLE}:save_models")
    save_models(str(folder))
    lab.model().save_pretrained(folder / "alone")
    lab.WORDS.save_pretrained(folder / "alone")
    return folder


def train(config: Path, run: Path, *more: str, at: int = -1) -> int:
    words = [sys.executable, "-m", "tapereel.cli", "train", "--config", str(config), "--out", str(run), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DEADLY_STEP": str(at)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, -9), done.stderr[-3000:]
    return done.returncode


def last_weights(run: Path) -> list[torch.Tensor]:
    folders = [run / "checkpoints", *sorted(run.glob("checkpoints/seeker"))]
    return [weight for folder in folders for _, weight in sorted(checkpoints(folder)[-1].weights().items())]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_cut_off_episodes_outlives_a_kill_and_is_reproduced(tmp_path: Path, models: Path, way: str) -> None:
    config, run, whole = tmp_path / "config.json", tmp_path / "run", tmp_path / "whole"
    config.write_text(json.dumps(WAYS[way](models)))
    assert train(config, whole) == 0
    assert train(config, run, at=90 if "batches" in way else 60) == -9
    with Store.open(run) as store:
        assert store.run_records("use"), "killed after an update"
    assert train(config, run, "--resume") == 0
    # An answer that was sampled again beside fewer others has log-probs with other last bits.
    for ours, theirs in zip(last_weights(run), last_weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    verdict = reproduce(run)
    assert (verdict.outcome, {one.outcome for one in verdict.players.values()} <= {"verified"}) == ("verified", True)
    lines = [line for line in read_metrics(run / METRICS) if line["phase"] == "rl"]
    assert {line["episode/bootstrapped"] for line in lines} == {1.0}
    with Store.open(run) as store:
        ends = {(tape.status, tape.cause and tape.cause.type) for tape in store.tapes(closed=True) if tape.trains}
    assert {status for status, _ in ends} <= {Status.TRUNCATED, Status.LIMIT}
