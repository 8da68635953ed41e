"""weigh: the weight of each token's loss. The loss of an optimiser batch is sum_t w_t l_t, without any other divisor.

    token     w = 1 / T                    every token counts the same
    episode   w = 1 / (E T_e)              every episode counts the same, whatever its length
    turn      w = 1 / (N T_n)              every turn counts the same
    group     w = 1 / (G T_g)              every group counts the same (prompt mean)
    constant  w = 1 / (E limit)            independent of lengths (dr_grpo); with limit 1, the mean of episode sums
    sum       w = 1 / limit                nothing is averaged

T, E, N and G are the numbers of tokens, episodes, turns and groups that enter the update. T_e, T_n and T_g count the
tokens of one episode, turn and group. Tokens are counted after the selection of groups and episodes, but before the
selection of tokens. So a token that a mask drops still counts in the denominator.

The weights are fixed for the whole optimiser batch. So the losses of micro-batches, ranks, packed rows and rows of one
episode add up exactly.
"""

from __future__ import annotations

from typing import Literal, Self, assert_never

import torch
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Term


class Weigh(Term):
    """The weights with which the tokens' losses are added up."""

    kind: Literal["token", "episode", "turn", "group", "constant", "sum"] = "token"
    """The weighting, as listed above."""
    limit: float = 1.0
    """Divisor for `constant` and `sum`, usually the token limit of a completion."""

    def out_of_reach(self, tokens: int) -> str | None:
        """Return a warning if `limit` is above `tokens`, the length of the longest episode, or below an eighth of it.

        The gradient would then be too small or too large. A `limit` of 1 is accepted, because it gives the mean of
        episode sums.
        """
        far = self.kind == "constant" and self.limit != 1 and not tokens / 8 <= self.limit <= tokens
        return f"the divisor of the loss doesn't fit: limit {self.limit:g}" if far else None

    def fitted(self, tokens: int) -> Self:
        """Return the weights with the divisor `tokens`, if it is a length limit."""
        return self.model_copy(update={"limit": float(tokens)}) if self.kind == "constant" and self.limit != 1 else self

    def totals(self, stream: Stream, entered: Tensor) -> float:
        """Return the number by which the weights are divided: T, E, N or G, counted in this process's part of the
        batch.

        `entered` (T,) bool marks the tokens that enter the update. The caller sums the results over all ranks. The sum
        is exact because each rank holds whole groups.
        """
        match self.kind:
            case "token":
                return float(entered.sum())
            case "sum":
                return 1.0
            case "turn":
                return float(len(torch.unique(stream.turn[entered])))
            case "group":
                return float(len(torch.unique(stream.group[entered])))
            case "episode" | "constant":
                return float(len(torch.unique(stream.episode[entered])))
            case _:
                assert_never(self.kind)

    def __call__(self, stream: Stream, entered: Tensor, n: float) -> Tensor:
        """Return the weights (T,) float64, 0 where `entered` is False. `n` is the result of `totals`, summed over all
        ranks."""
        one = entered.to(torch.float64)
        match self.kind:
            case "token":
                return one / max(n, 1.0)
            case "episode":
                return self._share(one, stream.episode, len(stream.episodes.tape), n)
            case "turn":
                return self._share(one, stream.turn, len(stream.turns.reward), n)
            case "group":
                return self._share(one, stream.group, len(stream.episodes.groups), n)
            case "constant":
                return one / (max(n, 1.0) * self.limit)
            case "sum":
                return one / self.limit
            case _:
                assert_never(self.kind)

    @staticmethod
    def _share(one: Tensor, owner: Tensor, owners: int, n: float) -> Tensor:
        size = segments.total(one, owner, owners)[owner]
        return one / (max(n, 1.0) * size.clamp(min=1.0))
