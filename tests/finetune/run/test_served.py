"""Players whose engines are servers: one learns and its server takes the weights, one is frozen."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.embedded import EngineServer, load_pretrained
from tapereel.finetune.run import TrainSummary, train
from tapereel.tapes.common import ConfigError

from ...agents.hosted import OneModel
from ...cli.lab import answer_of
from ..loop.hosting import in_thread
from .stage import GUIDE, JUDGE, SEEKER, config, frozen, learns, published, versions


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


@pytest.mark.timeout(180)
def test_a_run_goes_on_with_servers_at_other_addresses(models: Path, tmp_path: Path, capsys) -> None:
    """Every server is gone for good: the trained model's, a learning and a frozen player's."""
    out, names = tmp_path / "run", ("guide", "seeker", "guide")

    def play(updates: int, *, resume: bool = False) -> TrainSummary:
        with ExitStack() as servers:
            urls = [servers.enter_context(served(models / name)).url for name in names]
            guide, seeker, judge = (
                {"kind": "vllm", "urls": [url], "model": str(models / name)}
                for url, name in zip(urls, names, strict=True)
            )
            players = {"seeker": {**learns(models), "engine": seeker}, "judge": frozen(judge)}
            return train(config(models, updates=updates, engine=guide, players=players), out, resume=resume)

    first, recorded = play(1), published(out)
    second = play(2, resume=True)
    assert (first.lineage, second.updates, second.players["seeker"].updates) == (second.lineage, 2, 2)
    assert recorded.items() < published(out).items()
    found = answer_of(capsys, "reproduce", str(out))
    assert (found["outcome"], found["players"]["seeker"]["outcome"]) == ("verified", "verified")


@pytest.mark.timeout(180)
def test_a_wrong_name_of_a_frozen_player_is_corrected_by_resuming_before_any_result(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mellon-4242-mellon")
    with OneModel().up() as provider:

        def play(model: str, updates: int = 1, *, resume: bool = False) -> TrainSummary:
            judge = frozen({"kind": "litellm", "model": f"openai/{model}", "base_url": provider.url})
            made = config(models, updates=updates, players={"seeker": learns(models), "judge": judge})
            return train(made, tmp_path / "run", resume=resume)

        with pytest.raises(EngineStopped) as stopped:
            play("wrong")
        assert "players.judge.engine.model" in str(stopped.value)
        assert "(engine.model" not in str(stopped.value), "the trained model is no setting to correct"
        summary = play("right", resume=True)
        asked = len(provider.asked)
        assert (summary.updates, summary.tokens["prompt"], summary.tokens["completion"]) == (1, 10 * asked, 5 * asked)
        with pytest.raises(ConfigError, match=r"players\.judge\.engine\.model"):
            play("other", updates=2, resume=True)
