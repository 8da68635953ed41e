"""The typed model of `Use.info` reads what the loop writes, and writes back the same JSON."""

from __future__ import annotations

import json

import pytest

from tapereel.finetune.loop import UpdateInfo
from tapereel.tapes import NotATape
from tapereel.tapes.records import Use

INFO = {
    "phase": "rl",
    "tapes": ["a", "b"],
    "oldest": 3,
    "rewards": [1.0, None],
    "aside": ["c"],
    "epochs": 2,
    "stale": [["a", "a/0", 0, 4]],
    "filtered": [],
    "lr": 0.5,
    "skipped": None,
    "loss": -0.25,
    "grad_norm": 1e-07,
    "pins": {"a": ["d1", "d2"]},
    "on": {"recipe": "r", "torch": "2", "threads": 1, "device": "cpu", "chip": "x", "ranks": 1},
    "mismatch": 0.001,
    "by": "another trainer",
}


def test_what_is_read_is_written_back_byte_for_byte() -> None:
    info = UpdateInfo.of(Use(lineage="run", update=0, items=(), info=INFO))
    assert (info.stale, info.pins, info.minibatches) == ((("a", "a/0", 0, 4),), {"a": ("d1", "d2")}, 1)
    assert info.on is not None
    assert info.on.threads == 1
    assert json.dumps(info.model_dump(mode="json", exclude_unset=True)) == json.dumps(INFO)


def test_a_wrong_type_is_refused_with_its_place() -> None:
    use = Use(lineage="run", update=4, items=(), info={**INFO, "stale": [["a", 1]]})
    with pytest.raises(NotATape, match=r"\b4\b.*'run'.*info\.stale\.0"):
        UpdateInfo.of(use)
