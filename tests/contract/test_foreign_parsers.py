"""The numbers in docs/how-to/tools.md are what other packages' parsers and templates give."""

from __future__ import annotations

import json

import pytest

from ..agents.rendering.answer_formats import JUDGED
from ..agents.rendering.format_judges import judged
from ..agents.rendering.real_strings import TEMPLATES, counts
from . import trl_env

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.mark.parametrize("judge", ["vllm", "renderers"])
def test_the_page_has_the_numbers_of_the_installed_package(judge: str):
    known, found = json.loads(JUDGED.read_text("utf-8"))[judge], judged(judge)
    assert (found["version"], found["counts"]) == (known["version"], known["counts"])


def test_real_text_in_the_templates_that_trl_publishes_is_never_changed():
    (folder,) = trl_env.FOLDER.glob("lib/python*/site-packages/trl/chat_templates")
    paths = [path for path in folder.glob("*.jinja") if path.stem in TEMPLATES.values()]
    assert len(paths) > 8
    for path in paths:
        found = counts(path.read_text("utf-8"))
        assert {*found} <= {"right", "refused"}, (path.name, found)
        assert found["refused"] <= 0.05 * found.total() or path.stem == "lfm2_2_5", (path.name, found)
