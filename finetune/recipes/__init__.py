"""Recipes by name: frozen values of the eleven terms of the objective, by family.

Each has its equation, source and deviations below it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ...envs.load_named import load_named
from ...tapes.errors import UsageError
from ..objective.recipe import Recipe, read
from .clipped import cispo, cpgd, sapo
from .grpo import dapo, dr_grpo, grpo, gspo
from .imitation import distill, minor_sft, rft, sft
from .ppo import decoupled_ppo, ppo
from .reinforce import reinforce, reinforce_plain, reinforce_pp, reinforce_pp_baseline, rloo

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        sft,
        grpo,
        reinforce,
        reinforce_plain,
        rloo,
        reinforce_pp,
        reinforce_pp_baseline,
        ppo,
        cpgd,
        dr_grpo,
        dapo,
        gspo,
        cispo,
        sapo,
        decoupled_ppo,
        rft,
        minor_sft,
        distill,
    )
}
"""Every named recipe."""


def get_recipe(name: str, changes: Mapping[str, object] | None = None) -> Recipe:
    """The recipe of that name, with `changes` to the constants of its terms.

    `package.module:name` and `file.py:name` name a recipe of the user's own, which is imported. UsageError for an
    unknown name and for an object that is no recipe.
    """
    recipe = _own_recipe(name) if ":" in name else RECIPES.get(name)
    if recipe is None:
        near = difflib.get_close_matches(name, RECIPES, n=2)
        known = dict.fromkeys([*near, *sorted(RECIPES)])
        raise UsageError(
            f"there is no recipe {name!r}: take one of {', '.join(known)}, or name your own as module:name or "
            "file.py:name"
        )
    return recipe.but(changes) if changes else recipe


def _own_recipe(name: str) -> Recipe:
    try:
        found = load_named(name)
    except UsageError as error:
        raise UsageError(f"recipe {name!r} can't be loaded: {error}") from error
    if not isinstance(found, Recipe):
        raise UsageError(
            f"recipe {name!r} is {found!r:.80}, which is no Recipe: assign a Recipe to that name, as in "
            "`mine = get_recipe('grpo').but(...)`"
        )
    return found


__all__ = ["RECIPES", "Recipe", "get_recipe", "read"]
