"""Where a model is trained, in which precision, and what of that a later process may do otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.llama.modeling_llama import LlamaModel

from tapereel.agents.engines.embedded import load_pretrained
from tapereel.agents.engines.embedded.pretrained import device_of
from tapereel.agents.setup import EmbeddedConfig
from tapereel.cli import main
from tapereel.finetune import LoopConfig, TrainConfig
from tapereel.finetune.loop import CriticConfig, delivery, rounding
from tapereel.finetune.loop.policy import sampling_attention
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import TrainerConfig, train
from tapereel.finetune.run.load_policy import load_policy
from tapereel.finetune.trainer import logprobs as scoring
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import CONFIG, Store

from .lab import WORDS, Letters, Speaker, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


def config(folder: Path, device: str = "cpu", **loop: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "agent": f"{Speaker.__module__}:Speaker",
            "env": f"{Letters.__module__}:Letters",
            "tasks": ["a", "b", "cd"],
            "evaluation": {"fraction": 0},
            "engine": {"kind": "embedded", "model": str(folder)},
            "trainer": {"device": device},
            "loop": {
                "updates": 2,
                "groups": 2,
                "group_size": 4,
                "sampling": {"max_tokens": 2},
                "max_lag": 0,
                "checkpoint_every": 1,
                "keep_checkpoints": None,
                **loop,
            },
        }
    )


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", ""])
def test_a_device_that_is_not_there_is_refused_by_its_name(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"device '{name}'.*`auto`"):
        load_pretrained(folder, device=name)


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert device_of("auto").type == kind


@pytest.mark.parametrize("words", [("--device", "cuda:1"), ("--slots", "8")])
def test_what_is_the_embedded_engines_is_not_taken_for_vllm(
    folder: Path, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", str(folder), *words]) == 64
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


def test_an_attention_without_its_package_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"FlashAttention2.*installed"):
        load_pretrained(folder, attention="flash_attention_2")


def test_the_engine_of_a_model_samples_with_what_it_can(folder: Path) -> None:
    assert [sampling_attention(kind) for kind in (None, "eager", "sdpa", "flex_attention", "flash_attention_2")] == [
        None,
        "eager",
        "sdpa",
        "sdpa",
        "sdpa",
    ]
    engine, trainer = EmbeddedConfig(model=str(folder)), TrainerConfig(attention="flex_attention")
    policy = load_policy(engine, trainer, LoopConfig(), get_recipe("grpo"), seed=0)
    assert policy.model.config._attn_implementation == "flex_attention"
    assert policy.copy("run:0")._decoder.model.config._attn_implementation == "sdpa"
    assert policy.model.config._attn_implementation == "flex_attention"


def test_settings_of_precision_reach_every_forward(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[bool, bool]] = set()
    forward = scoring.states

    def states(body: Any, micro: Any, *more: Any) -> Any:
        seen.add((torch.is_autocast_enabled("cpu"), body.training and body.is_gradient_checkpointing))
        return forward(body, micro, *more)

    for place in ("logprobs", "trainer", "critic"):
        monkeypatch.setattr(f"tapereel.finetune.trainer.{place}.states", states)
    monkeypatch.setattr(rounding, "SAMPLE", 0)  # it forwards without autocast too
    own = {"autocast": "bfloat16", "gradient_checkpointing": True}
    narrow = config(folder, recipe="ppo", optimiser=own, critic={"optimiser": own}, sampler_tolerance=None)
    assert train(narrow, tmp_path / "narrow").books_close
    assert seen == {(True, True)}
    seen.clear()
    assert train(config(folder, recipe="ppo"), tmp_path / "plain").books_close
    assert seen == {(False, False)}


async def unchecked(self: Any, *args: object) -> None:
    """In place of `Delivery.check`."""


@pytest.mark.parametrize("autocast", ["bfloat16", None])
def test_an_engine_samples_under_the_autocast_that_trains(
    folder: Path, tmp_path: Path, autocast: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both forward without autocast too, to measure how it rounds.
    monkeypatch.setattr(rounding, "SAMPLE", 0)
    monkeypatch.setattr(delivery.Delivery, "check", unchecked)
    seen: set[tuple[bool, bool]] = set()

    def noted(module: Any, given: Any) -> None:
        if isinstance(module, LlamaModel):
            seen.add((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))

    hook = register_module_forward_pre_hook(noted)
    try:
        own = config(folder, sampler_tolerance=None, optimiser={"autocast": autocast})
        assert train(own, tmp_path / "run").books_close
    finally:
        hook.remove()
    assert seen == {(sampled, autocast is not None) for sampled in (True, False)}


@pytest.mark.parametrize(
    ("loop", "missing"),
    [
        ({}, "loop.optimiser"),
        ({"recipe": "ppo", "optimiser": {"autocast": "bfloat16"}, "critic": {}}, "loop.critic.optimiser"),
        ({"optimiser": {"autocast": "bfloat16"}}, "warm.optimiser"),
    ],
)
def test_flash_attention_wants_bfloat16(folder: Path, loop: dict[str, Any], missing: str) -> None:
    given = config(folder, **loop).model_dump()
    if missing == "warm.optimiser":
        given["warm"] = {"tapes": "runs/shown"}
    given["trainer"]["attention"] = "flash_attention_2"
    with pytest.raises(ValidationError, match=f"float32.*{missing}.autocast=bfloat16"):
        TrainConfig.model_validate(given)


def test_a_critic_without_a_body_keeps_no_activations() -> None:
    with pytest.raises(ValidationError, match=r"optimiser\.gradient_checkpointing.*`own`"):
        CriticConfig.model_validate({"body": "policy", "optimiser": {"gradient_checkpointing": True}})


def test_what_was_trained_elsewhere_is_looked_at_and_gone_on_with_here(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config(folder), run)
    settings = yaml.safe_load((run / CONFIG).read_text())
    settings["trainer"]["device"] = "cuda:99"
    (run / CONFIG).write_text(yaml.safe_dump(settings))
    with Store.open(run, write=True) as store:
        store.record_files(run / CONFIG)  # as a run that was trained there has it
    assert main(["reproduce", str(run)]) == 0
    assert train(config(folder, updates=2), run, resume=True).updates == 2
