"""Ensembles: rewards whose weights depend on the label of the task.

    final = sum_k weight[label][k] * score_k        recipe[label] = {part: weight}

Only parts with a weight other than 0 in the label's recipe are scored; the others are absent from the tape, which is
not 0. A label without a recipe, or a part without a score, leaves the tape unscored, with an error that names it. Each
part is a separate component with its weight.
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
    """The label of a task has no recipe, or a part of its recipe has no score."""


def ensemble(
    parts: Mapping[str, RewardSource[Any] | Scorer[Tape]],
    recipe: Mapping[str, Mapping[str, float]],
    *,
    label: Callable[[Tape], str | None] = label_of,
    name: str = "ensemble",
    weight: float = 1.0,
    timeout: float | None = 600.0,
) -> RewardSource[Tape]:
    """A source that weights `parts` by `recipe[label]`. ValueError if a recipe names an unknown part."""
    for kind, weights in recipe.items():
        strange = [part for part in weights if part not in parts]
        if strange:
            raise ValueError(
                f"the recipe of {kind!r} names {strange[0]!r}, which is not a part; there are "
                f"{', '.join(parts) or 'no parts'}"
            )
    sources = {
        key: part if isinstance(part, RewardSource) else RewardSource(score=part, name=key)
        for key, part in parts.items()
    }

    async def score(tape: Tape) -> Scored:
        kind = label(tape)
        if kind is None or kind not in recipe:
            raise NoRecipe(
                f"the task has the label {kind!r}, which has no recipe; there are {', '.join(map(repr, recipe))}"
            )
        needed = {key: w for key, w in recipe[kind].items() if w != 0}
        scores = await asyncio.gather(*(_score(sources[key], tape) for key in needed))
        unscored = [key for key, (value, _) in zip(needed, scores, strict=True) if value is None]
        if unscored:
            raise NoRecipe(f"part {unscored[0]!r}, which the recipe of {kind!r} needs, returned no score")
        values = {key: value for key, (value, _) in zip(needed, scores, strict=True) if value is not None}
        reasons: dict[str, JsonValue] = {"label": kind}
        reasons |= {key: evidence for key, (_, evidence) in zip(needed, scores, strict=True) if evidence is not None}
        return Scored(values, evidence=reasons, weights=needed)

    pure = all(source.pure for source in sources.values())
    return RewardSource(score=score, name=name, weight=weight, pure=pure, timeout=timeout)


async def _score(source: RewardSource[Any], tape: Tape) -> tuple[float | None, JsonValue]:
    result = await asked(source, tape)
    scored = result if isinstance(result, Scored) else Scored(result)
    if scored.score is not None and (isinstance(scored.score, bool) or not isinstance(scored.score, int | float)):
        raise TypeError(
            f"part {source.name!r} returned {scored.score!r:.80}; a part of an ensemble must return one number"
        )
    return scored.score, scored.evidence
