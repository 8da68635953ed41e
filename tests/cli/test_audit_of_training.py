"""The audit of a run that was really trained: its books close, and the trainer's own numbers are in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tapereel.tapes.store import Store

from .lab import answer_of, tapes_of


def test_a_trained_run_is_audited(trained: Path, capsys: pytest.CaptureFixture[str]):
    told = answer_of(capsys, "audit", str(trained))
    audit, tapes = told["audit"], tapes_of(trained)
    assert told["closes"] is True
    assert audit["tapes"] == sum(end["episodes"] for end in audit["ends"]) == len(tapes)
    assert sum(one["total"] for one in audit["components"]) == pytest.approx(sum(tape.reward or 0.0 for tape in tapes))
    calls = [call for tape in tapes for call in tape.calls]
    assert sum(one["calls"] for one in audit["spent"]) == len(calls)
    assert sum(one["completion"] for one in audit["spent"]) == sum(len(call.completion or ()) for call in calls)
    versions = {version for call in calls for version, _, _ in call.spans}
    assert len(versions) > 1
    assert {one["version"] for one in audit["spent"]} == versions


def test_an_update_records_how_far_trainer_and_sampler_differ(trained: Path):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {line["update"] - 1: line["mismatch"] for line in lines if line.get("mismatch") is not None}
    with Store.open(trained) as store:
        uses = [stored.record for stored in store.run_records("use")]
    assert {use.update: use.info["mismatch"] for use in uses if "mismatch" in use.info} == measured != {}
    moved = {line["update"] - 1: line["moved/max"] for line in lines if "moved/max" in line}
    assert {use.update: use.info["moved"] for use in uses if "moved" in use.info} == moved
    assert max(measured.values()) < 1e-4 < max(moved.values()), "what updates changed is no mismatch"
