"""Runs that several tests of the verbs read: a thousand tapes of the demo's agent, and a trained micro model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import RunConfig
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.runs import run
from tapereel.agents.setup import ScriptedConfig
from tapereel.cli import main
from tapereel.envs.adapters import word_problems

from ...cli.lab import MICRO, SCENE, settings

THOUSAND = 1000
DEMO = "tapereel.finetune.run.demo_scene"


@pytest.fixture(scope="session")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations as the demo records them, with tokens, by its agent in its environment."""
    folder = tmp_path_factory.mktemp("thousand")
    char_tokenizer().save_pretrained(folder / "tokenizer")
    engine = ScriptedConfig(policy=f"{DEMO}:press_a_key", tokenizer=str(folder / "tokenizer"))
    config = RunConfig(engine=engine, attempts=5, split="demo", concurrency=256)
    scene: Any = {"agent": f"{DEMO}:calculator_agent", "env": f"{DEMO}:calculator"}
    run(config, folder / "run", **scene, tasks=word_problems(THOUSAND // 5))
    return folder / "run"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of a micro model, whose checkpoints hold every version."""
    import torch

    from tapereel.envs.load_named import load_named
    from tests.cli.world import EXAMPLE

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    load_named(f"{EXAMPLE}:save_model")(str(folder / "model"))
    more = settings(
        *MICRO,
        "loop.groups=4",
        "loop.group_size=4",
        "loop.checkpoint_every=1",
        "loop.keep_checkpoints=3",
        "evaluation.greedy=true",
        'loop.changes={"regulariser": [{"kind": "entropy", "coefficient": 0.05}]}',
    )
    words = ["train", *SCENE, "--model", str(folder / "model"), "--out", str(folder / "run"), *more]
    assert main(words) == 0
    return folder / "run"
