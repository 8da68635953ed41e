"""What a run says before its first update: the base rate, and a learning rate that sampling can't see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tapereel as tr
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.cli import main
from tapereel.finetune import LoopConfig
from tapereel.finetune.run.load_policy import check_rate
from tapereel.finetune.run.training import base_rate
from tapereel.tapes.store import HeldOut


def held_out(mean: float | None, error: float | None, n: int = 117) -> HeldOut:
    return HeldOut(mean=mean, error=error, n=n, metrics={}, reward=None, pass_at={})


def test_the_base_rate_is_said_with_and_without_temperature():
    said = base_rate({"sampled": held_out(0.094, 0.027), "greedy": held_out(0.701, 0.042)})
    assert said == "mean reward before training: 0.094 sampled, 0.701 greedy (117 held-out episodes)"


@pytest.mark.parametrize(
    ("mean", "error", "way"),
    [(0.0, 0.0, "easier tasks"), (1.0, 0.0, "harder tasks"), (0.0, 0.1, None), (0.5, 0.0, None), (None, None, None)],
)
def test_rewards_without_a_difference_get_one_sentence_more(mean: float | None, error: float | None, way: str | None):
    said = base_rate({"sampled": held_out(mean, error)})
    assert ("there was no difference" in said) == (way is not None)
    assert way is None or way in said


def test_few_episodes_show_no_lack_of_a_difference():
    assert base_rate({"sampled": held_out(0.0, 0.0, n=3)}) == (
        "mean reward before training: 0.000 sampled (3 held-out episodes)"
    )


SCENE = """import tapereel as tr

class Coin(tr.Environment):
    async def reset(self, task):
        return "heads or tails"

    async def step(self, action):
        return tr.Outcome(reward=float(sum(map(ord, action.text)) % 2), terminated=True)

agent, tasks = tr.ChatAgent(max_tokens=2), list(range(40))
"""


def test_the_command_line_says_the_base_rate_before_the_first_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "scene.py"
    file.write_text(SCENE)
    scene = [f"--agent={file}:agent", f"--env={file}:Coin", f"--tasks={file}:tasks"]
    model = tr.save_tiny_model(tmp_path / "model", size="micro")
    sets = ["loop.updates=1", "loop.groups=1", "loop.group_size=8", "evaluation.fraction=0.5"]
    words = [f"--model={model}", f"--out={tmp_path / 'run'}", *(f"--set={one}" for one in sets)]
    assert main(["train", *scene, *words]) == 0
    said = capsys.readouterr().err
    assert "there was no difference" not in said
    assert 0 < said.index("mean reward before training: 0.") < said.index("improving by rollouts: 1/1")


@pytest.mark.parametrize(
    ("autocast", "lr", "updates", "warns"),
    [
        ("bfloat16", 1e-7, 12, True),
        ("bfloat16", 1e-3, 12, False),
        ("bfloat16", 1e-7, 0, False),
        (None, 1e-7, 12, False),
    ],
)
def test_a_rate_that_cannot_move_rounded_weights_is_warned_about(
    autocast: str | None, lr: float, updates: int, warns: bool, caplog: pytest.LogCaptureFixture
):
    loop = LoopConfig.model_validate({"updates": updates, "optimiser": {"lr": lr, "autocast": autocast}})
    check_rate(tiny_model(char_tokenizer(), "micro").to(torch.bfloat16).float(), loop)
    assert ["loop.optimiser.lr=1e-07" in line for line in caplog.messages] == [True] * warns
