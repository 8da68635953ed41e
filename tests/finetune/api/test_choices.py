"""Sampling and data choices that other systems have, reached through the settings of a training run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import tapereel as tr
from tapereel.tapes.common.config import ConfigError
from tapereel.tapes.store.store import Store


class Say(tr.Environment):
    """Rewards an answer by the share of its letters that are the task's."""

    async def reset(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        said = str(action)
        return tr.Outcome(reward=said.count(self.word) / max(len(said), 1), terminated=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(tr.save_tiny_model(tmp_path_factory.mktemp("model"), alphabet="ab", size="micro"))


@pytest.fixture(autouse=True)
def one_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds follow from the lineage, so runs with the same settings have the same weights."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)


def train(model: str, out: Path, *, resume: bool = False, recipe: str = "reinforce", **settings: Any) -> tr.Run:
    """A run of two updates on two words; `__` in a name stands for a dot."""
    small = {
        "loop.groups": 2,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.checkpoint_every": 1,
        "loop.sampling.max_tokens": 6,
        "loop.optimiser.lr": 1e-2,
        "evaluation.fraction": 0,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return tr.train(
        tr.ChatAgent(), Say, ["a", "b"], model, updates=2, recipe=recipe, out=out, resume=resume, settings=small | given
    )


def published(run: tr.Run) -> list[str]:
    """The digests of the weights, in the order of their versions."""
    with Store.open(run.path) as store:
        return [stored.record.digest for stored in store.run_records("publish")]


def test_the_epsilon_of_adam_and_packing_are_settings(model: str, tmp_path: Path) -> None:
    plain, eps = train(model, tmp_path / "plain"), train(model, tmp_path / "eps", loop__optimiser__eps=1e-3)
    packed = train(model, tmp_path / "packed", loop__optimiser__pack=True)
    assert published(plain)[0] == published(eps)[0] == published(packed)[0]
    assert published(plain)[1] != published(eps)[1], "another epsilon makes other weights"
    assert published(plain)[1] != published(packed)[1], "packed rows are summed in another order"
    weights = [_weights(run) for run in (plain, packed)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])
    assert eps.reproduce().outcome == packed.reproduce().outcome == "verified"


def _weights(run: tr.Run) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(run.path) / "checkpoints" / "update-000001" / "hf" / "model.safetensors")


@pytest.mark.parametrize("setting", [{"loop__critic__optimiser__ema": 0.9}, {"loop__critic__optimiser__pack": True}])
def test_a_critic_refuses_settings_that_it_would_ignore(model: str, tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="would do nothing: remove them"):
        train(model, tmp_path / "run", recipe="ppo", **setting)
