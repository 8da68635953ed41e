"""The numbers of vLLM's parsers in docs/tools.md are what the installed vLLM gives."""

from __future__ import annotations

import json

import pytest

from ..agents.rendering.answer_formats import JUDGED
from ..agents.rendering.format_judges import judged
from .vllm_cpu import PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


def test_the_page_has_the_numbers_of_the_installed_vllm():
    known, found = json.loads(JUDGED.read_text("utf-8")), judged(str(PYTHON))
    assert (found["vllm"], found["counts"]) == (known["vllm"], known["counts"])
