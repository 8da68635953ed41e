"""The package's named recipes, such as `grpo` and `ppo`, and the file in which a run records its recipes.

A recipe sets the eleven terms of the objective, which together define the loss.

Each module has one family of recipes. The text below a recipe gives its equation, its source and the deviations from
this source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from ...envs.load_named import load_named
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import TapereelError, UsageError
from ...tapes.store import run_directory
from ...tapes.store.disk import REAL, put_file, read_file
from ..objective.recipe import Recipe, read
from . import clipped, grpo, imitation, ppo, reinforce

RECIPES: dict[str, Recipe] = {
    value.name: value
    for family in (imitation, grpo, reinforce, ppo, clipped)
    for value in vars(family).values()
    if isinstance(value, Recipe)
}
"""Every named recipe."""


@check_arguments
def get_recipe(
    name: str, changes: Mapping[str, object] | None = None, *, run: Path | None = None, longest: int | None = None
) -> Recipe:
    """Return the recipe called `name`, with `changes` to its terms (see `Recipe.but`).

    `longest` is the largest number of tokens that the policy can sample in an episode. The length limits of a recipe of
    the package follow it, unless `changes` sets their term. Without it, they have the values of their papers.

    `run` is the directory of a run. If this run has recorded its recipe, and `name` is a recipe of the package, the
    recorded recipe is returned instead. So a resumed run keeps its constants, even if this version of the package has
    others.

    A name such as `package.module:name` or `file.py:name` stands for a user's own recipe, which is imported. Raises
    UsageError if the name is unknown or the object isn't a recipe.
    """
    recipe = _own_recipe(name) if ":" in name else RECIPES.get(name)
    if recipe is None:
        near = difflib.get_close_matches(name, RECIPES, n=2)
        known = dict.fromkeys([*near, *sorted(RECIPES)])
        raise UsageError(
            f"there is no recipe {name!r}: take one of {', '.join(known)}, or name your own as module:name or "
            "file.py:name"
        )
    recipe = recipe.but(changes) if changes else recipe
    if longest and ":" not in name:
        recipe = recipe.fitted(longest, keep=changes or ())
    recorded = read_recipes(run).get("rl") if run is not None and ":" not in name else None
    return recorded if isinstance(recorded, Recipe) else recipe


def _own_recipe(name: str) -> Recipe:
    try:
        found = load_named(name)
    except UsageError as error:
        raise UsageError(f"recipe {name!r} can't be loaded: {error}") from error
    if not isinstance(found, Recipe):
        raise UsageError(
            f"recipe {name!r} is {found!r:.80}, which isn't a Recipe: assign a Recipe to that name, as in "
            "`mine = get_recipe('grpo').but(...)`"
        )
    return found


BEFORE = (("credit", "bootstrap", False), ("select", "keep_when", "after_baseline"))
"""(term, constant, value) for constants that were added later. A recipe that was recorded without the constant is read
with this value."""


class BrokenRecipes(TapereelError, ValueError):
    """Raised if a run's file of recipes can't be read."""


def write_recipes(directory: Path, recipes: Mapping[str, Recipe]) -> None:
    """Write `recipes.json`, which holds the recipe of each phase with every constant. The write is atomic."""
    plain = {phase: recipe.model_dump(mode="json") for phase, recipe in recipes.items()}
    put_file(REAL, directory / run_directory.RECIPES, json.dumps(plain, indent=1).encode() + b"\n")


def read_recipes(directory: Path) -> dict[str, Recipe | UsageError]:
    """Return each phase's recipe, or the reason why it can't be used here. Without a file, the result is empty.

    Reading the file imports no module. A recipe with a user's term can be used only if the module of this term was
    already imported. Raises BrokenRecipes if the file holds no recipes.
    """
    path = directory / run_directory.RECIPES
    if not path.exists():
        return {}
    try:
        recorded = json.loads(read_file(path)).items()
    except (ValueError, AttributeError) as error:
        raise BrokenRecipes(f"{path} holds no recipes: {error}") from error
    found: dict[str, Recipe | UsageError] = {}
    for phase, recipe in recorded:
        for term, constant, value in BEFORE:
            if isinstance(recipe, dict) and isinstance(recipe.get(term), dict):
                recipe[term].setdefault(constant, value)
        try:
            found[phase] = read(recipe, execute=False)
        except UsageError as error:
            found[phase] = error
    return found


__all__ = ["RECIPES", "BrokenRecipes", "Recipe", "get_recipe", "read", "read_recipes", "write_recipes"]
