"""Runs that need less memory: the optimiser's state in main memory, and adapters on a model of 4 bits. They train,
resume and reproduce."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tapereel.cli import main
from tapereel.finetune.inspect.reproducer import reproduce
from tapereel.finetune.loop.history import BrokenHistory
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.finetune.run.train_run import train
from tapereel.finetune.trainer.checkpoint import read_checkpoint
from tapereel.tapes.common.config import dump_config, write_yaml
from tapereel.tapes.store.run_directory import METRICS, read_metrics

from . import lab
from .lab import WORDS, assert_books_close, settings_of

pytestmark = pytest.mark.timeout(120)
QUANTISED: dict[str, Any] = {"lora": {"rank": 2, "quantise": "nf4"}}


def model(seed: int = 0) -> LlamaForCausalLM:
    """Twice as wide as `lab.model`: on CPUs, bitsandbytes reads weights of 4 bits right for inputs of 64 and 128."""
    config = lab.model().config
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 32})
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def config_of(folder: Path, trainer: dict[str, Any], updates: int = 4) -> TrainConfig:
    """A run whose episodes and weights are the same each time, since it is synchronous."""
    if not folder.exists():
        model().save_pretrained(folder)
        WORDS.save_pretrained(folder)
    scene = Path(lab.__file__)
    return TrainConfig.model_validate(
        {
            "agent": f"{scene}:Speaker",
            "env": f"{scene}:Letters",
            "tasks": ["a", "b", "c", "d"],
            "evaluation": {"fraction": 0.25},
            "engine": {"kind": "embedded", "model": str(folder)},
            "trainer": trainer,
            "loop": settings_of(updates=updates, max_lag=0, checkpoint_every=2).model_dump(),
        }
    )


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / f"update-{update:06d}").weights()


def assert_same_weights(one: Path, other: Path, update: int) -> None:
    ours, theirs = weights(one, update), weights(other, update)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def killed(config: TrainConfig, folder: Path) -> Path:
    """A run that was killed with SIGKILL after an update behind its newest checkpoint."""
    folder.mkdir()
    (folder / "train.yaml").write_text(dump_config(config))
    words = ["train", "--config", str(folder / "train.yaml"), "--out", str(folder / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "tapereel.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while process.poll() is None and not _behind_a_checkpoint(folder / "run"):
            try:
                process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        _, said = process.communicate()
    assert process.returncode == -9, said.decode()
    return folder / "run"


def _behind_a_checkpoint(run: Path) -> bool:
    lines = read_metrics(run / METRICS) if (run / METRICS).exists() else []
    return any(line.get("phase") == "rl" and line.get("update", 0) >= 3 for line in lines)  # type: ignore[operator]


@pytest.mark.ledger("F91")
def test_a_run_may_move_its_optimiser_to_main_memory_when_it_is_resumed(tmp_path: Path) -> None:
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    assert train(config_of(tmp_path / "model", {}), plain).books_close
    train(config_of(tmp_path / "model", {}, updates=2), moved)
    summary = train(config_of(tmp_path / "model", {"offload": True}), moved, resume=True)
    assert (summary.updates, summary.books_close) == (4, True)
    assert_same_weights(plain, moved, update=4)
    assert reproduce(moved).outcome == "verified"


@pytest.mark.ledger("F91")
def test_adapters_are_trained_on_a_model_of_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`max_lag` is 0, so a sampler that had other weights than the trainer would end the run."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    config = config_of(tmp_path / "model", QUANTISED)
    summary, resumed = [train(config, run, resume=resume) for resume in (False, True)]
    assert (summary.updates, summary.books_close, resumed.updates) == (4, True, 4)
    assert reproduce(run).outcome == "verified"
    # Only the seed of the first update's adapters is known, and two checkpoints are left.
    assert main(["replay", "model", str(run), "--json"]) == 2
    verdicts = Counter(verdict["outcome"] for verdict in json.loads(capsys.readouterr().out)["verdicts"])
    assert verdicts["verified"] > verdicts["diverged"] == 0
    exported = {path.name for path in Path(summary.model).glob("*.safetensors")}
    assert exported == {"adapter_model.safetensors"}
    train(config_of(tmp_path / "model", {"lora": {"rank": 2}}), plain)
    ours, theirs = weights(run, 4), weights(plain, 4)
    packed = {name for name, tensor in ours.items() if tensor.dtype == torch.uint8 and name.endswith("layer.weight")}
    assert len(packed) == 2 * 7, "each linear layer of each of the two blocks"
    for name in packed:
        assert ours[name].nbytes * 8 == theirs[name].nbytes, "4 bits for 32"
    adapters = {name for name in ours if "lora_" in name}
    assert adapters == {name for name in theirs if "lora_" in name}
    assert any(bool(ours[name].any()) for name in adapters if "lora_B" in name)
    # Other weights below the adapters are noticed, although nothing reads them from a checkpoint.
    model(seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(BrokenHistory, match=r"digest"):
        train(config_of(tmp_path / "model", QUANTISED, updates=6), run, resume=True)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"trainer": {"lora": {"quantise": "int4"}}}, 64, r"trainer\.lora\.quantise.*'nf4'"),
        ({"trainer": QUANTISED, "processes": {"shard": True}}, 64, r"quantise=nf4.*processes\.shard"),
        (
            {
                "engine": {"kind": "vllm", "model": "m", "weights": {"kind": "adapters", "quantise": "nf4"}},
            },
            64,
            r"engine\.weights\.quantise=nf4.*engine\.options",
        ),
        ({"trainer": QUANTISED}, 1, r"bitsandbytes.*tapereel\[qlora\]"),
    ],
    ids=["unknown", "sharded", "server of all bits", "not installed"],
)
def test_what_4_bits_cannot_do_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
    changes: dict[str, Any],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it weren't installed
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    data = config_of(tmp_path / "model", {}).model_dump(mode="json")
    for name, value in changes.items():
        data[name] = value if name == "engine" else {**data[name], **value}
    (tmp_path / "train.yaml").write_text(write_yaml(data))
    assert main(["train", "--config", str(tmp_path / "train.yaml"), "--out", str(tmp_path / "run")]) == code
    assert re.search(says, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "run").exists()


@pytest.mark.kill
@pytest.mark.ledger("F91")
@pytest.mark.parametrize("trainer", [{"offload": True}, QUANTISED], ids=["offload", "4 bits"])
def test_a_run_that_was_killed_ends_with_the_same_weights(tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = config_of(tmp_path / "model", trainer, updates=20)
    died = killed(config, tmp_path / "died")
    assert train(config, died, resume=True).books_close
    train(config, tmp_path / "whole")
    assert_same_weights(died, tmp_path / "whole", update=20)
    assert reproduce(died).outcome == "verified"
    assert_books_close(died)
