"""dr_grpo: GRPO done right, without the two normalisations that bias it: no deviation, no length.

    A_i = r_i - mean_group
    loss = -1/(E limit) sum_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)        limit 512

Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783).

1. `weigh.limit` is the length limit of a completion: set it to yours (it scales the gradient, nothing else).
"""

from ..words import PPO, Baseline, Weigh
from .recipe import Recipe

recipe = Recipe(
    name="dr_grpo",
    baseline=Baseline(kind="mean"),
    surrogate=PPO(low=0.2, high=0.2),
    weigh=Weigh(kind="constant", limit=512.0),
)
