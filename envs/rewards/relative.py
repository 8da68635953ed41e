"""Rewards relative to the other attempts of a group: what an attempt earns beside those it is compared with.

A source `per="group"` is asked once all attempts have ended, so what it gives can't be part of the tapes any more: it
is a layer on each of them. Training counts it with the reward that is on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...tapes import Tape
from ...tapes.records import Record, Reward
from ...tapes.scoring import total
from ...tapes.store.attempts import GROUP_LAYER
from .sources import Rewards, RewardSource


def layer_of(tape: Tape) -> list[Reward]:
    """What the tape earned beside its group; none where nobody has compared it."""
    return [r for r in tape.layers if isinstance(r, Reward) and r.layer == GROUP_LAYER]


def counted(tape: Tape) -> list[Reward]:
    """The rewards that count in training: those on the tape, and those of its group's layer. None at all where one of
    them, or the comparison, failed: then it is unscored."""
    every = [*tape.rewards, *layer_of(tape)]
    return [] if any(r.failed for r in every) else every


def training_reward(tape: Tape) -> float | None:
    """Their sum; None where nothing was scored."""
    return total(counted(tape))


async def compared(
    rewards: Rewards[Tape] | None, tapes: Sequence[Tape], append: Callable[[Record], None] | None = None
) -> list[Tape]:
    """The tapes of one group with their layers; those that lack one get it, and `append` is given its records."""
    if rewards is None or not rewards.relative or all(layer_of(tape) for tape in tapes):
        return list(tapes)
    found = await rewards.compare(tapes)
    made = []
    for tape in tapes:
        if not layer_of(tape) and found[tape.id]:
            if append is not None:
                for record in found[tape.id]:
                    append(record)
            tape = Tape.of(tape.bodies, layers=[*tape.layers, *found[tape.id]], parent=tape.parent)
        made.append(tape)
    return made


def ranked(*, by: str | None = None, name: str = "rank", weight: float = 1.0) -> RewardSource[Sequence[Tape]]:
    """From 0 for the worst attempt to 1 for the best, by reward, or by the component `by`; equals share the mean of
    their places. One that isn't scored has no place; one alone has none either."""

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
