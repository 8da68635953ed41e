"""cpgd: clipped policy gradient with a drift penalty: the log-prob itself is bounded, no ratio is in the gradient.

    A_i = (r_i - m) / (s + 1e-6)                             m and s over the batch, n in the variance
    l_t = -A_i min(lp_t, old_t + log 1.2) where A_i > 0,  -A_i max(lp_t, old_t + log 0.8) where A_i < 0
    loss = 1/T sum_t [ l_t + 0.1 k3_t ],  k3 to the sampler

Source: Liu et al. 2025, "CPGD" (arXiv 2505.12504); LightRFT's estimator of that name.

1. The advantage is of the episode's reward; there it is taken over a scalar and comes out as 0 for everyone.
2. The drift's coefficient is 0.1: small in effect while the policy is near the sampler.
"""

from ..words import CPG, KL, Baseline
from .recipe import Recipe

recipe = Recipe(
    name="cpgd",
    baseline=Baseline(kind="std", by="batch", ddof=0, eps=1e-6),
    surrogate=CPG(low=0.2, high=0.2),
    regulariser=(KL(to="sampler", estimator="k3", beta=0.1),),
)
