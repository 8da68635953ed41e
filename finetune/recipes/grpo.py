"""Group-relative recipes: GRPO and the variants that change its baseline, clipping, weights or ratio."""

from ..objective import KL, PPO, DecoupledBaseline, GroupBaseline, Overlong, Select, Weigh
from ..objective.recipe import Recipe

grpo = Recipe(
    name="grpo",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=0.2, high=0.2),
    regulariser=(KL(estimator="k3", beta=0.0),),
)
"""grpo: group relative policy optimization.

    A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-9
    loss = -1/T sum_t [ min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i) - beta k3_t ],  r_t = exp(lp_t - old_t)

Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), eq. 3 and 4.

1. The loss is a token mean over the whole batch. The paper takes the mean over the tokens of each answer, then over
   answers (`weigh.kind = episode`), which gives more weight to a token in a short answer.
2. In a group whose rewards are all equal, every advantage is exactly 0. Its tokens still count in T.
3. beta is 0, so no reference model is needed.
"""

gdpo = Recipe(
    name="gdpo",
    baseline=DecoupledBaseline(),
    surrogate=PPO(low=0.2, high=0.2),
)
"""gdpo: group reward-decoupled normalization, for several rewards.

    Y_i = sum_k w_k (c_ik - mean_group c_k) / (std_group c_k + eps)         n - 1 in the variance, eps 1e-4
    A_i = Y_i / (std_batch Y + eps)
    loss = -1/T sum_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)

Source: Liu et al. 2026, "GDPO" (arXiv 2601.05242).

1. The weights w_k multiply the compared rewards, as in TRL. The paper adds them up without weights.
2. With one reward, it is grpo with advantages divided by their deviation over the batch.
"""

dr_grpo = Recipe(
    name="dr_grpo",
    baseline=GroupBaseline(kind="mean"),
    surrogate=PPO(low=0.2, high=0.2),
    weigh=Weigh(kind="constant", limit=512.0),
)
"""dr_grpo: GRPO done right, without the two normalisations that bias it: by standard deviation and by length.

    A_i = r_i - mean_group
    loss = -1/(E limit) sum_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)

Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783).

1. `weigh.limit` is the length limit of a completion (TRL: `max_completion_length`), and only scales the loss. In a run,
   it is the number of tokens of the longest episode that the run's limits allow, otherwise 512.
"""

dapo = Recipe(
    name="dapo",
    shape=(Overlong(limit=20480, buffer=4096, factor=1.0),),
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=0.2, high=0.28),
    select=Select(flat="drop"),
)
"""dapo: decoupled clip and dynamic sampling.

    A_i = (r_i - mean_group) / (std_group + 1e-9),  r_i with the overlong price
    loss = -1/T sum_t min(r_t A_i, clip(r_t, 0.8, 1.28) A_i)         groups without spread are dropped, and not in T

Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476).

1. A group is dropped if all its rewards are equal, whatever their value. The paper drops groups whose answers are all
   right or all wrong. The rewards that are compared here don't yet contain the price for overlong answers.
2. In a run, the price reaches 1 at the longest episode that the run's limits allow, and begins at 4/5 of its tokens.
   Otherwise it has the paper's limit of 20,480 tokens, and rises over the last 4,096 of them.
"""

gspo = Recipe(
    name="gspo",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=3e-4, high=4e-4, per="episode"),
    weigh=Weigh(kind="episode"),
)
"""gspo: group sequence policy optimization, with one ratio per answer (the geometric mean over its tokens).

    s_i = exp(mean_t (lp_t - old_t))
    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071).

1. An episode with several turns counts as one answer. With `surrogate.per = turn`, there is one ratio per turn.
"""
