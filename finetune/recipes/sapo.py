"""sapo: soft adaptive policy optimization: a smooth gate where ppo has a clip.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i 1/T_i sum_t (4 / tau) sigmoid(tau (r_t - 1)) A_i       tau 1 where A_i > 0, 1.05 where A_i < 0

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv 2511.20347), as in TRL.
"""

from ..words import SAPO, Baseline, Weigh
from .recipe import Recipe

recipe = Recipe(
    name="sapo",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=SAPO(tau=1.0, tau_negative=1.05),
    weigh=Weigh(kind="episode"),
)
