"""Requery: in bfloat16, rounding is told from wrong weights by what rounding does to the same model."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import RunConfig
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.runs import run as sample
from tapereel.cli import main
from tapereel.finetune import TrainConfig
from tapereel.finetune.inspect import requery_run
from tapereel.finetune.inspect.requery import compared
from tapereel.finetune.run import train
from tapereel.tapes.audit import Verdicts

from ..loop.lab import WORDS, EverySecond, Speaker

SCENE = {"agent": f"{Speaker.__module__}:Speaker", "env": f"{EverySecond.__module__}:EverySecond"}
LAST = 2
PLANTED = 0.03
"""Noise on a layer's weights, as a share of their standard deviation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(WORDS, "small").save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def narrow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with autocast, whose checkpoints hold every version but the first."""
    path = tmp_path_factory.mktemp("narrow") / "run"
    loop: dict[str, Any] = {"updates": LAST, "groups": 4, "group_size": 4, "max_lag": 1, "checkpoint_every": 1}
    loop |= {"sampling": {"max_tokens": 8}, "keep_checkpoints": None, "optimiser": {"autocast": "bfloat16", "lr": 1e-3}}
    engine = {"kind": "embedded", "model": str(folder)}
    config = {"tasks": ["ab", "cd"], "evaluation": {"fraction": 0}, "engine": engine, "loop": loop, **SCENE}
    train(TrainConfig.model_validate(config), path)
    return path


def outcomes(verdicts: Verdicts) -> set[str]:
    return {one.outcome for one in verdicts.verdicts}


def planted(folder: Path, to: Path, share: float = PLANTED) -> str:
    """Save the model with noise on the weights of one layer."""
    model = tiny_model(WORDS, "small")
    random = torch.Generator().manual_seed(0)
    for weight in model.model.layers[1].parameters():
        if weight.dim() > 1:
            weight.data += share * weight.data.std() * torch.randn(weight.shape, generator=random)
    shutil.copytree(folder, to)
    model.save_pretrained(to)
    return str(to)


def test_tokens_of_a_run_with_autocast_come_from_the_weights_of_their_version(
    narrow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts, _ = requery_run(narrow)
    assert outcomes(verdicts) == {"verified"}, verdicts
    for one in verdicts.verdicts:
        assert one.precision == "bfloat16 autocast"
        assert one.measured["largest"] > 1e-3, "float32's tolerance would not do"
        assert (
            one.measured["version_error"] < 1.25 * one.measured["rounding"] < one.measured["version_tolerance"] < 0.05
        )
    assert main(["replay", "model", str(narrow), "--no-keep"]) == 0
    assert "bfloat16 autocast" in capsys.readouterr().out
    assert outcomes(requery_run(narrow, tolerance=1e-3)[0]) == {"diverged"}


def test_wrong_weights_are_found_beside_the_rounding(folder: Path, narrow: Path, tmp_path: Path) -> None:
    after_one = str(narrow / "checkpoints" / "update-000001")
    found = Counter(
        (one.divergence.sentence.partition("sampled by version ")[2].split(";")[0][-2:] if one.divergence else ":1")
        for one in requery_run(narrow, after_one)[0].verdicts
    )
    assert set(found) == {":0", ":1"}, "the weights of an update don't pass for those before it"
    wrong, _ = requery_run(narrow, planted(folder, tmp_path / "planted"))
    assert outcomes(wrong) == {"diverged"}
    assert any(one.measured["tape_error"] < one.measured["tape_tolerance"] for one in wrong.verdicts), (
        "tapes that say too little alone are judged with the others of their version"
    )


def test_an_engine_whose_precision_is_not_recorded_is_not_accused_of_rounding(
    folder: Path, narrow: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(narrow, tmp_path / "run")
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("kind: embedded", "kind: vllm"))
    verdicts, _ = requery_run(run)
    assert outcomes(verdicts) == {"unverifiable"}
    assert all("precision" in str(one.reason) for one in verdicts.verdicts)
    assert outcomes(requery_run(run, planted(folder, tmp_path / "planted"))[0]) == {"diverged"}


def test_weights_in_bfloat16_are_loaded_as_the_run_had_them(folder: Path, tmp_path: Path) -> None:
    engine = {"kind": "embedded", "model": str(folder), "dtype": "bfloat16"}
    config = {"tasks": ["ab", "cd"], "attempts": 8, "sampling": {"max_tokens": 8}, "engine": engine, **SCENE}
    sample(RunConfig.model_validate(config), tmp_path / "run")
    for model in (None, str(folder)):
        verdicts, _ = requery_run(tmp_path / "run", model)
        assert outcomes(verdicts) == {"verified"}
        assert {one.precision for one in verdicts.verdicts} == {"bfloat16 weights"}
    assert outcomes(requery_run(tmp_path / "run", planted(folder, tmp_path / "planted"))[0]) == {"diverged"}


def test_a_tape_of_other_weights_does_not_accuse_its_version() -> None:
    """With the tails of SmolLM2's rounding errors: a kurtosis of 10."""
    random = np.random.default_rng(0)
    tapes = [slice(16 * k, 16 * k + 16) for k in range(40)]

    def rounded() -> np.ndarray:
        return 0.02 * random.standard_t(5, 640) * np.sqrt(3 / 5)

    def diverged(recorded: np.ndarray) -> tuple[int, bool]:
        found = compared(recorded, rounded(), tapes)
        version = found[0][1]
        return sum(one.error > one.limit for one, _ in found), version.error > version.limit

    assert {diverged(rounded()) for _ in range(200)} == {(0, False)}
    one, every = rounded(), rounded()
    one[tapes[7]] += 0.5
    assert diverged(one) == (1, False)
    assert diverged(every + 0.04 * random.choice([-1, 1], 640)) == (0, True), "too little to see in 16 tokens"
