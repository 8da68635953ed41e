"""credit: spreads the advantages of units (episodes or turns) over their tokens.

    broadcast  A_t = y of the token's unit
    returns    A_t = r_t + gamma A_{t+1}
    gae        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}

y is the advantage of a unit. r_t is y at the unit's last own token and 0 elsewhere, plus the penalty of the shape
`token_kl`. If units are turns and a baseline compares them, `returns` and `gae` come before the baseline: r_t is the
turn's reward, and the baseline compares the A_t of the turns' first tokens.

The time steps of an episode are its own tokens, in the order of turns. The environment's tokens between two turns are
not time steps: they aren't discounted, and the recurrence skips them. With clock = turn, each turn is one step. Then r
is the sum over the turn, V is the value before the turn's first token, and all tokens of the turn get the result.

V after the last step is 0 if the episode terminated. If the episode was cut off (truncated, or stopped at a limit), V
is the episode's `bootstrap`. Without a `bootstrap`, it is the critic's value of the state after the last own token. The
critic's target at each step is A + V.
"""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import torch
from torch import Tensor

from ..data import segments
from ..data.stream import Stream
from .term import Context, Kinds, Term


class Credit(Term):
    """Base class of credits, which spread an episode's or a turn's advantage over its tokens. Derive from it to write
    your own credit."""

    @property
    def needs_value(self) -> bool:
        """True if the credit needs a critic, which puts a value for each token into `stream.value`."""
        return False

    @property
    def bootstraps(self) -> bool:
        """True if an episode that was cut off continues with a critic's value of its last state (`stream.beyond`)."""
        return False

    @property
    def takes_penalty(self) -> bool:
        """True if the credit adds up rewards over time steps. Then it accepts a `penalty`, which is a reward for each
        token (from the shape `token_kl`), and comes before a baseline that compares turns."""
        return False

    def __call__(
        self, y: Tensor, penalty: Tensor | None, stream: Stream, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Return the advantage of each token, (T,) float64, and a critic's targets (T,), or None without a critic.

        `y` (U,) are the advantages of the units, which are episodes or turns. It is 0 for a unit without a reward.
        `penalty` (T,) are rewards to add to the tokens, or None. All values must be finite, because a recurrence would
        carry a NaN to every earlier token of the episode.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define the advantage of each token there")


class TimeCredit(Credit):
    """Spreads the advantage of an episode or a turn over its tokens, at once or through discounted returns or GAE."""

    kind: Literal["broadcast", "returns", "gae"] = "broadcast"
    """The estimator, as listed above."""
    clock: Literal["token", "turn"] = "token"
    """Whether a time step is a token or a whole turn."""
    gamma: float = 1.0
    """Discount per step."""
    lam: float = 1.0
    """GAE's lambda."""
    bootstrap: bool = True
    """Whether the return of an episode that was cut off continues with the critic's value of the state at the cut. This
    requires `gae` and a reward per turn. If False, the cut counts as a regular end, which is right for a limit that is
    part of the task."""

    @property
    def needs_value(self) -> bool:
        return self.kind == "gae"

    @property
    def bootstraps(self) -> bool:
        return self.needs_value and self.bootstrap

    @property
    def takes_penalty(self) -> bool:
        return self.kind != "broadcast"

    def __call__(
        self, y: Tensor, penalty: Tensor | None, stream: Stream, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        if self.kind == "broadcast":
            return y[unit_of_token(len(y), stream)], None
        clock = _clock(self.clock, stream)
        reward = clock.place(y, stream)
        if penalty is not None:
            reward = reward + segments.total(penalty.to(reward.dtype), clock.step, len(reward))
        # The recurrence runs over the packed batch. The decay is 0 at the last step of an episode, so that its return
        # doesn't flow into the episode before it.
        decay = torch.full_like(reward, self.gamma).masked_fill(clock.last, 0.0)
        if self.kind == "returns":
            return segments.recur(reward, decay)[clock.step], None
        if self.kind != "gae":
            assert_never(self.kind)
        if stream.value is None:
            raise ValueError(
                "credit 'gae' needs a value per token, and there is no critic: pass critic=... to the "
                "trainer, or use credit 'returns'"
            )
        value = stream.value.to(reward.dtype)[clock.first]
        beyond = stream.beyond.to(reward.dtype) if self.bootstrap else torch.zeros_like(stream.episodes.bootstrap)
        beyond = torch.where(beyond.isnan(), 0.0, beyond)[clock.episode]
        # `roll` brings the next episode's value to an episode's last step, where the mask replaces it with the
        # bootstrap.
        after = torch.where(clock.last, beyond, value.roll(-1))
        advantage = segments.recur(reward + self.gamma * after - value, decay * self.lam)
        return advantage[clock.step], (advantage + value)[clock.step]


AnyCredit = Annotated[Credit, Kinds(TimeCredit)]


def unit_of_token(units: int, stream: Stream) -> Tensor:
    """Return the index (T,) of each token's episode if there are as many units as episodes, otherwise of its turn."""
    return stream.episode if units == len(stream.episodes.tape) else stream.turn


class _Clock:
    """The time steps of all episodes, one episode after another and in order of time within each episode."""

    def __init__(self, step: Tensor, episode: Tensor, first: Tensor, end_of_turn: Tensor) -> None:
        self.step = step
        """(T,) index of the time step of each token."""
        self.episode = episode
        """(S,) index of each step's episode, non-decreasing."""
        self.first = first
        """(S,) index of the first token of each step. The critic's value of this token is the value of the step."""
        self.end_of_turn = end_of_turn
        """(N,) index of the last step at or before the end of each turn, in the same episode. -1 if there is none."""
        nxt = torch.cat([episode[1:], episode.new_full((1,), -1)]) if len(episode) else episode
        self.last = episode != nxt
        """(S,) bool: whether the step is the last of its episode."""

    def place(self, y: Tensor, stream: Stream) -> Tensor:
        """Return the rewards (S,) of the time steps. `y` has one reward per episode or per turn. It goes to the last
        step at or before the end of this episode or turn.

        The reward of a turn before the first own token is dropped. It belongs to no step, and no action of the agent
        caused it.
        """
        out = torch.zeros(len(self.episode), dtype=y.dtype)
        # An episode's reward belongs to its last step, because only then is it known.
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
    # `turn` is sorted, so the search finds the last token at or before the end of each turn. This token may belong to
    # an earlier episode, and the check on `episode` keeps the reward from this episode.
    until = torch.searchsorted(turn, torch.arange(len(stream.turns.reward)), right=True) - 1
    if not len(order):
        return _Clock(step, episode, first, until)
    end = step[order[until.clamp(min=0)]]
    known = (until >= 0) & (episode[end] == stream.turns.episode)
    return _Clock(step, episode, first, torch.where(known, end, -1))
