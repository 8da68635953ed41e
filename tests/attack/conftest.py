"""Every test of this folder is of the part `attack`, unless it carries the mark of another part."""

from __future__ import annotations

from pathlib import Path

import pytest

PARTS = {"contract", "kill"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not PARTS & {mark.name for mark in item.iter_markers()}:
            item.add_marker("attack")
