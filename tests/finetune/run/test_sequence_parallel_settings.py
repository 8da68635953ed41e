"""Settings of sequence parallelism that can't work are refused in a sentence, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tapereel.agents.setup import EmbeddedConfig
from tapereel.finetune import TrainConfig
from tapereel.finetune.loop.loop_config import ProcessesConfig
from tapereel.finetune.run import TrainerConfig
from tapereel.finetune.trainer.distributed import launched
from tapereel.finetune.trainer.sequence_parallel import check_model
from tapereel.tapes.errors import UsageError

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "changes", "degree", "named"),
    [
        ("qwen3", HEADS, 3, "8 attention heads"),
        ("qwen3", HEADS, 8, "4 key/value heads"),
        ("qwen3", {**HEADS, "rope_parameters": LONG}, 2, "rotary"),
        ("qwen3_next", {}, 2, "linear_attention"),
        ("mamba2", {}, 2, "linear_attention"),
        ("deepseek_v32", {}, 2, "indexed_attention"),
        ("gpt_oss", {}, 2, "GptOssForCausalLM"),
    ],
)
def test_a_model_that_ranks_cant_share_is_refused_by_its_configuration(
    tmp_path: Path, kind: str, changes: dict[str, Any], degree: int, named: str
):
    AutoConfig.for_model(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"sequence_parallel={degree}.*{named}"):
        check_model(str(tmp_path), degree)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_vl", "qwen3_vl", "idefics3", "llama", "mistral"])
def test_a_model_with_plain_attention_is_taken(tmp_path: Path, kind: str):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    check_model(str(tmp_path), 2)


@pytest.mark.parametrize(("world", "start"), [(None, "2"), ("3", "4")])
def test_the_degree_divides_the_number_of_processes(monkeypatch: pytest.MonkeyPatch, world: str | None, start: str):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    with (
        pytest.raises(UsageError, match=f"sequence_parallel=2.*--nproc-per-node {start},"),
        launched(sequence_parallel=2),
    ):
        pass


def test_it_has_an_attention_of_its_own():
    with pytest.raises(ValueError, match=r"trainer\.attention=eager"):
        TrainConfig(
            agent="a:b",
            env="a:b",
            tasks="a:b",
            engine=EmbeddedConfig(model="m"),
            trainer=TrainerConfig(attention="eager"),
            processes=ProcessesConfig(sequence_parallel=2),
        )
