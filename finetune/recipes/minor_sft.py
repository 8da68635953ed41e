"""minor_sft: cross-entropy that fades as the model outgrows where it started.

    loss = -1/T sum_t (2 / beta) log sigmoid(beta mean_episode(lp - ref))        beta 0.1

At lp = ref its gradient is that of cross-entropy; it is 2 sigmoid(-beta mean(lp - ref)) of it elsewhere.

Source: Xie et al. 2024, "Minor SFT loss" (arXiv 2408.10642).

1. The log-ratio is averaged over the episode's own tokens, so that beta doesn't depend on its length; the paper's is
   the sum over the answer.
2. Token mean over the batch; the paper takes the mean over an answer's tokens, then over answers
   (`weigh.kind = episode`).
3. The factor 2 / beta is the paper's; TorchRL leaves it out, which scales the gradient by beta / 2.
"""

from ..words import Baseline, MinorNLL, Score
from .recipe import Recipe

recipe = Recipe(
    name="minor_sft",
    score=Score(temperature="one"),
    baseline=Baseline(kind="none"),
    surrogate=MinorNLL(beta=0.1, per="episode"),
)
