"""grpo: group relative policy optimization.

    A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-9
    loss = -1/T sum_t [ min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i) - beta k3_t ],  r_t = exp(lp_t - old_t)

Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), eq. 3 and 4.

1. Token mean over the whole batch; the paper takes the mean over tokens of an answer, then over answers
   (`weigh.kind = episode`), which lets a token of a short answer weigh more.
2. A group whose rewards are all equal gives exactly 0 and stays counted in T.
3. beta is 0: no reference model is needed.
"""

from ..words import KL, PPO, Baseline
from .recipe import Recipe

recipe = Recipe(
    name="grpo",
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=0.2, high=0.2),
    regulariser=(KL(estimator="k3", beta=0.0),),
)
