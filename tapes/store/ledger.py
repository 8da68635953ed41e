"""The ledger is the training history of a lineage, folded from `use` and `void` records. It shows which calls are
already used, and it is a redo log.

A lineage is a series of weights, each trained from the ones before it. A `void` record ends a lineage after a given
update, and names the lineage that continues from there. So the history of a lineage begins with its parent's
history, up to the update at which the `void` record cut the parent. Then its own `use` records follow, in the order of
(update, epoch).

Applying the history to the base weights gives the lineage's weights. No update is in a history twice. Applying an
update twice would not give the weights that sampled the later tapes.

A run has one lead at a time, which is the process with the lease (`lease`). A lead that was just replaced may still
write one record, which the later lead did not read. That record doesn't count. Readers recognise it because a record of
the same or an earlier update has a higher lead epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ..errors import NotATape
from ..records import Use, Void

Fate = Literal["trained", "stale", "filtered", "context"]
FATES: tuple[Fate, ...] = ("trained", "stale", "filtered", "context")
"""The possible fates of a token that an update names: the update trained on it, or set it aside for one of three
reasons. If several updates name a token, the fate that comes first in this order counts."""
Range = tuple[str, str, int, int]
"""(tape, call, start, end), a half-open range of completion tokens in a call."""


def ranges(use: Use, fate: Fate) -> Iterator[Range]:
    """Yield the ranges of tokens that had this fate in an update. The trained tokens are in `use.items`, and the tokens
    with another fate are in `use.info`."""
    if fate == "trained":
        for tape, call, start, end, _ in use.items:
            yield tape, call, start, end
        return
    listed: Any = use.info.get(fate) or []
    for entry in listed if isinstance(listed, list | tuple) else [listed]:
        match entry:
            case [str(tape), str(call), int(start), int(end)]:
                yield tape, call, start, end
            case _:
                raise NotATape(
                    f"update {use.update} of lineage {use.lineage!r} lists {entry!r} as {fate}; an entry is "
                    "[tape, call, start, end]"
                )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The history of one lineage."""

    lineage: str
    uses: tuple[Use, ...] = ()
    """The redo log. It has every update that counts, including inherited ones, in the order of (update, epoch)."""
    ended: Void | None = None
    """The `void` that ended this lineage, or None. It also names the lineage that continues this one."""
    taken: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)
    """The calls that an update trained on or set aside, by tape. The loop must not use these calls again."""

    @property
    def next_update(self) -> int:
        """The number of the next update, which is one more than the last recorded one, or 0 at the start."""
        return self.uses[-1].update + 1 if self.uses else 0

    def taught(self, before: int) -> dict[str, list[int]]:
        """Return the tapes that the weights after `before` updates were trained on, in the order of first use. For each
        tape, list the updates that trained on its tokens."""
        taught: dict[str, list[int]] = {}
        for use in self.uses:
            if use.update < before:
                for tape in dict.fromkeys(item[0] for item in use.items):
                    taught.setdefault(tape, []).append(use.update)
        return taught

    def __contains__(self, tape: object) -> bool:
        """Return whether an update used or set aside a token on the tape."""
        return tape in self.taken


class Lineages:
    """Folds all `use` and `void` records of a run. Add them in any order, and then query the result."""

    def __init__(self, records: Iterable[Use | Void] = ()) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.voids: list[Void] = []
        for record in records:
            self.add(record)

    def add(self, record: Use | Void) -> None:
        """Add a record."""
        if isinstance(record, Use):
            self.uses.setdefault(record.lineage, []).append(record)
        else:
            self.voids.append(record)

    @property
    def names(self) -> list[str]:
        """Every lineage that a record names. Ancestors come first if the order is known."""
        voids = self._voids()
        return list(dict.fromkeys([*self.uses, *(name for void in voids for name in (void.lineage, void.into))]))

    @property
    def living(self) -> list[str]:
        """The lineages that no `void` ended."""
        ended = {void.lineage for void in self._voids()}
        return [name for name in self.names if name not in ended]

    @property
    def refused(self) -> list[Use | Void]:
        """The `use` and `void` records that don't count, because another process had taken the run over when they were
        written."""
        every = [*self.voids, *(use for uses in self.uses.values() for use in uses)]
        counted = {
            id(record) for record in (*self._voids(), *(u for uses in self.uses.values() for u in _counted(uses)))
        }
        return [record for record in every if id(record) not in counted]

    @property
    def doubles(self) -> dict[str, list[int]]:
        """The updates of each lineage that are recorded twice because two processes led the run at once."""
        found: dict[str, list[int]] = {}
        for lineage, uses in self.uses.items():
            times = Counter((use.update, use.epoch) for use in _counted(uses))
            twice = sorted({update for (update, _), n in times.items() if n > 1})
            if twice:
                found[lineage] = twice
        return found

    def _voids(self) -> list[Void]:
        """Return the `void` records that count: those without a lease, and those with the newest lease in their
        lineage."""
        leads: dict[str, int] = {}
        for record in (*self.voids, *(use for uses in self.uses.values() for use in uses)):
            leads[record.lineage] = max(leads.get(record.lineage, 0), record.lead or 0)
        return [void for void in self.voids if void.lead is None or void.lead == leads[void.lineage]]

    def ledger(self, lineage: str) -> Ledger:
        """Return the lineage's history, or an empty history if no record names the lineage. Raises NotATape if the
        lineage's records contradict each other."""
        uses = self._history(lineage, ())
        taken: dict[str, set[str]] = {}
        for use in uses:
            for fate in FATES:
                for tape, call, _, _ in ranges(use, fate):
                    taken.setdefault(tape, set()).add(call)
        ended = next((void for void in self._voids() if void.lineage == lineage), None)
        return Ledger(lineage, tuple(uses), ended, taken)

    def _history(self, lineage: str, heirs: tuple[str, ...]) -> list[Use]:
        if lineage in heirs:
            raise NotATape(f"lineage {lineage!r} continues itself: {' <- '.join([*heirs, lineage])}")
        above = [void for void in self._voids() if void.into == lineage]
        if len(above) > 1:
            raise NotATape(f"lineage {lineage!r} continues {len(above)} others; a lineage has one parent")
        inherited = self._history(above[0].lineage, (*heirs, lineage)) if above else []
        cut = above[0].update if above else -1
        history = [use for use in inherited if use.update <= cut]
        own = _counted(self.uses.get(lineage, ()))
        for use in own:
            if use.update <= cut and above:
                raise NotATape(
                    f"update {use.update} of lineage {lineage!r} belongs to its parent, whose part ends at update {cut}"
                )
        history += own
        for a, b in pairwise(history):
            if (a.update, a.epoch) == (b.update, b.epoch):
                twice = self.doubles[a.lineage]
                listed = f"{', '.join(map(str, twice[:20]))}{', …' if len(twice) > 20 else ''}"
                raise NotATape(
                    f"lineage {a.lineage!r}: {len(twice)} updates are recorded twice (update {listed}): two processes "
                    "trained in this run at once. Its tapes can be read; begin a new run to train further"
                )
        return history


def _counted(uses: Iterable[Use]) -> list[Use]:
    """Return the updates in order. Updates that a process recorded after another process had taken the run over are
    left out."""
    counted: list[Use] = []
    newest = 0
    for use in sorted(uses, key=lambda use: (use.update, use.epoch, -(use.lead or 0))):
        if use.lead is None or use.lead >= newest:
            counted.append(use)
            newest = max(newest, use.lead or 0)
    return counted
