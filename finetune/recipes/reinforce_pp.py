"""reinforce_pp: REINFORCE++, a clipped ratio over returns whitened across the whole batch.

    r_t = -beta k1_t, plus the episode's reward at its last own token
    A_t = (R_t - m) / sqrt(max(var, 1e-8)),  R_t = r_t + gamma R_{t+1},  m and var over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)

Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262).

1. beta is 0: no reference model is needed. Set `shape` to `[{"kind": "token_kl", "beta": ...}]` for the paper's price.
2. Whitening is over all ranks, so that how a batch is split changes nothing.
"""

from ..words import PPO, Baseline, Credit, TokenKL, Whiten
from .recipe import Recipe

recipe = Recipe(
    name="reinforce_pp",
    shape=(TokenKL(beta=0.0, estimator="k1"),),
    baseline=Baseline(kind="none"),
    credit=Credit(kind="returns", gamma=1.0),
    adjust=(Whiten(ddof=0, eps=1e-8, how="floor"),),
    surrogate=PPO(low=0.2, high=0.2),
)
