"""The recipes of a run, written beside its tapes: a reader of the run sees what its updates computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...tapes.errors import TapereelError
from ...tapes.store.disk import REAL, put_file
from ...tapes.store.run_directory import RECIPES
from ..objective.recipe import Recipe, read


class BrokenRecipes(TapereelError, ValueError):
    """A run's file of recipes can't be read."""


def write_recipes(directory: Path, recipes: Mapping[str, Recipe]) -> None:
    """Write `recipes.json`, whole or not at all: the recipe of each phase, with every constant."""
    plain = {phase: recipe.model_dump(mode="json") for phase, recipe in recipes.items()}
    put_file(REAL, directory / RECIPES, json.dumps(plain, indent=1).encode() + b"\n")


def read_recipes(directory: Path) -> dict[str, Recipe]:
    """The recipe of each phase; empty where the run has no such file. BrokenRecipes where it can't be read."""
    path = directory / RECIPES
    if not path.exists():
        return {}
    try:
        return {phase: read(recipe) for phase, recipe in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, AttributeError) as error:
        raise BrokenRecipes(f"{path} holds no recipes: {error}") from error
