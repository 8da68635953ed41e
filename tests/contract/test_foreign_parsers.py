"""The numbers of other packages' parsers in docs/how-to/tools.md are what the installed packages give."""

from __future__ import annotations

import json

import pytest

from ..agents.rendering.answer_formats import JUDGED
from ..agents.rendering.format_judges import judged

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.mark.parametrize("judge", ["vllm", "renderers"])
def test_the_page_has_the_numbers_of_the_installed_package(judge: str):
    known, found = json.loads(JUDGED.read_text("utf-8"))[judge], judged(judge)
    assert (found["version"], found["counts"]) == (known["version"], known["counts"])
