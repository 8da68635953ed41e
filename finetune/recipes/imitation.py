"""Recipes that imitate: maximum likelihood, rejection sampling, minorised SFT and distillation."""

from ..objective import KL, NLL, GroupBaseline, MinorNLL, NoSurrogate, Score, Select
from ..objective.recipe import Recipe

sft = Recipe(name="sft", score=Score(temperature="one"), baseline=GroupBaseline(kind="none"), surrogate=NLL())
"""sft: next-token cross-entropy on the agents' own tokens.

    loss = -1/T sum_t lp_t

Source: maximum likelihood. No reward is needed, and a token counts whether a model or a person wrote it. The sampling
temperature has no influence.
"""

rft = Recipe(
    name="rft",
    score=Score(temperature="one"),
    baseline=GroupBaseline(kind="none"),
    surrogate=NLL(),
    select=Select(bounds=(1.0, None)),
)
"""rft: rejection fine-tuning, which is cross-entropy on the episodes whose reward is high enough.

    loss = -1/T sum_t lp_t        over the own tokens of episodes with reward >= 1

Source: Yuan et al. 2023 (arXiv 2308.01825).

1. `select.bounds` decides which rewards are high enough. An unscored episode never qualifies.
"""

minor_sft = Recipe(
    name="minor_sft",
    score=Score(temperature="one"),
    baseline=GroupBaseline(kind="none"),
    surrogate=MinorNLL(beta=0.1, per="episode"),
)
"""minor_sft: cross-entropy with a gradient that fades as the model's log-probs rise above the reference's.

    loss = -1/T sum_t (2 / beta) log sigmoid(beta mean_episode(lp - ref))        beta 0.1

The gradient is cross-entropy's gradient times 2 sigmoid(-beta mean(lp - ref)). This factor is 1 at lp = ref.

Source: Xie et al. 2024, "Minor SFT loss" (arXiv 2408.10642).

1. The log-ratio is averaged over the episode's own tokens, so that a suitable beta doesn't depend on the episode's
   length. The paper takes the sum over the answer.
2. The loss is a token mean over the batch. The paper takes the mean over an answer's tokens, then over answers
   (`weigh.kind = episode`).
3. The factor 2 / beta is the paper's. TorchRL leaves it out, which scales the gradient by beta / 2.
"""

distill = Recipe(
    name="distill",
    score=Score(temperature="one"),
    baseline=GroupBaseline(kind="none"),
    surrogate=NoSurrogate(),
    regulariser=(KL(to="teacher", estimator="k3", beta=1.0),),
)
"""distill: move towards a teacher on the batch's tokens, without rewards.

    loss = 1/T sum_t k3_t,  k3 = exp(teacher - lp) - 1 - (teacher - lp)

Source: k3 distillation as in TorchRL. On the student's own samples, its gradient descends KL(teacher || student).

1. The teacher is another model (`loop.teacher`, or the trainer's `teacher`). Both models are scored at temperature 1.
"""
