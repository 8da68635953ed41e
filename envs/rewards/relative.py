"""Rewards relative to the other attempts of a group.

A source with `per="group"` scores after all attempts have ended. The tapes are closed then, so its scores are a layer
on each tape. Training adds them to the reward on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...tapes import Tape
from ...tapes.common.stats import REWARD_LIMIT
from ...tapes.records import Record, Reward, total_reward
from ...tapes.store.summary import GROUP_LAYER
from .sources import Rewards, RewardSource


def layer_of(tape: Tape) -> list[Reward]:
    """The group rewards of the tape; empty before the comparison."""
    return [r for r in tape.layers if isinstance(r, Reward) and r.layer == GROUP_LAYER]


def counted(tape: Tape) -> list[Reward]:
    """The rewards that count in training, from the tape and from the group layer.

    Empty if one of them failed: the tape is then unscored, because a partial sum would be a wrong reward.
    """
    every = [*tape.rewards, *layer_of(tape)]
    return [] if any(r.failed for r in every) else every


def training_reward(tape: Tape) -> float | None:
    """The sum of the counted rewards; None for an unscored tape."""
    return total_reward(counted(tape))


def comparable(tape: Tape) -> bool:
    """Whether the tape can be trained on, and no reward is beyond REWARD_LIMIT, as earlier versions recorded them: with
    one, no attempt of the group has a finite advantage."""
    return tape.trains and not any(abs(r.weight * r.value) > REWARD_LIMIT for r in counted(tape))


async def compared(
    rewards: Rewards[Tape] | None, tapes: Sequence[Tape], append: Callable[[Record], None] | None = None
) -> list[Tape]:
    """The tapes of one group with their group layer. A missing layer is computed, and `append` receives its records.

    Tapes that already have the layer are not scored again, so resuming a run can't append it twice.
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
    """A rank from 0 (worst attempt) to 1 (best), by reward or by the component `by`; equal attempts share their mean
    rank. An unscored attempt, or the only scored one, has no rank."""

    def rank(tapes: Sequence[Tape]) -> list[float | None]:
        values = [_value(tape, by) for tape in tapes]
        known = [v for v in values if v is not None]
        if len(known) < 2:
            return [None] * len(values)
        places = {v: sum(w < v for w in known) + (known.count(v) - 1) / 2 for v in known}
        return [None if v is None else places[v] / (len(known) - 1) for v in values]

    return RewardSource(score=rank, name=name, weight=weight, per="group")


def best_of(*, by: str | None = None, name: str = "best", weight: float = 1.0) -> RewardSource[Sequence[Tape]]:
    """1 for the best attempt and those equal to it, 0 for the others, by reward or by the component `by`."""

    def best(tapes: Sequence[Tape]) -> list[float | None]:
        values = [_value(tape, by) for tape in tapes]
        top = max((v for v in values if v is not None), default=None)
        return [None if v is None else float(v == top) for v in values]

    return RewardSource(score=best, name=name, weight=weight, per="group")


def _value(tape: Tape, by: str | None) -> float | None:
    if by is None:
        return tape.reward
    found = [r.value for r in tape.rewards if r.name == by]
    return sum(found) if found else None
