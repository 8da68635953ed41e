"""The reward of a tape from its components. One rule serves tapes, indexes, audits and training: a sum with a missing
component is not a reward.
"""

from __future__ import annotations

from collections.abc import Iterable

from .records import Reward


def total(rewards: Iterable[Reward]) -> float | None:
    """The sum of weight * value; None where no component counts (weight 0 is a metric), or where one failed."""
    every = list(rewards)
    counted = [r.weight * r.value for r in every if r.weight != 0]
    return sum(counted) if counted and not any(r.failed for r in every) else None
