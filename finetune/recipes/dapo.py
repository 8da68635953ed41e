"""dapo: decoupled clip and dynamic sampling.

    A_i = (r_i - mean_group) / (std_group + 1e-9),  r_i with the overlong price
    loss = -1/T sum_t min(r_t A_i, clip(r_t, 0.8, 1.28) A_i)         groups without spread are dropped, and not in T

Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476).

1. A group is flat when all its rewards are equal, whatever they are; the paper names all right and all wrong. The test
   is on the rewards before the overlong price.
2. The price's limit (20,480 tokens, the last 4,096 cost up to 1) is the paper's: set it to yours.
"""

from ..words import PPO, Baseline, Overlong, Select
from .recipe import Recipe

recipe = Recipe(
    name="dapo",
    shape=(Overlong(limit=20480, buffer=4096, factor=1.0),),
    baseline=Baseline(kind="std", by="group", ddof=1, eps=1e-9),
    surrogate=PPO(low=0.2, high=0.28),
    select=Select(flat="drop"),
)
