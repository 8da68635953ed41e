"""reinforce: the score function with advantages normalised within the group.

    A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-4
    loss = -1/T sum_t [ lp_t A_i - beta k3_t ]

Source: TapeAgents 0.1.16, finetune.rl with `algo: reinforce`.

1. Group statistics are over episodes; there they are over training texts, so that a tape with more model calls weighs
   more in its group's mean.
2. A group whose rewards are all equal gives exactly 0; there, up to 1e-3 from rounding.
3. beta is 0: no reference model is needed. Its KL, where set, is k3.
"""

from ..words import KL, Baseline, Reinforce
from .recipe import Recipe

recipe = Recipe(
    name="reinforce",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-4),
    surrogate=Reinforce(),
    regulariser=(KL(estimator="k3", beta=0.0),),
)
