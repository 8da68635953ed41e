"""reward: what an episode or a turn earned, as floats. Where the numbers come from is the environment's matter.

    x_e = reward of episode e        (per = episode)
    x_n = reward of turn n           (per = turn)

An episode without a reward stays NaN: it is unscored and never trained on by a recipe that needs a score. With
`components` the recorded parts are weighed anew: x_e = sum_k weight_k * part_k; an episode that lacks a named part is
unscored (not 0), and counted.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..data.stream import Stream
from .term import Context, Term


class Reward(Term):
    """Which rewards the recipe learns from."""

    per: Literal["episode", "turn"] = "episode"
    """What one number belongs to; the baseline compares these, and credit spreads them."""
    reduce: Literal["sum", "mean", "max"] = "sum"
    """How an episode's reward follows from its turns' (per = episode). Sum is the reward that was recorded."""
    components: dict[str, float] | None = None
    """Weights by component name; None: the recorded total."""

    def __call__(self, stream: Stream, context: Context) -> Tensor:
        """(E,) or (N,) float64, NaN where unscored."""
        if self.components is not None:
            x = self._weighed(stream, context)
        elif self.per == "turn":
            return stream.turns.reward
        elif self.reduce == "sum":
            x = stream.episodes.reward
        else:
            x = self._reduced(stream)
        return x

    def _weighed(self, stream: Stream, context: Context) -> Tensor:
        assert self.components is not None
        out = []
        for parts in stream.episodes.components:
            missing = [name for name in self.components if name not in parts]
            for name in missing:
                context.sums.put(f"reward/missing/{name}", 1)
            out.append(float("nan") if missing else sum(w * parts[name] for name, w in self.components.items()))
        x = torch.tensor(out, dtype=torch.float64)
        return torch.where(stream.episodes.reward.isnan(), torch.nan, x)

    def _reduced(self, stream: Stream) -> Tensor:
        n = len(stream.episodes.tape)
        x = torch.zeros(n, dtype=torch.float64)
        how = "mean" if self.reduce == "mean" else "amax"
        return x.scatter_reduce(0, stream.turns.episode, stream.turns.reward, how, include_self=False)
