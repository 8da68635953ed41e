"""Pacing: how many groups of rollouts may be started, as a pure state machine.

capacity = min(max_concurrent - running, (max_lag + 1) * batch - outstanding), where outstanding = running + closed and
unused + in the update. Pacing makes stale samples rare; only the check at use makes them impossible (`stale_before`).
Counted in groups: a group is sampled to be compared, so half of one is of no use.

Groups that teach nothing (flat ones, where the recipe drops them) are set aside, and others are sampled in their place:
`extra` of them for one update. Beyond that each makes the update's batch one group smaller, so an update always comes.
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
    extra: int = 0
    """Groups that may be sampled for one update in place of those set aside."""
    running: int = 0
    ready: int = 0
    """Closed, not used yet."""
    aside: int = 0
    """Set aside since the last update began."""
    updating: int = 0
    """In the update that runs now; those that it lacks included, as nothing may be sampled in their place."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_concurrent < 1 or self.max_lag < 0 or self.extra < 0:
            raise ValueError(f"batch and max_concurrent are at least 1, max_lag and extra at least 0: {self}")

    @property
    def overdrawn(self) -> int:
        """Groups set aside beyond `extra`; they count as if they were there, or there would be no end to them."""
        return max(0, self.aside - self.extra)

    @property
    def lacking(self) -> int:
        """Groups that the next update goes without."""
        return min(self.batch, self.overdrawn)

    @property
    def outstanding(self) -> int:
        return self.running + self.ready + self.overdrawn + self.updating

    @property
    def capacity(self) -> int:
        """Groups that may start now; never negative."""
        return max(0, min(self.max_concurrent - self.running, (self.max_lag + 1) * self.batch - self.outstanding))

    @property
    def has_batch(self) -> bool:
        return self.ready >= self.batch - self.lacking and not self.updating

    def start(self) -> None:
        self.running += 1

    def close(self, *, usable: bool, aside: bool = False) -> None:
        """A group ended. One that is of no use (dropped, set aside) leaves the count, or pacing would deadlock."""
        self.running -= 1
        self.aside += aside
        self.ready += usable and not aside

    def take(self) -> int:
        """The next update begins; gives how many of the groups that are ready are in it."""
        taken = min(self.ready, self.batch)
        self.ready -= taken
        self.aside = 0
        self.updating = self.batch
        return taken

    def applied(self) -> None:
        """The update is done and its weights are published."""
        self.updating = 0


def stale_before(update: int, max_lag: int) -> int:
    """Tokens of policy versions below this one are too old for the update that makes version `update + 1`."""
    return update - max_lag
