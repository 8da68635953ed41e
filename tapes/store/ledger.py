"""The ledger: the training history of a lineage, folded from `use` and `void` records. It is queue and redo log.

A lineage's history is its parent's history up to the update at which a `void` cut it, then its own `use` records in the
order of (update, epoch). Applying that history to the base weights gives the lineage's weights. No update is in it
twice: an update applied twice would give other weights than those that sampled the later tapes.

A run has one lead at a time (`lease`). A lead that was just replaced may still write one record. The later lead did not
read it, so it doesn't count: it has a smaller epoch than a record of the same or an earlier update.
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
"""The fates of a token in an update. If several updates name a token, it has the first of these that applies."""
Range = tuple[str, str, int, int]
"""(tape, call, start, end): completion tokens of a call, half-open."""


def ranges(use: Use, fate: Fate) -> Iterator[Range]:
    """The tokens with that fate in one update: `trained` ones are its items, its `info` lists the others."""
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
    """The redo log: every update that counts, inherited ones included, by (update, epoch)."""
    ended: Void | None = None
    """The `void` that ended this lineage, and which another lineage continues; None while it lives."""
    taken: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)
    """tape -> its calls that an update trained on or set aside. The loop must not use these calls again."""

    @property
    def next_update(self) -> int:
        """The number of the next update: one more than the last that was recorded, 0 at the start."""
        return self.uses[-1].update + 1 if self.uses else 0

    def taught(self, before: int) -> dict[str, list[int]]:
        """tape -> the updates below `before` that trained on a token of it, tapes in the order of their first use.

        These tapes taught the weights after `before` updates.
        """
        taught: dict[str, list[int]] = {}
        for use in self.uses:
            if use.update < before:
                for tape in dict.fromkeys(item[0] for item in use.items):
                    taught.setdefault(tape, []).append(use.update)
        return taught

    def __contains__(self, tape: object) -> bool:
        """Whether an update used or set aside a token of the tape."""
        return tape in self.taken


class Lineages:
    """All `use` and `void` records of a run, folded. Feed them in any order, then ask."""

    def __init__(self, records: Iterable[Use | Void] = ()) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.voids: list[Void] = []
        for record in records:
            self.add(record)

    def add(self, record: Use | Void) -> None:
        """One more record."""
        if isinstance(record, Use):
            self.uses.setdefault(record.lineage, []).append(record)
        else:
            self.voids.append(record)

    @property
    def names(self) -> list[str]:
        """Every lineage named, oldest ancestors first if that is known."""
        voids = self._voids()
        return list(dict.fromkeys([*self.uses, *(name for void in voids for name in (void.lineage, void.into))]))

    @property
    def living(self) -> list[str]:
        """The lineages that no `void` ended."""
        ended = {void.lineage for void in self._voids()}
        return [name for name in self.names if name not in ended]

    @property
    def refused(self) -> list[Use | Void]:
        """The records that don't count: a lead wrote them after a later one had taken the run over."""
        every = [*self.voids, *(use for uses in self.uses.values() for use in uses)]
        counted = {
            id(record) for record in (*self._voids(), *(u for uses in self.uses.values() for u in _counted(uses)))
        }
        return [record for record in every if id(record) not in counted]

    @property
    def doubles(self) -> dict[str, list[int]]:
        """Lineage -> the updates that are recorded twice. Two processes led that run at once, without leases."""
        found: dict[str, list[int]] = {}
        for lineage, uses in self.uses.items():
            times = Counter((use.update, use.epoch) for use in _counted(uses))
            twice = sorted({update for (update, _), n in times.items() if n > 1})
            if twice:
                found[lineage] = twice
        return found

    def _voids(self) -> list[Void]:
        """The voids that count: of the last lead that voided the lineage, unless a later one continued it."""
        leads: dict[str, int] = {}
        for record in (*self.voids, *(use for uses in self.uses.values() for use in uses)):
            leads[record.lineage] = max(leads.get(record.lineage, 0), record.lead or 0)
        return [void for void in self.voids if void.lead is None or void.lead == leads[void.lineage]]

    def ledger(self, lineage: str) -> Ledger:
        """The history of that lineage; empty when no record names it. NotATape when its records contradict."""
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
    """The updates in their order, without those that a lead recorded after a later one had taken the run over."""
    counted: list[Use] = []
    newest = 0
    for use in sorted(uses, key=lambda use: (use.update, use.epoch, -(use.lead or 0))):
        if use.lead is None or use.lead >= newest:
            counted.append(use)
            newest = max(newest, use.lead or 0)
    return counted
