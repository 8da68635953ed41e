"""Training adapters with servers: what is published, checkpointed and derived again. What the server says is made up;
tests/contract has the real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tapereel.agents.engines.embedded import load_pretrained
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.cli import main
from tapereel.finetune import TrainConfig
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.run import train
from tapereel.tapes.errors import UsageError

from ...agents.faulty import FaultyServer
from .hosting import in_thread
from .lab import WORDS, Letters, Speaker, assert_books_close, model, settings_of

pytestmark = pytest.mark.timeout(120)


def save_into(folder: Path) -> None:
    model().save_pretrained(folder)
    WORDS.save_pretrained(folder)


def test_a_run_that_trains_adapters_publishes_checkpoints_and_derives_them_again(tmp_path: Path) -> None:
    folder, server = tmp_path / "model", FaultyServer()
    save_into(folder)
    with in_thread(server.up) as url:
        scene: dict[str, Any] = {
            "agent": f"{Speaker.__module__}:Speaker",
            "env": f"{Letters.__module__}:Letters",
            "tasks": ("a", "b", "c", "d"),
            "evaluation": {"fraction": 0.25},
            "engine": {
                "kind": "vllm",
                "model": str(folder),
                "urls": [url],
                "weights_folder": str(tmp_path / "weights"),
                "weights": {"kind": "adapters", "rank": 2, "alpha": 4},
            },
        }
        with pytest.raises(ValueError, match=r"loop\.in_flight=reprefill.*engine\.weights=reload"):
            TrainConfig(**scene, loop=settings_of())
        # The made-up log-probs are nobody's, so they can't be compared with the trainer's.
        loop = settings_of(
            updates=3,
            max_lag=0,
            in_flight="drain",
            sampler_tolerance=1e6,
            recipe="reinforce_plain",
            changes={"regulariser": [{"kind": "kl", "beta": 0.01}]},
        )
        config = TrainConfig(**scene, loop=loop)
        summary = train(config, tmp_path / "run")
        resumed = train(config, tmp_path / "run", resume=True)
    assert (summary.updates, summary.books_close, resumed.updates) == (3, True, 3)
    assert_books_close(tmp_path / "run")
    assert "/collective_rpc" not in server.control, "the base is never touched"
    loaded = [body["lora_name"] for route, body in server.told if route == "/v1/load_lora_adapter"]
    # Evaluations before and behind the loop connect by themselves, and load what they measure.
    assert loaded == [f"{summary.lineage}:{k}" for k in (0, 0, 1, 2, 3, 3)]
    assert {body["model"] for body in server.asked} <= set(loaded)
    assert sorted(path.name for path in Path(summary.model).glob("adapter_*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    about = json.loads((Path(summary.model) / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(folder)
    assert not (Path(summary.model) / "README.md").exists(), "a template of a model card"
    again = reproduce(tmp_path / "run")
    assert again.outcome == "verified", again


def test_adapters_are_trained_and_sampled_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    save_into(folder)
    scene = {"agent": f"{Speaker.__module__}:Speaker", "env": f"{Letters.__module__}:Letters"}
    config = TrainConfig.model_validate(
        {
            **scene,
            "tasks": ["a", "b", "c", "d"],
            "evaluation": {"fraction": 0.25},
            "engine": {"kind": "embedded", "model": str(folder)},
            "trainer": {"lora": {"rank": 2}},
            "loop": {**settings_of(updates=3, max_lag=0, checkpoint_every=1).model_dump(), "keep_checkpoints": None},
        }
    )
    summary, resumed = [train(config, run, resume=resume) for resume in (False, True)]
    assert (summary.updates, summary.books_close, resumed.updates) == (3, True, 3)
    assert {path.name for path in Path(summary.model).glob("adapter_*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert reproduce(run).outcome == "verified"
    # Of the first update's, only the seed of the fresh adapters is known.
    assert main(["replay", "model", str(run), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    outcomes = Counter(verdict["outcome"] for verdict in told["verdicts"])
    assert outcomes["diverged"] == 0
    assert outcomes["verified"] > outcomes["unverifiable"] / 2 > 0

    found = load_pretrained(summary.model).model
    trained = torch.load(run / "checkpoints" / "update-000003" / "policy.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in found.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in trained.items()
    }
    words = ["run", "--agent", scene["agent"], "--env", scene["env"], "--set", 'tasks=["a", "b"]', "--out"]
    assert main([*words, str(tmp_path / "again"), "--model", summary.model]) == 0
    assert main([*words, str(tmp_path / "no"), "--model", str(folder), "--set", "engine.lora.rank=2"]) == 64
    assert "engine.lora" in capsys.readouterr().err


def test_adapters_are_trained_further_once_they_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, adapters = tmp_path / "model", tmp_path / "adapters"
    save_into(folder)
    made = add_adapters(load_pretrained(folder).model, AdapterConfig(rank=2))
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    made.save_pretrained(adapters)
    WORDS.save_pretrained(adapters)

    def trained(model: Path, out: str, **trainer: Any) -> Any:
        config = TrainConfig.model_validate(
            {
                "agent": f"{Speaker.__module__}:Speaker",
                "env": f"{Letters.__module__}:Letters",
                "tasks": ["a", "b"],
                "evaluation": {"fraction": 0},
                "engine": {"kind": "embedded", "model": str(model)},
                "trainer": trainer,
                "loop": settings_of(updates=1, max_lag=0).model_dump(),
            }
        )
        return train(config, tmp_path / out)

    for lora in ({}, {"lora": {"rank": 2}}, {"lora": {"rank": 4, "targets": ["v_proj"]}}):
        with pytest.raises(UsageError, match="holds adapters") as refused:
            trained(adapters, "no", **lora)
        assert not (tmp_path / "no").exists()
    monkeypatch.chdir(tmp_path)
    command = str(refused.value).partition("python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True, capture_output=True)
    ids = torch.tensor([[1, 2, 3]])
    logits = [load_pretrained(path).model(ids).logits for path in (adapters, tmp_path / "merged")]
    torch.testing.assert_close(*logits)
    further = trained(Path("merged"), "run", lora={"rank": 2})
    assert further.books_close
    monkeypatch.chdir("/")
    assert load_pretrained(further.model).model, "the adapters name their base model by its whole path"


def test_targets_that_name_no_layer_are_refused_by_name() -> None:
    for targets in (("q_proj", "nosuch"), ("nosuch",), ("all-linear", "q_proj"), ("lm_head",)):
        wrong = next(name for name in targets if name != "q_proj")
        with pytest.raises(UsageError, match=rf"targets: {wrong} names no layer.*down_proj"):
            add_adapters(model(), AdapterConfig(rank=2, targets=targets))
    for targets in (("q_proj", "layers.0.mlp.up_proj"), ()):
        assert add_adapters(model(), AdapterConfig(rank=2, targets=targets)).peft_config


def test_adapters_whose_model_is_gone_are_refused_by_its_name(tmp_path: Path) -> None:
    folder, adapters = tmp_path / "model", tmp_path / "adapters"
    save_into(folder)
    add_adapters(load_pretrained(folder).model, AdapterConfig(rank=2)).save_pretrained(adapters)
    WORDS.save_pretrained(adapters)
    assert load_pretrained(adapters).model.peft_config
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=re.escape(f"'{folder}'")):
        load_pretrained(adapters)
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"adapter_config\.json.*\w+Error\b"):
        load_pretrained(adapters)


def test_the_model_below_adapters_may_be_in_bfloat16(tmp_path: Path) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    load = {"kind": "embedded", "model": str(folder)}
    save_into(folder)
    scene = {
        "agent": f"{Speaker.__module__}:Speaker",
        "env": f"{Letters.__module__}:Letters",
        "tasks": ["a", "b"],
        "evaluation": {"fraction": 0},
    }
    loop = settings_of(updates=2, max_lag=0, checkpoint_every=1, sampler_tolerance=0.1).model_dump()
    with pytest.raises(ValueError, match=r"trainer\.dtype=bfloat16\b"):
        TrainConfig.model_validate({**scene, "engine": load, "trainer": {"dtype": "bfloat16"}, "loop": loop})
    trainer = {"dtype": "bfloat16", "lora": {"rank": 2}}
    config = TrainConfig.model_validate({**scene, "engine": load, "trainer": trainer, "loop": loop})
    assert train(config, run).books_close
    weights = torch.load(run / "checkpoints" / "update-000002" / "policy.pt", weights_only=True)
    assert {("lora_" in name, tensor.dtype) for name, tensor in weights.items()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }
    assert reproduce(run).outcome == "verified"
    assert main(["replay", "model", str(run), "--tolerance", "0.1"]) == 2, "only the fresh adapters are known to nobody"


def test_the_device_of_a_trained_model_is_the_trainer_s() -> None:
    scene = {"agent": "a:b", "env": "a:b", "tasks": "a:b", "loop": {"updates": 1}}
    engine = {"kind": "embedded", "model": "m", "device": "cuda:1"}
    with pytest.raises(ValidationError) as refused:
        TrainConfig.model_validate({**scene, "engine": engine})
    assert "trainer.device=cuda:1" in str(refused.value)
