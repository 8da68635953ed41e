"""Runs whose weights several processes share, saved by some number of them and continued by another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune.trainer import Ranks
from tapereel.finetune.trainer.checkpoint import read_checkpoint

from .parts import CUT, trained
from .test_ranks import check_digests, same

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]


def ranks(size: int, folder: Path, *resumed: Path) -> list[dict[str, Any]]:
    """What came of `size` processes, by rank."""
    folder.mkdir()
    command = [sys.executable, "-m", "tapereel.tests.finetune.trainer.parts"]
    running = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), *map(str, resumed)], stderr=subprocess.PIPE)
        for rank in range(size)
    ]
    for one in running:
        _, errors = one.communicate(timeout=400)
        assert one.returncode == 0, errors.decode()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


def test_any_number_of_processes_trains_saves_and_continues_what_one_does(tmp_path: Path) -> None:
    """20 updates in float64 with a critic, a moving reference and an average, by 1, 2 and 4 processes. Other numbers
    continue from the checkpoint in the middle."""
    alone = trained(Ranks(), tmp_path / "one", save=True)
    made = {1: tmp_path / "one" / f"update-{CUT:06d}"}
    for size in (2, 4):
        found = ranks(size, tmp_path / str(size))
        made[size] = tmp_path / str(size) / f"update-{CUT:06d}"
        assert all(one["held"] < 1 / size + 0.1 for one in found)
        for one in found:
            same(one["weights"], alone["weights"], f"{size}")
            assert one["digest"] == weights_digest(one["weights"])
            check_digests(one["digests"])
        assert found[0]["compared"] == alone["compared"]
    equal, changed = alone["compared"]
    assert equal == (True, [])
    assert not changed[0]
    assert {"steps", "critic.steps"} <= set(changed[1])
    assert {"averaged", "critic", "optimizer", "others"} <= {place.partition(".")[0] for place in changed[1]}
    one, four = (read_checkpoint(made[size]) for size in (1, 4))
    same(four.weights(), one.weights(), "weights of four, read by one")
    same(four.trainer_state(), one.trainer_state(), "state of four, read by one")
    files = {path.name for path in made[4].rglob("*") if path.suffix == ".pt"}
    assert files == {"trainer.pt"}  # without a tensor
    same(trained(Ranks(), tmp_path / "again", made[4])["weights"], alone["weights"], "4 then 1")
    for before, size in ((4, 2), (4, 3), (1, 2)):
        for found in ranks(size, tmp_path / f"{before} to {size}", made[before]):
            same(found["weights"], alone["weights"], f"{before} then {size}")
            assert found["digest"] == weights_digest(found["weights"])
            check_digests(found["digests"])
