"""reinforce_plain: Williams' REINFORCE with discounted returns and no baseline.

    A_t = R_t = r_t + gamma R_{t+1}                          gamma 1
    loss = -1/T sum_t lp_t A_t

Source: Williams 1992; LightRFT's estimator `reinforce`.

1. Time runs over own tokens only; a turn's reward comes with its last own token.
"""

from ..words import Baseline, Credit, Reinforce, Reward
from .recipe import Recipe

recipe = Recipe(
    name="reinforce_plain",
    reward=Reward(per="turn"),
    baseline=Baseline(kind="none"),
    credit=Credit(kind="returns", gamma=1.0),
    surrogate=Reinforce(),
)
