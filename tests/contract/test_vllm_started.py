"""A vLLM that the run starts and stops, in the environment that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tapereel.tapes import Status
from tapereel.tapes.store import Store, verify

from ..finetune.loop.versions import assert_versions_true
from .lab import run_in_vllm

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.mark.parametrize("weights", ["reload", "transfer"])
def test_train_samples_from_a_server_that_it_starts_and_stops(folder: Path, tmp_path: Path, weights: str) -> None:
    run = tmp_path / "run"
    printed = run_in_vllm(
        Path(__file__).with_name("started_train.py"), str(folder), str(run), str(tmp_path / "weights"), weights
    )
    found = json.loads(printed.splitlines()[-1])
    for summary in (found["trained"], found["resumed"]):
        assert (summary["updates"], summary["books_close"]) == (3, True)
        assert summary["held_out"]["after"] is not None
    assert found["resumed"]["episodes"] == found["trained"]["episodes"], "a resume of what is done adds nothing"
    assert found["verify"] == 0
    assert verify(run).exit_code == 0
    with Store.open(run) as store:
        published = [stored.record for stored in store.run_records("publish")]
        tapes = list(store.tapes(split="train"))
    lineage = found["trained"]["lineage"]
    assert [record.version for record in published] == [f"{lineage}:{k}" for k in range(4)]
    assert {tape.status for tape in tapes} <= {Status.FINISHED, Status.CANCELLED}
    assert_versions_true(run, tmp_path / "fresh", folder, lineage, 3)
    assert len({version for tape in tapes for call in tape.calls for version, _, _ in call.spans}) > 1
