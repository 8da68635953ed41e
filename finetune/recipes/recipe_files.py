"""The recipes of a run, written beside its tapes: a reader of the run sees what its updates computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...tapes.errors import TapereelError, UsageError
from ...tapes.store.disk import REAL, put_file, read_file
from ...tapes.store.run_directory import RECIPES
from ..objective.recipe import Recipe, read


class BrokenRecipes(TapereelError, ValueError):
    """A run's file of recipes can't be read."""


def write_recipes(directory: Path, recipes: Mapping[str, Recipe]) -> None:
    """Write `recipes.json`, whole or not at all: the recipe of each phase, with every constant."""
    plain = {phase: recipe.model_dump(mode="json") for phase, recipe in recipes.items()}
    put_file(REAL, directory / RECIPES, json.dumps(plain, indent=1).encode() + b"\n")


def read_recipes(directory: Path) -> dict[str, Recipe | UsageError]:
    """The recipe of each phase, or why it can't be used here; empty where the run has no such file.

    The file executes nothing: a term of the user's own is found only if its module was imported. BrokenRecipes where
    the file holds no recipes.
    """
    path = directory / RECIPES
    if not path.exists():
        return {}
    try:
        recorded = json.loads(read_file(path)).items()
    except (ValueError, AttributeError) as error:
        raise BrokenRecipes(f"{path} holds no recipes: {error}") from error
    found: dict[str, Recipe | UsageError] = {}
    for phase, recipe in recorded:
        try:
            found[phase] = read(recipe, execute=False)
        except UsageError as error:
            found[phase] = error
    return found
