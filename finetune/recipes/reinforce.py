"""REINFORCE recipes, which use the plain score-function gradient with the usual baselines."""

from ..objective import KL, PPO, GroupBaseline, Reinforce, Reward, TimeCredit, TokenKL, Whiten
from ..objective.recipe import Recipe

reinforce = Recipe(
    name="reinforce",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-4),
    surrogate=Reinforce(),
    regulariser=(KL(estimator="k3", beta=0.0),),
)
"""reinforce: the score function with advantages normalised within the group.

    A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-4
    loss = -1/T sum_t [ lp_t A_i - beta k3_t ]

Source: TapeAgents 0.1.16, finetune.rl with `algo: reinforce`.

1. The group's mean and deviation are taken over episodes. TapeAgents takes them over model calls, so an episode with
   more calls has more weight in the mean.
2. In a group whose rewards are all equal, every advantage is exactly 0. In TapeAgents, rounding makes it up to 1e-3.
3. beta is 0, so no reference model is needed. If beta is set, the KL estimator is k3.
"""

reinforce_plain = Recipe(
    name="reinforce_plain",
    reward=Reward(per="turn"),
    baseline=GroupBaseline(kind="none"),
    credit=TimeCredit(kind="returns", gamma=1.0),
    surrogate=Reinforce(),
)
"""reinforce_plain: Williams' REINFORCE with discounted returns and no baseline.

    A_t = R_t = r_t + gamma R_{t+1}                          gamma 1
    loss = -1/T sum_t lp_t A_t

Source: Williams 1992; the estimator `reinforce` in LightRFT.

1. Time runs over own tokens only. A turn's reward is given at its last own token.
"""

rloo = Recipe(name="rloo", baseline=GroupBaseline(kind="loo"), surrogate=Reinforce())
"""rloo: REINFORCE with the mean of the other attempts as the baseline.

    A_i = r_i - mean_{j != i} r_j
    loss = -1/T sum_t lp_t A_i

Source: Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740).

1. The loss is a token mean over the batch. The paper takes the sum over an answer's tokens (`weigh = constant`, limit
   1).
2. The advantage in a group of one is 0.
"""

reinforce_pp = Recipe(
    name="reinforce_pp",
    shape=(TokenKL(beta=0.0, estimator="k1"),),
    baseline=GroupBaseline(kind="none"),
    credit=TimeCredit(kind="returns", gamma=1.0),
    adjust=(Whiten(ddof=0, eps=1e-8, how="floor"),),
    surrogate=PPO(low=0.2, high=0.2),
)
"""reinforce_pp: REINFORCE++, which has a clipped ratio and returns that are whitened across the whole batch.

    r_t = -beta k1_t, plus the episode's reward at its last own token
    A_t = (R_t - m) / sqrt(max(var, 1e-8)),  R_t = r_t + gamma R_{t+1},  m and var over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)

Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262).

1. beta is 0, so no reference model is needed. The paper's penalty is the shape `[{"kind": "token_kl", "beta": ...}]`.
2. Whitening is over all ranks, so the result doesn't depend on how the batch is split.
"""

reinforce_pp_baseline = Recipe(
    name="reinforce_pp_baseline",
    baseline=GroupBaseline(kind="mean"),
    adjust=(Whiten(ddof=0, eps=1e-8, how="floor"),),
    surrogate=PPO(low=0.2, high=0.2),
    regulariser=(KL(estimator="k2", beta=0.0),),
)
"""reinforce_pp_baseline: REINFORCE++ with the group's mean subtracted before the batch is whitened.

    A_i = (r_i - mean_group - m) / sqrt(max(var, 1e-8))      m and var over all tokens of the batch
    loss = -1/T sum_t [ min(r A_i, clip(r, 0.8, 1.2) A_i) - beta k2_t ]

Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262), the variant for several answers per prompt.

1. gamma is 1, as in the paper, so each token gets its answer's advantage.
2. beta is 0, so no reference model is needed. If beta is set, the KL estimator is k2, which has the gradient of KL(pi
   || ref).
"""
