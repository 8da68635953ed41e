"""Chooses the tapes of a run that `tapereel explain` shows first. Reads the summaries, and few tapes whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...tapes.store.store import Store, Summary
from ..data.update_info import UpdateInfo

LOOKED_AT = 200
"""Newest tapes that the search for a split row reads."""


def instructive(store: Store) -> Iterator[tuple[str, str]]:
    """(tape id, reason), the most instructive tape first; each tape at most once."""
    seen: set[str] = set()
    for name, why in _candidates(store):
        if name not in seen:
            seen.add(name)
            yield name, why


def _candidates(store: Store) -> Iterator[tuple[str, str]]:
    closed = store.summaries(closed=True)
    yield from _opposites(store, {summary.id: summary for summary in closed})
    several = "(select tape from versions group by tape having count(*) > 1)"
    for summary in reversed(store.index.tapes(f"id in {several} and status is not null", [])):
        yield summary.id, "sampled by more than one version of the policy"
        break
    yield from _split(store, closed)
    broken = [summary for summary in closed if summary.status == "error"]
    yield from ((summary.id, f"ended with an error of the {summary.cause}") for summary in broken[-1:])
    yield from ((summary.id, "among the newest") for summary in reversed(closed))


def _opposites(store: Store, closed: Mapping[str, Summary]) -> Iterator[tuple[str, str]]:
    """Best and worst of the group whose rewards differ most, in the newest update that has such a group."""
    lineages = store.lineages()
    for use in reversed([use for lineage in lineages.living for use in lineages.ledger(lineage).uses]):
        groups: dict[str, list[tuple[float, str]]] = {}
        for summary in (closed[name] for name in UpdateInfo.of(use).tapes if name in closed):
            if summary.reward is not None:
                groups.setdefault(summary.group or summary.id, []).append((summary.reward, summary.id))
        widest = max(groups.values(), key=lambda group: max(group)[0] - min(group)[0], default=[])
        if widest and max(widest)[0] > min(widest)[0]:
            among = f"in its group of {len(widest)}, the one that differs most in update {use.update}"
            yield max(widest)[1], f"earned most {among}"
            yield min(widest)[1], f"earned least {among}"
            return


def _split(store: Store, closed: Sequence[Summary]) -> Iterator[tuple[str, str]]:
    for summary in [summary for summary in reversed(closed) if summary.calls > 1][:LOOKED_AT]:
        if any(call.split for call in store.tape(summary.id, refresh=False).calls):
            yield summary.id, "one of its calls could not extend the row of the call before"
            return
