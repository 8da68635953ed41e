"""What the components of a tape come to. One rule for tapes, indexes, audits and training: a sum with a part missing is
no reward. Knows nothing of who scored, nor which layers are asked about.
"""

from __future__ import annotations

from collections.abc import Iterable

from .records import Reward


def total(rewards: Iterable[Reward]) -> float | None:
    """What they come to: the sum of weight * value; None where nothing was scored, or where a part of it failed."""
    every = list(rewards)
    counted = [r.weight * r.value for r in every if r.weight != 0]
    return sum(counted) if counted and not any(r.failed for r in every) else None
