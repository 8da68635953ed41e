"""sft: next-token cross-entropy on the agents' own tokens.

    loss = -1/T sum_t lp_t

Source: maximum likelihood. No score is needed, and a token counts whoever wrote it. The temperature it was
sampled at plays no part.
"""

from ..words import NLL, Baseline, Score
from .recipe import Recipe

recipe = Recipe(name="sft", score=Score(temperature="one"), baseline=Baseline(kind="none"), surrogate=NLL())
