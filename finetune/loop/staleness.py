"""Limits on staleness, which is the number of updates between the sampling of a token and the training on it.

`Pacer` limits how many groups may start: capacity = min(max_concurrent - running, (max_lag + 1) * batch - outstanding).
Outstanding groups are those that are running, closed and unused, or in the current update. `Pacer` counts whole groups,
because the attempts of a group are compared with each other.

If groups close in the order in which they started, each group is trained on at most `max_lag` updates late. Only
`drop_stale` guarantees this bound, by checking every token of a new batch.

If the recipe drops flat groups (groups with equal rewards), they are set aside, and other groups are sampled in their
place, at most `extra` for one update. Each further flat group makes the batch of the update one group smaller, so that
there is always a next update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.provenance import Range, keep_tokens
from ..data.rows import Row


@dataclass(slots=True)
class Pacer:
    """Counts groups by their state, and says in `capacity` how many may start. The caller reports each change of
    state."""

    batch: int
    """Number of groups in an update."""
    max_concurrent: int
    """Number of groups that may be sampled at the same time."""
    max_lag: int
    """Largest number of updates between the sampling of a group and the training on it. With 0, the loop is
    synchronous."""
    extra: int = 0
    """Maximum number of groups that may be sampled for one update in place of groups that were set aside."""
    running: int = 0
    ready: int = 0
    """Number of groups that are closed and wait for an update."""
    aside: int = 0
    """Number of groups that were set aside since the last update began, because they are flat."""
    updating: int = 0
    """Number of groups in the update that runs now: `batch`, or 0 without an update. Groups that a smaller batch lacks
    count too, so that no others are sampled in their place."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_concurrent < 1 or self.max_lag < 0 or self.extra < 0:
            raise ValueError(f"batch and max_concurrent must be at least 1, max_lag and extra at least 0: {self}")

    @property
    def overdrawn(self) -> int:
        """Number of groups that were set aside without a replacement, because `extra` is used up. They count as
        outstanding. Otherwise sampling would never stop for a policy that produces only flat groups."""
        return max(0, self.aside - self.extra)

    @property
    def lacking(self) -> int:
        """Number of groups that the batch of the next update lacks, because too many groups were flat."""
        return min(self.batch, self.overdrawn)

    @property
    def outstanding(self) -> int:
        return self.running + self.ready + self.overdrawn + self.updating

    @property
    def capacity(self) -> int:
        """The number of groups that may start now. It is never negative."""
        return max(0, min(self.max_concurrent - self.running, (self.max_lag + 1) * self.batch - self.outstanding))

    @property
    def has_batch(self) -> bool:
        return self.ready >= self.batch - self.lacking and not self.updating

    def start(self) -> None:
        self.running += 1

    def close(self, *, usable: bool, aside: bool = False) -> None:
        """Report that a group ended. A usable group waits for an update, unless it is set `aside`.

        A group that is dropped or set aside is no longer outstanding. Otherwise `capacity` could reach 0 before a batch
        is ready, and the loop would wait forever.
        """
        self.running -= 1
        self.aside += aside
        self.ready += usable and not aside

    def take(self) -> int:
        """Report that the next update begins, and return how many of the ready groups it takes."""
        # The rest stays ready, and is older than what begins now. So it is in the next update.
        taken = min(self.ready, self.batch)
        self.ready -= taken
        self.aside = 0
        self.updating = self.batch
        return taken

    def applied(self) -> None:
        """Report that the update is applied and its weights are published."""
        self.updating = 0


def stale_before(update: int, max_lag: int) -> int:
    """Return the number of the oldest version whose tokens the update may train on. The update makes version `update +
    1`."""
    return update - max_lag


def version_name(lineage: str, n: int) -> str:
    """Return `lineage:n`, the name of the policy after n updates."""
    return f"{lineage}:{n}"


def version_number(version: str, lineage: str) -> int | None:
    """Return the number n of a version with the name `lineage:n`, or None for a version of another lineage."""
    name, _, n = version.rpartition(":")
    return int(n) if name == lineage and n.isdigit() else None


def drop_stale(rows: Sequence[Row], lineage: str, oldest: int) -> tuple[list[Row], list[Range]]:
    """Stop training on tokens that a version before `lineage:oldest` sampled: make them context. Return the new rows,
    and the ranges of these tokens.

    A token that no model sampled has no version and is never stale. A token that another policy (lineage) sampled is
    always stale, because the distance between the two policies is unknown.
    """

    def fresh(row: Row) -> NDArray[np.bool_] | None:
        numbers = [version_number(version, lineage) for version in row.versions]
        new = [n is not None and n >= oldest for n in numbers]
        # The last entry is for tokens that no model sampled. Their version is -1, which indexes the array from its end.
        return None if all(new) else np.array([*new, True], dtype=bool)[row.version]

    return keep_tokens(rows, fresh)
