"""Ranks that forward rows together, each a part of their tokens, step as one process does."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from .sequence_ranks import CASES
from .test_ranks import KINDS, check_together

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]


def launched(world: int, folder: Path) -> list[dict[str, Any]]:
    """What came of the cases, by rank."""
    command = [sys.executable, "-m", "tapereel.tests.finetune.trainer.sequence_ranks"]
    running = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    ended = [(one.communicate(timeout=500)[1], one.returncode) for one in running]
    assert not any(code for _, code in ended), [said[-2000:] for said, _ in ended]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.ledger("F90")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_parts_of_each_row_have_the_gradient_of_one_process(tmp_path: Path, world: int):
    """Packed and padded rows, experts, pictures, critics, windows; float64 to 1e-12 and float32 to 1e-5."""
    ranks = launched(world, tmp_path)
    for kind, case in product(KINDS, CASES):
        for degree in case.degrees if world == 4 else (2,):
            check_together(ranks, kind, degree, case)
