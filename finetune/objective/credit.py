"""credit: from the units' advantages to one advantage per token.

    broadcast  A_t = y of the token's unit
    returns    A_t = r_t + gamma A_{t+1}
    gae        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}

r is 0 but at the last own token of a unit, where it is y (plus, at every token, a KL penalty if the recipe shapes with
one). Own tokens of an episode follow each other by turns: what the environment said between two turns is no step of
this clock, neither decays anything nor interrupts the bootstrap. With clock = turn all tokens of a turn share one
step: r is the turn's sum, V the value before its first token, and the result is broadcast to the turn's tokens.

V beyond the end is 0 after a terminal end, and the episode's `bootstrap` after a cut one (0 where it is unknown).
The critic's target is A + V.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Term


class Credit(Term):
    """How what a unit earned is spread over its tokens."""

    kind: Literal["broadcast", "returns", "gae"] = "broadcast"
    """How: one of the lines above."""
    clock: Literal["token", "turn"] = "token"
    """What one step of time is."""
    gamma: float = 1.0
    """Discount per step."""
    lam: float = 1.0
    """GAE's lambda."""

    def __call__(self, y: Tensor, penalty: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """(T,) float64 advantages, and the critic's targets (gae only).

        y: (U,) per unit. penalty: (T,) reward per token on top of it, or None. Both finite: an unscored unit has y 0.
        """
        if self.kind == "broadcast":
            return y[unit_of_token(len(y), stream)], None
        clock = _clock(self.clock, stream)
        reward = clock.place(y, stream)
        if penalty is not None:
            reward = reward + segments.total(penalty.to(reward.dtype), clock.step, len(reward))
        # Decay 0 at an episode's last step: the recurrence runs over the packed batch and must not cross episodes.
        decay = torch.full_like(reward, self.gamma).masked_fill(clock.last, 0.0)
        if self.kind == "returns":
            return segments.recur(reward, decay)[clock.step], None
        if stream.value is None:
            raise ValueError(
                "credit 'gae' needs a value per token, and there is no critic: pass critic=... to the "
                "trainer, or use credit 'returns'"
            )
        value = stream.value.to(reward.dtype)[clock.first]
        beyond = stream.episodes.bootstrap.to(reward.dtype)[clock.episode]
        after = torch.where(clock.last, beyond, value.roll(-1))
        advantage = segments.recur(reward + self.gamma * after - value, decay * self.lam)
        return advantage[clock.step], (advantage + value)[clock.step]


def unit_of_token(units: int, stream: Stream) -> Tensor:
    """(T,) the unit of each token: its episode, or its turn when there are as many units as turns."""
    return stream.episode if units == len(stream.episodes.tape) else stream.turn


class _Clock:
    """The time steps of all episodes, in order, episode after episode."""

    def __init__(self, step: Tensor, episode: Tensor, first: Tensor, end_of_turn: Tensor) -> None:
        self.step = step
        """(T,) the step of each token."""
        self.episode = episode
        """(S,) non-decreasing."""
        self.first = first
        """(S,) the token whose value opens the step."""
        self.end_of_turn = end_of_turn
        """(N,) the last step of each turn, or of the turns before it in its episode; -1 when there is none."""
        nxt = torch.cat([episode[1:], episode.new_full((1,), -1)]) if len(episode) else episode
        self.last = episode != nxt
        """(S,) bool: the last step of its episode."""

    def place(self, y: Tensor, stream: Stream) -> Tensor:
        """(S,) rewards of units at the step that ends them. A reward before the first own token has no step
        and is dropped: no action of the agent led to it."""
        out = torch.zeros(len(self.episode), dtype=y.dtype)
        if len(y) == len(stream.episodes.tape):
            return out.index_add(0, self.last.nonzero()[:, 0], y[self.episode[self.last]])
        at = self.end_of_turn
        return out.index_add(0, at[at >= 0], y[at >= 0])


def _clock(kind: str, stream: Stream) -> _Clock:
    order = stream.time
    turn = stream.turn[order]
    if kind == "token":
        step = torch.empty_like(order)
        step[order] = torch.arange(len(order))
        first = order
    else:
        _, inverse = torch.unique_consecutive(turn, return_inverse=True)
        step = torch.empty_like(order)
        step[order] = inverse
        opens = torch.ones_like(inverse, dtype=torch.bool)
        opens[1:] = inverse[1:] != inverse[:-1]
        first = order[opens]
    episode = stream.episode[first]
    # The last token at or before the end of each turn, and its step, unless it belongs to an earlier episode.
    until = torch.searchsorted(turn, torch.arange(len(stream.turns.reward)), right=True) - 1
    if not len(order):
        return _Clock(step, episode, first, until)
    end = step[order[until.clamp(min=0)]]
    known = (until >= 0) & (episode[end] == stream.turns.episode)
    return _Clock(step, episode, first, torch.where(known, end, -1))
