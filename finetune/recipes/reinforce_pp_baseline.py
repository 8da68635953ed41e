"""reinforce_pp_baseline: REINFORCE++ with the group's mean subtracted before the batch is whitened.

    A_i = (r_i - mean_group - m) / sqrt(max(var, 1e-8))      m and var over all tokens of the batch
    loss = -1/T sum_t [ min(r A_i, clip(r, 0.8, 1.2) A_i) - beta k2_t ]

Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262), the variant for several answers per prompt.

1. gamma is 1, as there: the advantage of an answer is that of each of its tokens.
2. beta is 0: no reference model is needed. Its KL, where set, is k2, whose gradient is that of KL(pi || ref).
"""

from ..words import KL, PPO, Baseline, Whiten
from .recipe import Recipe

recipe = Recipe(
    name="reinforce_pp_baseline",
    baseline=Baseline(kind="mean"),
    adjust=(Whiten(ddof=0, eps=1e-8, how="floor"),),
    surrogate=PPO(low=0.2, high=0.2),
    regulariser=(KL(estimator="k2", beta=0.0),),
)
