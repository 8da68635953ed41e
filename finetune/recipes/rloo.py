"""rloo: REINFORCE with the mean of the other attempts as the baseline.

    A_i = r_i - mean_{j != i} r_j
    loss = -1/T sum_t lp_t A_i

Source: Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740).

1. Token mean over the batch; the paper takes the sum over an answer's tokens (`weigh = constant`, limit 1).
2. A group of one gives 0.
"""

from ..words import Baseline, Reinforce
from .recipe import Recipe

recipe = Recipe(name="rloo", baseline=Baseline(kind="loo"), surrogate=Reinforce())
