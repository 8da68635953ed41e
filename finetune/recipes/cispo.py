"""cispo: clipped importance weights in front of the score function, so that no token loses its gradient.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t sg(min(r_t, 5)) A_i lp_t

Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585).

1. The weight carries no gradient. (Taking the gradient through the clip would give clipped tokens none.)
2. No lower bound, as in the paper's experiments.
"""

from ..words import CISPO, Baseline
from .recipe import Recipe

recipe = Recipe(
    name="cispo",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=CISPO(cap=5.0),
)
