"""Runs that several tests of the verbs read: a thousand tapes of the demo's agent, and a trained micro model."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tapereel.agents import Request, ScriptedEngine, rollout
from tapereel.agents.engines.embedded.tiny_model import char_tokenizer
from tapereel.agents.rendering.renderer import Renderer
from tapereel.cli import main
from tapereel.tapes.store.store import Store

from ...cli.lab import MICRO, SCENE, settings

THOUSAND = 1000


@pytest.fixture(scope="session")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations as the demo records them, with tokens, by its agent in its environment."""
    from tapereel.envs.adapters.calculator import Calculator, demonstrate, word_problems
    from tapereel.finetune.run.demonstrations import calculator_agent

    path = tmp_path_factory.mktemp("thousand") / "run"
    tokenizer = char_tokenizer()
    tasks = list(word_problems(200))

    def policy(request: Request) -> str:
        heard = [m["content"] for m in request.messages if m["role"] == "user"]
        return demonstrate(heard[0], heard[1:], random.Random(request.seed))

    async def play(store: Store) -> None:
        engine = ScriptedEngine(policy, renderer=Renderer(tokenizer))
        await asyncio.gather(
            *(
                rollout(
                    calculator_agent(),
                    lambda: Calculator(scorer="basic_arithmetic", max_turns=4),
                    tasks[k // 5],
                    engine=engine,
                    seed=k,
                    env_seed=k // 5,
                    group=f"g{k // 5}",
                    attempt=k % 5,
                    split="demo",
                    journal=store.writer,
                )
                for k in range(THOUSAND)
            )
        )

    with Store.create(path, durability="os") as store:
        asyncio.run(play(store))
    tokenizer.save_pretrained(path / "checkpoints" / "update-000000" / "hf")
    return path


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
        "evaluation.greedy=true",
        'loop.changes={"regulariser": [{"kind": "entropy", "coefficient": 0.05}]}',
    )
    words = ["train", *SCENE, "--model", str(folder / "model"), "--out", str(folder / "run"), *more]
    assert main(words) == 0
    return folder / "run"
