"""Pacing: how many groups of rollouts may be started, as a pure state machine.

capacity = min(max_concurrent - running, (max_lag + 1) * batch - outstanding), where outstanding = running + closed and
unused + in the update. Pacing makes stale samples rare; only the check at use makes them impossible (`stale_before`).
Counted in groups: a group is sampled to be compared, so half of one is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pacer:
    """Counts of groups in each place. The caller moves them; `capacity` says how many more may start."""

    batch: int
    """Groups per update."""
    max_concurrent: int
    """Groups that may run at once."""
    max_lag: int
    """Updates that a sample's policy may be behind the one it trains; 0 is synchronous."""
    running: int = 0
    ready: int = 0
    """Closed, not used yet."""
    updating: int = 0
    """In the update that runs now."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_concurrent < 1 or self.max_lag < 0:
            raise ValueError(f"batch and max_concurrent are at least 1, max_lag at least 0: {self}")

    @property
    def outstanding(self) -> int:
        return self.running + self.ready + self.updating

    @property
    def capacity(self) -> int:
        """Groups that may start now; never negative."""
        return max(0, min(self.max_concurrent - self.running, (self.max_lag + 1) * self.batch - self.outstanding))

    @property
    def has_batch(self) -> bool:
        return self.ready >= self.batch and not self.updating

    def start(self) -> None:
        self.running += 1

    def close(self, *, usable: bool) -> None:
        """A group ended. One that is of no use (dropped, filtered) leaves the count, or pacing would deadlock."""
        self.running -= 1
        self.ready += usable

    def take(self) -> None:
        self.ready -= self.batch
        self.updating += self.batch

    def applied(self) -> None:
        """The update is done and its weights are published."""
        self.updating = 0


def stale_before(update: int, max_lag: int) -> int:
    """Tokens of policy versions below this one are too old for the update that makes version `update + 1`."""
    return update - max_lag
