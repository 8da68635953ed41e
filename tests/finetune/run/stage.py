"""What the tests of players in configurations share: a configuration of them, and short ways to what it left."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from tapereel.finetune import TrainConfig
from tapereel.tapes.common import load_config
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "two_agents.py")
WORLD = str(Path(__file__).with_name("pair_of_players.py"))
GUIDE, SEEKER, JUDGE = "pair/guide", "pair/seeker", "pair/judge"


def settings(models: Path, **changes: Any) -> dict[str, Any]:
    """Guide and seeker learn. `changes` take the place of groups, or of settings of the loop."""
    loop = {
        "updates": 3,
        "groups": 4,
        "group_size": 6,
        "by_agent": True,
        "agents": [GUIDE],
        "max_lag": 0,
        "checkpoint_every": 1,
        "keep_checkpoints": None,
        "sampling": {"max_tokens": 1},
        "limits": {"turns": 1, "agent_seconds": 60.0},
        "optimiser": {"lr": 1e-2},
    }
    groups = {
        "agent": f"{WORLD}:Judged",
        "env": f"{EXAMPLE}:Hidden",
        "tasks": f"{EXAMPLE}:tasks",
        "engine": {"kind": "embedded", "model": str(models / "guide")},
        "players": {"seeker": learns(models), "judge": frozen(models / "guide")},
        "evaluation": {"fraction": 0.0},
    }
    own = {key: value for key, value in changes.items() if key in TrainConfig.model_fields}
    return {**groups, "loop": {**loop, **{key: v for key, v in changes.items() if key not in own}}, **own}


def config(models: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings(models, **changes))


def learns(models: Path, **more: Any) -> dict[str, Any]:
    return {"agents": [SEEKER], "engine": {"kind": "embedded", "model": str(models / "seeker")}, **more}


def frozen(engine: Path | dict[str, Any]) -> dict[str, Any]:
    """The judge, who stays as it is."""
    made = {"kind": "embedded", "model": str(engine)} if isinstance(engine, Path) else engine
    return {"agents": [JUDGE], "engine": made, "frozen": True}


def read_back(run: Path) -> TrainConfig:
    return load_config(TrainConfig, run / "config.yaml")


def published(run: Path) -> dict[str, str]:
    """Version -> digest of the weights."""
    with Store.open(run, cache=False) as store:
        return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


def uses(run: Path) -> dict[str, list[Use]]:
    """Lineage -> its updates."""
    found: dict[str, list[Use]] = defaultdict(list)
    with Store.open(run, cache=False) as store:
        for stored in store.run_records("use"):
            found[stored.record.lineage].append(stored.record)
    return dict(found)


def versions(run: Path, **where: Any) -> dict[str, set[str]]:
    """Path -> versions of the weights that spoke for it."""
    found: dict[str, set[str]] = defaultdict(set)
    with Store.open(run, cache=False) as store:
        for tape in store.tapes(**where):
            for call in tape.calls:
                found[call.by] |= {version for version, _, _ in call.spans}
    return dict(found)
