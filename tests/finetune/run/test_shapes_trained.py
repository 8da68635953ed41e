"""One update over ordinary shapes of agents: each sampled token is trained once, and no other token is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tapereel as tr
from tapereel.tapes.store import Store

from ...agents.episode.shapes import SHAPES, Room, Shape

NAMES = ("one_call", "best_of", "vote", "reflect", "grade", "guard", "note_before", "note_after", "few_shot", "route")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tapereel.agents.engines.embedded.tiny_model import save_tiny

    folder = tmp_path_factory.mktemp("shapes") / "model"
    save_tiny(folder, size="micro", seed=0)
    return folder


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.first in NAMES], ids=lambda shape: shape.name)
def test_each_sampled_token_is_trained_once(shape: Shape, model: Path, tmp_path: Path) -> None:
    settings = {
        "loop.groups": 2,
        "loop.group_size": 2,
        "loop.sampling.max_tokens": 6,
        "trainer.device": "cpu",
        "evaluation.fraction": 0,
    }
    tr.train(
        shape.agent,
        Room,
        ["a", "b"],
        str(model),
        updates=1,
        recipe="reinforce_plain",
        out=tmp_path / "run",
        settings=settings,
    )
    with Store.open(tmp_path / "run", cache=False) as store:
        (use,) = [stored.record for stored in store.run_records("use")]
        tapes = [store.tape(name) for name in use.info["tapes"]]
    assert len(tapes) == 4
    sampled = [(t.id, c.call, k) for t in tapes for c in t.calls if c.logprobs for k in range(len(c.completion or ()))]
    trained = [(tape, call, k) for tape, call, start, end, _ in use.items for k in range(start, end)]
    assert sorted(trained) == sorted(sampled)
    assert len(sampled) >= 4 * 2 * len(shape.answers)
