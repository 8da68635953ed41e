"""Checkpoints of a tied model, as each kind of run writes them: vLLM loads them as transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train

from ..agents.served import CLOSE
from ..finetune.loop import lab
from ..finetune.loop.lab import WORDS, settings_of
from ..finetune.trainer.test_processes import environment, free_port
from .lab import ADAPTERS, run_in_vllm, vllm_is_there

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

IDS = [k % len(WORDS) for k in range(3, 60, 7)]


def trained(folder: Path, out: Path, **trainer: Any) -> Path:
    """The newest checkpoint of a run of one update."""
    config: dict[str, Any] = {
        "agent": f"{lab.__file__}:Speaker",
        "env": f"{lab.__file__}:EverySecond",
        "tasks": ("a", "b", "c", "d"),
        "evaluation": {"fraction": 0},
        "engine": {"kind": "embedded", "model": str(folder)},
        "trainer": trainer,
        "loop": settings_of(updates=1, max_lag=0, optimiser={"lr": 0.03, "ema": 0.5}),
    }
    train(TrainConfig(**config), out)
    return out / "checkpoints" / "update-000001"


def logprobs(model: Any) -> torch.Tensor:
    ids = torch.tensor(IDS)
    with torch.no_grad():
        return model.eval()(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_vllm_finds_in_each_checkpoint_what_transformers_finds(folder: Path, tmp_path: Path) -> None:
    vllm_is_there()
    one = trained(folder, tmp_path / "one")
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m", "tapereel.cli", "train"]
    command += ["--config", str(tmp_path / "one" / "config.yaml"), "--out", str(tmp_path / "sharded")]
    done = subprocess.run(
        [*command, "--set", "processes.shard=true", "--json"],
        capture_output=True,
        text=True,
        env=environment(MASTER_PORT=str(free_port())),
        timeout=200,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: the reward didn't rise in its only update
    adapters = trained(folder, tmp_path / "lora", lora=ADAPTERS.model_dump()) / "hf"
    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(adapters)
    expected = {adapters.parent / "merged": logprobs(adapted)}
    adapted.merge_and_unload().save_pretrained(adapters.parent / "merged")
    for checkpoint in (one, tmp_path / "sharded" / "checkpoints" / "update-000001"):
        for part in (checkpoint / "hf", checkpoint / "hf-averaged"):
            expected[part] = logprobs(AutoModelForCausalLM.from_pretrained(part))

    found = json.loads(
        run_in_vllm(Path(__file__).with_name("exported_run.py"), json.dumps(IDS), *map(str, expected)).splitlines()[-1]
    )
    base = logprobs(AutoModelForCausalLM.from_pretrained(folder))
    for (path, exact), said in zip(expected.items(), found, strict=True):
        assert (exact - base).abs().max() > 10 * CLOSE, f"{path}: nothing was learnt"
        torch.testing.assert_close(
            torch.tensor(said), exact, rtol=0, atol=CLOSE, msg=lambda text, at=path: f"{at}: {text}"
        )
