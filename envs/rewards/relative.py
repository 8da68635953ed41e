"""Rewards relative to the other attempts in a group.

A source with `per="group"` scores the attempts after all of them have ended. The tapes are closed then, so the scores
are recorded as a layer on each tape. Training adds this layer to the reward on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...tapes import Tape
from ...tapes.common.stats import REWARD_LIMIT, total
from ...tapes.records import Record, Reward, total_reward
from ...tapes.store.summary import GROUP_LAYER
from .sources import Rewards, RewardSource


def layer_of(tape: Tape) -> list[Reward]:
    """Return the group rewards on the tape. The list is empty before the attempts have been compared."""
    return [r for r in tape.layers if isinstance(r, Reward) and r.layer == GROUP_LAYER]


def counted(tape: Tape) -> list[Reward]:
    """Return the rewards that count in training, from the tape and from the group layer.

    If one of them failed, the list is empty and the tape is unscored, because a partial sum would be a wrong reward.
    """
    every = [*tape.rewards, *layer_of(tape)]
    return [] if any(r.failed for r in every) else every


def training_reward(tape: Tape) -> float | None:
    """Return the sum of the counted rewards, or None for an unscored tape."""
    return total_reward(counted(tape))


def comparable(tape: Tape) -> bool:
    """Return whether the tape can be trained on and no reward on it exceeds REWARD_LIMIT. Earlier versions could record
    larger rewards. If a reward is larger, no attempt in the group has a finite advantage."""
    return tape.trains and not any(abs(r.weight * r.value) > REWARD_LIMIT for r in counted(tape))


async def compared(
    rewards: Rewards[Tape] | None, tapes: Sequence[Tape], append: Callable[[Record], None] | None = None
) -> list[Tape]:
    """Return the tapes of one group with their group layer. Compute a missing layer and pass its records to `append`.

    A tape that already has the layer isn't changed, so resuming a run can't append the layer twice.
    """
    if rewards is None or not rewards.relative or all(layer_of(tape) for tape in tapes):
        return list(tapes)
    found = await rewards.compare(tapes)
    made = []
    for tape in tapes:
        if not layer_of(tape) and found[tape.id]:
            if append is not None:
                for record in found[tape.id]:
                    append(record)
            tape = Tape.of(tape.bodies, layers=[*tape.layers, *found[tape.id]], parent=tape.parent, file=tape.picture)
        made.append(tape)
    return made


def ranked(*, by: str | None = None, name: str = "rank", weight: float = 1.0) -> RewardSource[Sequence[Tape]]:
    """Return a source that ranks attempts from 0 (worst) to 1 (best) by their reward, or by the component `by`. Equal
    attempts share their mean rank. An attempt has no rank if it is unscored, or if no other attempt is scored."""

    def rank(tapes: Sequence[Tape]) -> list[float | None]:
        values = [_value(tape, by) for tape in tapes]
        known = [v for v in values if v is not None]
        if len(known) < 2:
            return [None] * len(values)
        places = {v: sum(w < v for w in known) + (known.count(v) - 1) / 2 for v in known}
        return [None if v is None else places[v] / (len(known) - 1) for v in values]

    return RewardSource(score=rank, name=name, weight=weight, per="group")


def best_of(*, by: str | None = None, name: str = "best", weight: float = 1.0) -> RewardSource[Sequence[Tape]]:
    """Return a source that compares attempts by their reward, or by the component `by`. The best attempt and all equal
    to it score 1, and the others score 0. Unscored attempts have no score."""

    def best(tapes: Sequence[Tape]) -> list[float | None]:
        values = [_value(tape, by) for tape in tapes]
        top = max((v for v in values if v is not None), default=None)
        return [None if v is None else float(v == top) for v in values]

    return RewardSource(score=best, name=name, weight=weight, per="group")


def _value(tape: Tape, by: str | None) -> float | None:
    if by is None:
        return tape.reward
    found = [r.value for r in tape.rewards if r.name == by]
    return total(found) if found else None
