"""Which metrics become curves."""

from __future__ import annotations

import json
from pathlib import Path

from tapereel.tapes.view.curves import agent_curves


def test_an_agent_has_a_curve_whatever_it_is_called_and_a_statistic_has_none(tmp_path: Path) -> None:
    names = ("reward", "reward/max", "reward/median", "reward/missing/x", "reward/agent/max", "reward/agent/pair/kl")
    lines = [{"phase": "rl", "update": k, **dict.fromkeys(names, float(k))} for k in range(3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = agent_curves(path)
    assert [curve.name for curve in found] == ["max", "pair/kl"]
    assert all(list(curve.y) == [0.0, 1.0, 2.0] for curve in found)
