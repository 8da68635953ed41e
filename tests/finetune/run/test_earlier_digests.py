"""Runs of earlier versions, whose records have another digest of the weights, continue and are audited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import pretrained
from tapereel.finetune.inspect import reproduce, requery_run
from tapereel.finetune.loop import BrokenHistory
from tapereel.finetune.run import train
from tapereel.finetune.run.load_policy import check_begun
from tapereel.finetune.trainer import checkpoints
from tapereel.finetune.trainer.checkpoint import BadCheckpoint, ModelWeights
from tapereel.tapes.store import Results

from ...oracles import weights_digest as slow
from ..loop.rewrite import rewrite
from .stage import config, published, uses

UPDATES = 3


def settings(models: Path, folder: Path, updates: int = UPDATES) -> Any:
    """Two policies learn, a third is frozen. Each update compares with a moving reference and a teacher."""
    return config(
        models,
        updates=updates,
        groups=2,
        group_size=4,
        reference={"model": "base", "every": 2, "decay": 0.25},
        teacher=str(folder / "teacher"),
        changes={"regulariser": [{"kind": "kl", "beta": 0.2}, {"kind": "kl", "to": "teacher", "beta": 0.2}]},
    )


@pytest.fixture(scope="module")
def earlier(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of an earlier version, and the teacher."""
    folder = tmp_path_factory.mktemp("earlier")
    found = pretrained.load_pretrained(models / "guide")
    with torch.no_grad():
        for p in found.model.parameters():
            p.mul_(0.5)
    found.model.save_pretrained(folder / "teacher")
    found.tokenizer.save_pretrained(folder / "teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_root", lambda state, pieces: slow.earlier(state))
        train(settings(models, folder), folder / "run")
    return folder


@pytest.fixture
def run(earlier: Path, tmp_path: Path) -> Path:
    """A copy for one test."""
    return shutil.copytree(earlier / "run", tmp_path / "run")


def test_a_run_of_an_earlier_version_continues_and_is_audited(run: Path, models: Path, earlier: Path) -> None:
    before, results = published(run), json.loads((run / "results.json").read_text())
    told = {use.info[name] for own in uses(run).values() for use in own for name in ("reference", "teacher")}
    assert len(told) == 5, "two references each, and the teacher"
    # The newest checkpoint of each policy is gone, so its last update is applied again.
    for path in list(run.glob(f"checkpoints/**/update-{UPDATES:06d}")):
        shutil.rmtree(path)
    train(settings(models, earlier, UPDATES + 1), run, resume=True)
    now = published(run)
    assert {version: now[version] for version in before} == before
    after = json.loads((run / "results.json").read_text())
    assert [after[name] for name in ("base", "players")] == [results[name] for name in ("base", "players")]
    lineage = results["lineage"]
    for name, folder in ((lineage, run / "checkpoints"), (f"{lineage}-seeker", run / "checkpoints" / "seeker")):
        for one in checkpoints(folder):
            weights, version = one.weights(), f"{name}:{one.update}"
            assert now[version] == (slow.earlier if version in before else slow.today)(weights)
    found = reproduce(run)
    for one in (found, found.players["seeker"]):
        assert (str(one), one.updates, one.published) == ("verified", UPDATES + 1, UPDATES + 2)
        assert one.trainers == UPDATES + 1
    verdicts, _ = requery_run(run)
    assert {verdict.outcome for verdict in verdicts.verdicts} == {"verified"}


def test_other_weights_are_refused(run: Path, models: Path) -> None:
    begun = Results.read(run)
    check_begun(begun, ModelWeights(pretrained.load_pretrained(models / "guide").model).digest, run, "guide")
    with pytest.raises(BrokenHistory, match=f"began with weights of digest {str(begun.base)[:12]}"):
        check_begun(begun, ModelWeights(pretrained.load_pretrained(models / "seeker").model).digest, run, "seeker")
    last = checkpoints(run / "checkpoints")[-1]
    weights = last.weights()
    next(iter(weights.values())).view(torch.uint8).reshape(-1)[0] ^= 1
    torch.save(weights, last.path / "policy.pt")
    with pytest.raises(BadCheckpoint, match=last.state["digest"]):
        last.weights()
    rewrite(run, lambda body: {**body, "digest": "0" * 64} if body.get("version", "").endswith(":1") else body)
    found = reproduce(run, UPDATES)
    assert found.difference is not None
    assert (found.difference.update, found.difference.field, found.difference.recorded) == (0, "weights", "0" * 64)
