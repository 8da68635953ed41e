"""Words of a private dialect that stay out of code and of the pages that have been rewritten."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import ROOT, files, text

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/project/architecture.md",
    "docs/reference/api.md",
    "docs/how-to/write_an_engine.md",
    "docs/how-to/write_a_recipe.md",
)
"""Pages that keep to the rules; the other pages of docs/ follow."""
BANNED = (
    r"whoever",
    r"somebody",
    r"nobody",
    r"told",
    r"taken up(?! to)",
    r"gone on (?:with|from)",
    r"lies beside",
    r"(?-i:(?<!there )is none)",
    r"of its own doing",
    r"crew",
    r"the door",
    r"books close",
)
BAD = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)


def _lines(name: str) -> Iterator[str]:
    for number, line in enumerate(text(name).splitlines(), start=1):
        found = BAD.search(line)
        if found:
            yield f"{name}:{number}: {found[0]!r}"


LEFT: dict[str, int] = {}
"""Room -> lines that still hold a banned word. A number may only shrink; a room without an entry has none."""


def test_no_room_has_more_banned_words_than_it_had():
    found: Counter[str] = Counter()
    for name in files():
        found[name.rpartition("/")[0]] += len(list(_lines(name)))
    more = {room: lines for room, lines in found.items() if lines > LEFT.get(room, 0)}
    assert more == {}, "write plain English: see CONTRIBUTING.md"
    fewer = {room: found[room] for room, lines in LEFT.items() if found[room] < lines}
    assert fewer == {}, "lower the numbers in LEFT"


@pytest.mark.parametrize("name", PAGES)
def test_no_page_uses_a_banned_word(name: str):
    if not (ROOT / name).exists():
        pytest.fail(f"{name} is not there")
    assert list(_lines(name)) == []


def test_a_banned_word_is_found(tmp_path: Path):
    assert BAD.search("Nobody was told.")
    assert not BAD.search("A number is nonetheless fine; toldo is no word.")
