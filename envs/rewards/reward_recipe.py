"""Ensembles: which parts count how much depends on the label of the task.

    final = sum_k weight[label][k] * score_k        recipe[label] = {part: weight}

Only the parts that the label's recipe names with a weight other than 0 are asked; the others are absent from the tape,
which is not 0. A label without a recipe, and a part that has nothing to say, leave the tape unscored, with an error
that names it. Each part is a component of its own, with its weight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from ...tapes import Tape, TapereelError
from .samples import label_of
from .sources import RewardSource, Scored, Scorer, asked


class NoRecipe(TapereelError, LookupError):
    """A task's label has no recipe, or a part of it gave no score."""


def ensemble(
    parts: Mapping[str, RewardSource[Any] | Scorer[Tape]],
    recipe: Mapping[str, Mapping[str, float]],
    *,
    label: Callable[[Tape], str | None] = label_of,
    name: str = "ensemble",
    weight: float = 1.0,
    timeout: float | None = 600.0,
) -> RewardSource[Tape]:
    """A source that weighs `parts` as `recipe[label]` says. ValueError where a recipe names a part that isn't there."""
    for kind, weights in recipe.items():
        strange = [part for part in weights if part not in parts]
        if strange:
            raise ValueError(f"the recipe of {kind!r} names {strange[0]!r}; there are {', '.join(parts) or 'no parts'}")
    sources = {
        key: part if isinstance(part, RewardSource) else RewardSource(score=part, name=key)
        for key, part in parts.items()
    }

    async def score(tape: Tape) -> Scored:
        kind = label(tape)
        if kind is None or kind not in recipe:
            raise NoRecipe(f"the task has the label {kind!r}, and there are recipes for {', '.join(map(repr, recipe))}")
        needed = {key: w for key, w in recipe[kind].items() if w != 0}
        given = await asyncio.gather(*(_score(sources[key], tape) for key in needed))
        silent = [key for key, (value, _) in zip(needed, given, strict=True) if value is None]
        if silent:
            raise NoRecipe(f"part {silent[0]!r}, which the recipe of {kind!r} needs, has nothing to say")
        values = {key: value for key, (value, _) in zip(needed, given, strict=True) if value is not None}
        told: dict[str, JsonValue] = {"label": kind}
        told |= {key: evidence for key, (_, evidence) in zip(needed, given, strict=True) if evidence is not None}
        return Scored(values, evidence=told, weights=needed)

    pure = all(source.pure for source in sources.values())
    return RewardSource(score=score, name=name, weight=weight, pure=pure, timeout=timeout)


async def _score(source: RewardSource[Any], tape: Tape) -> tuple[float | None, JsonValue]:
    given = await asked(source, tape)
    told = given if isinstance(given, Scored) else Scored(given)
    if told.score is not None and (isinstance(told.score, bool) or not isinstance(told.score, int | float)):
        raise TypeError(f"part {source.name!r} gave {told.score!r:.80}; a part of an ensemble gives one number")
    return told.score, told.evidence
