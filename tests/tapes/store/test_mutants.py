"""Every store that was broken on purpose is found, by the check that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from .crash import steady
from .killers import KILLERS
from .mutants import MUTANTS, Mutant, broken_store


@pytest.mark.kill
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_dies(mutant: Mutant, tmp_path: Path) -> None:
    killed_by = None
    with steady(), broken_store(mutant, tmp_path) as lab:
        for killer in KILLERS:
            try:
                killer(lab)
            except Exception:
                killed_by = killer.__name__
                break
    assert killed_by is not None, f"{mutant.name!r} survives: nothing notices a store that is broken so"
    assert killed_by == mutant.killed_by
