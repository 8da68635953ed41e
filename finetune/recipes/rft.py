"""rft: rejection fine-tuning: cross-entropy on the episodes that earned enough.

    loss = -1/T sum_t lp_t        over the own tokens of episodes with reward >= 1

Source: Yuan et al. 2023 (arXiv 2308.01825).

1. `select.bounds` is what counts as enough; an unscored episode never does.
"""

from ..words import NLL, Baseline, Score, Select
from .recipe import Recipe

recipe = Recipe(
    name="rft",
    score=Score(temperature="one"),
    baseline=Baseline(kind="none"),
    surrogate=NLL(),
    select=Select(bounds=(1.0, None)),
)
