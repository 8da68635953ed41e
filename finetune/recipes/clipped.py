"""Recipes that bound a token's gradient in other ways than PPO's clip: CISPO, SAPO, CPGD."""

from ..objective import CISPO, CPG, KL, SAPO, GroupBaseline, Weigh
from ..objective.recipe import Recipe

cispo = Recipe(
    name="cispo",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=CISPO(cap=5.0),
)
"""cispo: clipped importance weights multiply the score function, so that no token loses its gradient.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t sg(min(r_t, 5)) A_i lp_t

Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585).

1. The weight carries no gradient. If the gradient went through the clip, clipped tokens would have no gradient.
2. The weight has no lower bound, as in the paper's experiments.
"""

sapo = Recipe(
    name="sapo",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=SAPO(tau=1.0, tau_negative=1.05),
    weigh=Weigh(kind="episode"),
)
"""sapo: soft adaptive policy optimization, which has a smooth gate where ppo has a clip.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i 1/T_i sum_t (4 / tau) sigmoid(tau (r_t - 1)) A_i       tau 1 where A_i > 0, 1.05 where A_i < 0

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv 2511.20347), as in TRL.
"""

cpgd = Recipe(
    name="cpgd",
    baseline=GroupBaseline(kind="std", by="batch", ddof=0, eps=1e-6),
    surrogate=CPG(low=0.2, high=0.2),
    regulariser=(KL(to="sampler", estimator="k3", beta=0.1),),
)
"""cpgd: clipped policy gradient with a drift penalty. The log-prob itself is bounded, and the gradient has no ratio.

    A_i = (r_i - m) / (s + 1e-6)                             m and s over the batch, n in the variance
    l_t = -A_i min(lp_t, old_t + log 1.2) where A_i > 0,  -A_i max(lp_t, old_t + log 0.8) where A_i < 0
    loss = 1/T sum_t [ l_t + 0.1 k3_t ],  k3 to the sampler

Source: Liu et al. 2025, "CPGD" (arXiv 2505.12504); the estimator of that name in LightRFT.

1. The advantage is computed from the rewards of the batch's episodes. LightRFT computes it from a single number, so its
   advantage is always 0.
2. The drift penalty has the coefficient 0.1. It has little effect while the policy is near the sampler.
"""
