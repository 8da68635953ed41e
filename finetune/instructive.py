"""Which tapes of a run are worth a look, and why. Reads summaries first, and few tapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tapes.store import Store

LOOKED_AT = 200
"""Newest tapes that are read in search of a split row."""


def instructive(store: Store) -> Iterator[tuple[str, str]]:
    """(tape id, why) of tapes that are worth a look, the most telling first; each at most once."""
    seen: set[str] = set()
    for name, why in _telling(store):
        if name not in seen:
            seen.add(name)
            yield name, why


def _telling(store: Store) -> Iterator[tuple[str, str]]:
    summaries = {summary.id: summary for summary in store.summaries(closed=True)}
    lineages = store.lineages()
    uses = [use for lineage in lineages.living for use in lineages.ledger(lineage).uses]
    for use in reversed(uses):
        taken = [summaries[name] for name in use.info.get("tapes") or () if name in summaries]  # type: ignore[union-attr]
        groups: dict[str, list[Any]] = {}
        for summary in taken:
            if summary.reward is not None:
                groups.setdefault(summary.group or summary.id, []).append(summary)
        spread = {g: max(s.reward for s in found) - min(s.reward for s in found) for g, found in groups.items()}
        widest = max(spread, key=spread.__getitem__, default=None)
        if widest is not None and spread[widest] > 0:
            among = f"in its group of {len(groups[widest])}, the one that differs most in update {use.update}"
            yield max(groups[widest], key=lambda s: s.reward).id, f"earned most {among}"
            yield min(groups[widest], key=lambda s: s.reward).id, f"earned least {among}"
            break
    several = "(select tape from versions group by tape having count(*) > 1)"
    for summary in reversed(store.index.tapes(f"id in {several} and status is not null", [])):
        yield summary.id, "sampled by more than one version of the policy"
        break
    newest = [summary for summary in reversed(summaries.values()) if summary.calls > 1][:LOOKED_AT]
    for summary in newest:
        if any(call.split for call in store.tape(summary.id, refresh=False).calls):
            yield summary.id, "one of its calls could not go on in the row before"
            break
    broken = (s for s in reversed(summaries.values()) if s.status == "error")
    yield from ((s.id, f"ended with an error of the {s.cause}") for s in list(broken)[:1])
    yield from ((name, "among the newest") for name in reversed(summaries))
