"""distill: stay with a teacher on the tokens at hand; nothing is rewarded.

    loss = 1/T sum_t k3_t,  k3 = exp(ref - lp) - 1 - (ref - lp)

Source: k3 distillation as in TorchRL. On the student's own samples it descends KL(teacher || student).

1. The teacher is the trainer's `reference`; both are scored at temperature 1.
"""

from ..words import KL, Baseline, NoSurrogate, Score
from .recipe import Recipe

recipe = Recipe(
    name="distill",
    score=Score(temperature="one"),
    baseline=Baseline(kind="none"),
    surrogate=NoSurrogate(),
    regulariser=(KL(estimator="k3", beta=1.0),),
)
