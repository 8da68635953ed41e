"""Players whose engines are servers: one learns and its server takes the weights, one is frozen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded.embedded_server import EngineServer
from tapereel.agents.engines.embedded.pretrained import load_pretrained
from tapereel.finetune.run.train_run import train

from ...cli.lab import answer_of
from ..loop.hosting import in_thread
from .stage import GUIDE, JUDGE, SEEKER, config, frozen, learns, versions


def served(folder: Path) -> AbstractContextManager[Any]:
    """A server of that model."""
    return in_thread(EngineServer(load_pretrained(folder).model, "micro").serving)


@pytest.mark.timeout(180)
def test_a_player_on_servers_learns_beside_one_in_this_process(models: Path, tmp_path: Path, capsys) -> None:
    with served(models / "seeker") as theirs, served(models / "guide") as judges:
        engines = {"kind": "vllm", "weights_folder": str(tmp_path / "weights")}
        (tmp_path / "weights").mkdir()
        play = config(
            models,
            updates=2,
            players={
                "seeker": {
                    **learns(models),
                    "engine": {**engines, "urls": [theirs.url], "model": str(models / "seeker")},
                },
                "judge": frozen({"kind": "vllm", "urls": [judges.url], "model": str(models / "guide")}),
            },
        )
        summary = train(play, tmp_path / "run")
    assert (summary.updates, summary.players["seeker"].updates, summary.books_close) == (2, 2, True)
    spoke = versions(tmp_path / "run")
    assert {f"{summary.lineage}-seeker:{n}" for n in range(2)} <= spoke[SEEKER]
    assert {f"{summary.lineage}:{n}" for n in range(2)} <= spoke[GUIDE]
    assert len(spoke[JUDGE]) == 1
    assert not spoke[JUDGE] & (spoke[GUIDE] | spoke[SEEKER])
    found = answer_of(capsys, "reproduce", str(tmp_path / "run"))
    assert (found["outcome"], found["players"]["seeker"]["outcome"]) == ("verified", "verified")
