"""Held-out tasks, sampled by the loop's own engine: its next weights wait until that is done."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import EmbeddedEngine
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train
from tapereel.tapes.store import Store

from .lab import WORDS, Letters, Speaker, assert_books_close, model, settings_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_engine_of_the_loop_measures_each_version_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_lag: int
) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    model().save_pretrained(folder)
    WORDS.save_pretrained(folder)
    made: list[EmbeddedEngine] = []
    begin = EmbeddedEngine.__init__

    def noted(self: EmbeddedEngine, *given: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *given, **named)

    monkeypatch.setattr(EmbeddedEngine, "__init__", noted)
    config = TrainConfig.model_validate(
        {
            "agent": f"{Speaker.__module__}:Speaker",
            "env": f"{Letters.__module__}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "bc", "cd", "da"],
            "engine": {"kind": "embedded", "model": str(folder)},
            "evaluation": {"fraction": 0.4, "every": 1, "engine": "loop", "attempts": 4},
            "loop": settings_of(updates=3, max_lag=max_lag).model_dump(),
        }
    )
    summary = train(config, run)
    assert (summary.updates, summary.books_close) == (3, True)
    assert_books_close(run)
    assert len(made) == 3, "before, for the loop, and after"
    assert list(summary.held_out["every"]) == ["1", "2"]
    versions = defaultdict(set)
    with Store.open(run) as store:
        for summed in store.summaries(closed=True):
            for call in store.tape(summed.id).calls:
                versions[summed.split] |= {version for version, _, _ in call.spans}
    lineage = summary.lineage
    assert {split: found for split, found in versions.items() if split != "train"} == {
        "eval-before-sampled": {f"{lineage}:0"},
        "eval-update-000001-sampled": {f"{lineage}:1"},
        "eval-update-000002-sampled": {f"{lineage}:2"},
        "eval-after-sampled": {f"{lineage}:3"},
    }
