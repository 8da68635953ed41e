"""Every store that was broken on purpose is found out, and the docs say by what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .crash import steady
from .killers import KILLERS
from .mutants import MUTANTS, Mutant, broken_store

DOCS = Path(__file__).parents[3] / "docs" / "concepts" / "store.md"


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
    assert documented().get(mutant.name) == killed_by


def test_the_docs_list_every_mutant() -> None:
    assert set(documented()) == {mutant.name for mutant in MUTANTS}


def documented() -> dict[str, str]:
    """mutant -> what kills it, from the table in the docs."""
    text = DOCS.read_text()
    table = text[text.index("## Seeded mutants") :]
    return dict(re.findall(r"^\| ([^|`]+?) \| `(\w+)` \|", table, re.MULTILINE))
