"""What training did with each tape, read from the ledger: the tapes of each update, the token ranges of each tape.

Only living lineages count. Advantages are not in the ledger: `finetune/inspect/explainer.py` computes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..records import Use
from ..store.ledger import FATES, Fate, ranges
from ..store.store import Store


class TokenUse(NamedTuple):
    """Completion tokens of a call in one update."""

    call: str
    start: int
    end: int
    fate: Fate
    weight: float
    """In the update's loss; 0 for tokens outside the loss."""
    lineage: str
    update: int


class Update(NamedTuple):
    """One update, for the curve."""

    lineage: str
    update: int
    phase: str
    skipped: str | None
    """Why the update was not applied; None where it was."""
    tapes: tuple[str, ...]


class Uses:
    """The updates that a run has when this object is made."""

    def __init__(self, store: Store) -> None:
        self.updates: list[Update] = []
        self._uses: list[Use] = []
        self._of_tape: dict[str, list[int]] = {}
        lineages = store.lineages()
        for lineage in lineages.living:
            for use in lineages.ledger(lineage).uses:
                tapes = _tapes(use)
                for tape in tapes:
                    self._of_tape.setdefault(tape, []).append(len(self._uses))
                skipped = use.info.get("skipped")
                self.updates.append(
                    Update(
                        use.lineage,
                        use.update,
                        str(use.info.get("phase") or "training"),
                        str(skipped) if skipped else None,
                        tapes,
                    )
                )
                self._uses.append(use)

    def of(self, tape: str) -> list[TokenUse]:
        """The tape's token ranges, update by update. Within an update the strongest fate comes last, so that a reader
        who lets later ranges overwrite earlier ones keeps `trained` over `stale`."""
        found: list[TokenUse] = []
        for k in self._of_tape.get(tape, ()):
            use = self._uses[k]
            for fate in reversed(FATES):
                if fate == "trained":
                    found += [
                        TokenUse(call, start, end, fate, weight, use.lineage, use.update)
                        for name, call, start, end, weight in use.items
                        if name == tape
                    ]
                else:
                    found += [
                        TokenUse(call, start, end, fate, 0.0, use.lineage, use.update)
                        for name, call, start, end in ranges(use, fate)
                        if name == tape
                    ]
        return found

    def taken_by(self, tape: str) -> list[dict[str, Any]]:
        """The updates that took the tape."""
        return [
            {"lineage": u.lineage, "update": u.update, "phase": u.phase, "skipped": u.skipped}
            for k in self._of_tape.get(tape, ())
            for u in (self.updates[k],)
        ]


def _tapes(use: Use) -> tuple[str, ...]:
    listed = use.info.get("tapes")
    named = map(str, listed) if isinstance(listed, list | tuple) else ()
    return tuple(dict.fromkeys([*named, *(item[0] for item in use.items)]))
