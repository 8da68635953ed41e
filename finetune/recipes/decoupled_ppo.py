"""decoupled_ppo: the ratio against the weights that met the batch, and a capped weight for what the sampler differed.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t min(exp(prox_t - old_t), 2) min(r_t A_i, clip(r_t, 0.8, 1.2) A_i),  r_t = exp(lp_t - prox_t)

Source: Hilton et al. 2022 (arXiv 2110.00641); Fu et al. 2025, "AReaL" (arXiv 2505.24298).

1. With one update per rollout batch prox is lp itself without gradient, and costs no forward pass.
"""

from ..words import PPO, Anchor, Baseline
from .recipe import Recipe

recipe = Recipe(
    name="decoupled_ppo",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    anchor=Anchor(to="recomputed", weight="truncate", high=2.0),
    surrogate=PPO(low=0.2, high=0.2),
)
