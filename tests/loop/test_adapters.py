"""Training adapters with servers: what is published, checkpointed and derived again. What the server says is made up;
tests/contract has the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.reproduce import reproduce
from tapereel.finetune.train import TrainConfig, train

from ..agents.faulty import FaultyServer
from .hosting import in_thread
from .lab import WORDS, Letters, Speaker, assert_books_close, model, settings_of

pytestmark = pytest.mark.timeout(120)


def test_a_run_that_trains_adapters_publishes_checkpoints_and_derives_them_again(tmp_path: Path) -> None:
    folder, server = tmp_path / "model", FaultyServer()
    model().save_pretrained(folder)
    WORDS.save_pretrained(folder)
    with in_thread(server.up) as url:
        scene: dict[str, Any] = {
            "agent": f"{Speaker.__module__}:Speaker", "env": f"{Letters.__module__}:Letters",
            "tasks": ("a", "b", "c", "d"), "evaluation": {"fraction": 0.25},
            "engine": {"kind": "vllm", "model": str(folder), "urls": [url], "weights_folder": str(tmp_path / "weights"),
                       "publish": "lora", "lora": {"rank": 2, "alpha": 4}},
        }  # fmt: skip
        with pytest.raises(ValueError, match=r"loop\.publish=reprefill can't be done with adapters"):
            TrainConfig(**scene, loop=settings_of())
        # The made-up log-probs are nobody's, so they can't be compared with the trainer's.
        loop = settings_of(updates=3, max_lag=0, publish="drain", sampler_tolerance=None, recipe="reinforce_plain",
                           changes={"regulariser": [{"kind": "kl", "beta": 0.01}]})  # fmt: skip
        config = TrainConfig(**scene, loop=loop)
        summary = train(config, tmp_path / "run")
        resumed = train(config, tmp_path / "run", resume=True)
    assert (summary.updates, summary.books_close, resumed.updates) == (3, True, 3)
    assert_books_close(tmp_path / "run")
    assert "/collective_rpc" not in server.control, "the base is never touched"
    loaded = [body["lora_name"] for route, body in server.told if route == "/v1/load_lora_adapter"]
    assert loaded == [f"{summary.lineage}:{k}" for k in range(4)]
    assert {body["model"] for body in server.asked} <= set(loaded)
    assert sorted(path.name for path in Path(summary.model).glob("adapter_*")) == ["adapter_config.json",
                                                                                   "adapter_model.safetensors"]
    about = json.loads((Path(summary.model) / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(folder)
    again = reproduce(tmp_path / "run")
    assert again.outcome == "verified", again
