"""gspo: group sequence policy optimization: one ratio per answer, the geometric mean of its tokens'.

    s_i = exp(mean_t (lp_t - old_t))
    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071).

1. An episode of several turns is one answer; `surrogate.per = turn` takes one ratio per turn.
"""

from ..words import PPO, Baseline, Weigh
from .recipe import Recipe

recipe = Recipe(
    name="gspo",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=3e-4, high=4e-4, per="episode"),
    weigh=Weigh(kind="episode"),
)
