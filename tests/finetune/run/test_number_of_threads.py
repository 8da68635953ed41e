"""The number of torch threads: what the user set stays, and a run with several is reproduced bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tapereel as tr
from tapereel.finetune.loop import UpdateInfo
from tapereel.tapes.store import Store

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.py"
SETTINGS: dict[str, Any] = {
    "loop.updates": 2,
    "loop.groups": 4,
    "loop.group_size": 8,
    "loop.sampling.max_tokens": 1,
    "loop.optimiser.lr": 1e-2,
    "evaluation.fraction": 0,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [2, None])
def test_a_run_on_two_threads_is_reproduced_bit_for_bit(tmp_path: Path, threads: int | None):
    model = tr.save_tiny_model(tmp_path / "model", "0123456789", size="base", context=32)
    torch.set_num_threads(2 if threads is None else 1)
    scene = (f"{DIGITS}:player", f"{DIGITS}:Digits", f"{DIGITS}:tasks")
    run = tr.train(*scene, model, out=tmp_path / "run", settings={**SETTINGS, "trainer.threads": threads})
    assert torch.get_num_threads() == (2 if threads is None else 1), "as before"
    with Store.open(run.path) as store:
        infos = [UpdateInfo.of(use) for use in store.ledger(run.summary.lineage).uses]
    assert {info.on.threads for info in infos if info.on is not None} == {2}
    torch.set_num_threads(1)
    assert run.reproduce().verdict == "holds"
