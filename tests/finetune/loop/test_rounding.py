"""A run with autocast and `loop.max_lag` 0: rounding neither ends it nor is a mismatch, and a wrong weight is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.finetune import TrainConfig
from tapereel.finetune.loop import Policy, SamplerMismatch
from tapereel.finetune.run import train
from tapereel.tapes.audit import anomalies, audit_run
from tapereel.tapes.store import Store

from .lab import WORDS, EverySecond, Speaker

SHARE = 0.05
"""Noise on a layer's weights, as a share of their standard deviation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers aren't nearly uniform."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(WORDS, "small")
    model.get_output_embeddings().weight.data *= 3
    model.save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding moves log-probs of this model by up to 0.06 nats. Those of SmolLM2-135M move by up to 0.56."""
    monkeypatch.setattr(anomalies, "MISMATCH", 0.02)


def config(folder: Path, **loop: Any) -> TrainConfig:
    loop = {"updates": 3, "groups": 4, "group_size": 4, "sampling": {"max_tokens": 8}, **loop}
    loop |= {"optimiser": {"autocast": "bfloat16", "lr": 1e-4}, "max_lag": 0}
    names = {"agent": f"{Speaker.__module__}:Speaker", "env": f"{EverySecond.__module__}:EverySecond"}
    engine = {"kind": "embedded", "model": str(folder)}
    scene = {"tasks": ["ab", "cd"], "evaluation": {"fraction": 0}, "engine": engine, **names}
    return TrainConfig.model_validate({**scene, "loop": loop})


def recorded(run: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """The first record of each update, and the kinds of anomalies."""
    with Store.open(run) as store:
        infos = [stored.record.info for stored in store.run_records("use")]
        return infos, {one.kind for one in audit_run(store)[1].anomalies}


def test_rounding_under_autocast_neither_ends_a_run_nor_is_a_mismatch(folder: Path, tmp_path: Path) -> None:
    assert train(config(folder), tmp_path / "run").books_close
    infos, kinds = recorded(tmp_path / "run")
    assert max(info["mismatch"] for info in infos) > anomalies.MISMATCH, (
        "one number for all precisions would tell of it"
    )
    for info in infos:
        assert 0 < info["rounding"]["error"] < info["rounding"]["limit"], info
    assert "log-prob mismatch" not in kinds


def test_a_wrong_weight_under_autocast_is_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Policy.sampler

    async def wrong(self: Policy, version: str) -> Any:
        engine: Any = await sampler(self, version)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in engine._decoder.model.model.layers[1].parameters():
                if weight.dim() > 1:
                    weight += SHARE * weight.std() * torch.randn(weight.shape, generator=random)
        return engine

    monkeypatch.setattr(Policy, "sampler", wrong)
    with pytest.raises(SamplerMismatch, match=r"rounding: "):
        train(config(folder, updates=1), tmp_path / "stopped")
    assert train(config(folder, updates=1, sampler_tolerance=None), tmp_path / "run").books_close
    (info,), kinds = recorded(tmp_path / "run")
    assert info["rounding"]["error"] > info["rounding"]["limit"]
    assert "log-prob mismatch" in kinds
