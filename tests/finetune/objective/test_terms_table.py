"""The page on terms has every term as the models have it."""

from __future__ import annotations

import re

import pytest
import yaml

from tapereel.finetune import Recipe
from tapereel.finetune.objective import PPO, Weigh, read
from tapereel.finetune.recipes import get_recipe

from .terms_table import PAGE, constants, docstrings, page, table, terms

OBJECTIVE = PAGE.parents[1] / "concepts" / "objective.md"


def test_the_lists_in_the_docs_are_what_the_models_say() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text, "run python -m tests.finetune.objective.terms_table"


def test_every_term_is_there_and_every_constant_says_what_it_is() -> None:
    found = terms()
    assert len(found) == 11
    assert set(Recipe.model_fields) - set(found) == {"name", "both_kls"}
    for name, (_, kinds) in found.items():
        for cls in kinds:
            silent = [row[0] for row in constants(cls) if not row[3]]
            assert not silent, f"{name}: {cls.__name__} has no docstring under {silent}"


def test_an_edit_of_the_page_or_a_model_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text("utf-8")
    assert page(text.replace("- `ddof` = `1`", "").replace("`5.0`", "`6.0`")) == text
    monkeypatch.setattr(PPO.model_fields["low"], "default", 0.3)
    assert page(text) != text
    with pytest.raises(ValueError, match="table"):
        page("# A page\n")


def test_texts_below_fields_are_found_in_base_classes_too() -> None:
    assert docstrings(Weigh)["limit"].startswith("Divisor for `constant` and `sum`")
    beside = next(cls for cls in terms()["regulariser"][1] if cls.__name__ == "Demonstrations")
    assert docstrings(beside)["coefficient"] == "Coefficient of the term in the loss."


def test_the_defaults_in_the_lists_are_values_that_a_recipe_takes() -> None:
    """Each default is YAML; read again, it is the default."""
    heading, checked = "", 0
    for line in table().splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if found := re.match(r"- `(\w+)` = `([^`]+)`", line):
            name, value = found[1], yaml.safe_load(found[2])
            value = float(value) if isinstance(value, str) and re.fullmatch(r"[\d.e+-]+", value) else value
            assert getattr(terms()[heading][1][0](), name) == value
            checked += 1
    assert checked > 20


def test_the_example_in_the_docs_is_a_recipe() -> None:
    block = re.search(r"```yaml\n(loop:.*?)```", OBJECTIVE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    loop = yaml.safe_load(block[1])["loop"]
    made = get_recipe(loop["recipe"], loop["changes"])
    assert (made.baseline.eps, made.baseline.ddof, made.baseline.kind) == (1e-4, 0, "std")
    assert (made.surrogate.kind, made.weigh.kind) == ("cispo", "episode")
    assert [one.kind for one in made.regulariser] == ["kl", "entropy"]
    assert read(made.model_dump()) == made
