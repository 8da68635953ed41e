"""PPO recipes with clipped ratios: with a critic, and against recomputed log-probs."""

from ..objective import PPO, Adaptive, Anchor, GroupBaseline, Reward, TimeCredit, TokenKL, Whiten
from ..objective.recipe import Recipe

ppo = Recipe(
    name="ppo",
    reward=Reward(per="turn"),
    shape=(TokenKL(beta=0.0, estimator="k1"),),
    baseline=GroupBaseline(kind="none"),
    credit=TimeCredit(kind="gae", gamma=1.0, lam=0.95),
    adjust=(Whiten(ddof=0, eps=1e-8, how="floor"),),
    surrogate=PPO(low=0.2, high=0.2),
)
"""ppo: clipped ratio, generalised advantage estimation, and a critic.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}        gamma 1, lambda 0.95
    A_t whitened over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)

The critic learns A_t + V_t with its own loss, optimiser and schedule (`loop.critic`).

Source: Schulman et al. 2017 (arXiv 1707.06347) and 2016 (arXiv 1506.02438).

1. Only own tokens are time steps, not the environment's tokens between two turns. The last token of a turn therefore
   bootstraps from the value of the next turn's first token.
2. An episode that was cut off (truncated, or at a limit) bootstraps from the critic's value of the state after its last
   own token. The environment's last observation isn't read, because no prompt was made from it.
"""

ppo_kl = ppo.but(
    name="ppo_kl",
    shape=(TokenKL(beta=0.15, estimator="k1", adaptive=Adaptive(target=0.25, horizon=10_000)),),
)
"""ppo_kl: PPO with a KL to the reference model in the reward. Its coefficient adapts to a KL target (RLHF).

    r_t = -beta k1_t, plus each turn's reward at its last own token        k1_t = old_t - ref_t
    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}        gamma 1, lambda 0.95
    A_t whitened over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)
    after the update: beta *= 1 + clip(mean k1 / 0.25 - 1, -0.2, 0.2) n / 10000        beta 0.15 at first, n episodes

The critic learns A_t + V_t with its own loss, optimiser and schedule, and with a bound on how far a value may move
(`loop.critic`).

Source: Ziegler et al. 2019 (arXiv 1909.08593), with the constants of their code; Ouyang et al. 2022 (arXiv 2203.02155),
where beta is fixed (`adaptive` null, beta 0.02).

1. The target is per token, so it doesn't depend on the answers' length. For an answer of 24 tokens, it equals the 6
   nats of Ziegler et al.
2. The KL is measured on every update's batch, over the tokens that enter, from their log-probs at sampling.
3. The reference is the model that the run's settings name. The recipe has no reward model.
4. Rewards aren't whitened, only advantages are. The critic has its own optimiser, so its loss has no coefficient.
"""

decoupled_ppo = Recipe(
    name="decoupled_ppo",
    baseline=GroupBaseline(kind="std", by="group", ddof=1, eps=1e-9),
    anchor=Anchor(to="recomputed", weight="truncate", high=2.0),
    surrogate=PPO(low=0.2, high=0.2),
)
"""decoupled_ppo: the ratio is relative to the policy at the start of the update, and a capped importance weight
corrects for the difference between that policy and the sampler.

    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t min(exp(prox_t - old_t), 2) min(r_t A_i, clip(r_t, 0.8, 1.2) A_i),  r_t = exp(lp_t - prox_t)

Source: Hilton et al. 2022 (arXiv 2110.00641); Fu et al. 2025, "AReaL" (arXiv 2505.24298).

1. prox is the log-prob at the start of the update. With one update per rollout batch, it equals lp, without gradient,
   and costs no forward pass.
"""
