"""TRL's own trainers train on the rows and prompts of a run, and their reward functions get the same here and there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import tapereel as tr

from . import trl_env

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


def started(script: str, *words: str | Path) -> None:
    """Run a script of this folder by the Python of the environment."""
    if not trl_env.DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.trl_env")
    command = [trl_env.PYTHON, Path(__file__).with_name(script), *words]
    done = subprocess.run(
        command, env={**os.environ, **trl_env.ENVIRONMENT}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


class Say(tr.Environment):
    """Asks for one letter."""

    async def reset(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=float(str(action).startswith(self.word)), terminated=True)


@pytest.mark.ledger("F08")
def test_trls_own_trainers_train_on_the_rows_and_prompts_of_a_run(tmp_path: Path) -> None:
    folder = tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    settings = {"sampling.max_tokens": 6, "limits.turns": 2}
    run = tr.run(tr.ChatAgent(), Say, ["a", "b"], str(folder), attempts=4, out=tmp_path / "run", settings=settings)
    started("sft_run.py", tmp_path)
    got = json.loads((tmp_path / "seen.json").read_text())
    mine = [{"input_ids": line["input_ids"], "labels": line["labels"]} for line in run.dataset()]
    assert sorted(map(str, got["seen"])) == sorted(map(str, mine)), "each row once, with its own targets"
    assert len(got["losses"]) == 2
    assert all(loss > 0 for loss in got["losses"])
    assert got["moved"]
    assert got["asked"]
    assert set(got["asked"]) <= set(run.dataset(tokenizer=folder)["prompt_text"])


def test_a_reward_function_gets_what_trls_own_trainer_gives_it(tmp_path: Path) -> None:
    started("trl_rewards_run.py", tmp_path)
    cases = json.loads((tmp_path / "seen.json").read_text())
    assert len(cases) == 14
    for name, case in cases.items():
        assert case["ours"] == case["trl"], name
