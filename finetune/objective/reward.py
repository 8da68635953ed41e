"""reward: the reward of each episode or turn, as float64, from the rewards that were recorded on its tape.

    x_e = reward of episode e        (per = episode)
    x_n = reward of turn n           (per = turn)

An episode without a reward has x = NaN. It is unscored, and a recipe with advantages never trains on it. A turn without
a reward isn't scored either, and doesn't count as 0 in a mean, a maximum or a baseline.

Only a turn with own tokens is an action. The reward of another turn, such as the opponent's move with `loop.by_agent`,
belongs to the last such turn before it. Without one, it is dropped.

`components` replaces the recorded total with a weighted sum of the recorded components: x_e = sum_k weight_k *
component_k. If an episode lacks the component NAME, it is unscored. The component doesn't count as 0, and the metric
`reward/missing/NAME` counts such episodes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...tapes.common.stats import total
from ..data.stream import Stream
from .term import Context, Term


class Reward(Term):
    """The rewards that the recipe learns from."""

    per: Literal["episode", "turn"] = "episode"
    """Whether each episode or each turn has a reward of its own. This is the unit that the baseline compares, and over
    whose tokens `credit` spreads an advantage."""
    reduce: Literal["sum", "mean", "max"] = "sum"
    """How the rewards of an episode's turns are combined (per = episode). `sum` gives the recorded reward."""
    components: dict[str, float] | None = None
    """Weight of each reward component, by name. The sum is one reward for the whole episode, whatever `per` says. If
    None, the recorded total is used."""

    @property
    def of_turns(self) -> bool:
        """True if there is one reward per turn."""
        return self.per == "turn" and self.components is None

    @property
    def reads_turns(self) -> bool:
        """True if the rewards of single turns matter, and not only their sum."""
        return self.of_turns or (self.components is None and self.reduce != "sum")

    def __call__(self, stream: Stream, context: Context) -> Tensor:
        """Return the rewards as float64, (E,) per episode or (N,) per turn. The reward is NaN for what isn't scored."""
        if self.components is not None:
            return self._weighed(stream, self.components, context)
        if self.of_turns:
            return stream.turns.reward
        return stream.episodes.reward if self.reduce == "sum" else self._reduced(stream)

    def _weighed(self, stream: Stream, components: dict[str, float], context: Context) -> Tensor:
        out = []
        for parts in stream.episodes.components:
            missing = [name for name in components if name not in parts]
            for name in components:
                context.sums.put(f"reward/missing/{name}", name in missing)
            # A missing component isn't 0, because the group would then compare a partial sum with complete sums.
            out.append(float("nan") if missing else total(w * parts[name] for name, w in components.items()))
        x = torch.tensor(out, dtype=torch.float64)
        return torch.where(stream.episodes.reward.isnan(), torch.nan, x)

    def _reduced(self, stream: Stream) -> Tensor:
        n = len(stream.episodes.tape)
        x = torch.full((n,), torch.nan, dtype=torch.float64)
        how = "mean" if self.reduce == "mean" else "amax"
        known = ~stream.turns.reward.isnan()
        return x.scatter_reduce(0, stream.turns.episode[known], stream.turns.reward[known], how, include_self=False)
