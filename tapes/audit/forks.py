"""The tree of forks: which tapes were forked from which, and at which turn, without reading the tapes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..records import Begin
from ..value import Value

if TYPE_CHECKING:
    from ..store.store import Store
    from ..store.summary import Summary


class Fork(Value):
    """A tape, and the tapes that were forked from it."""

    tape: str
    parent: str | None
    """None for a tape that begins with its task."""
    turn: int | None
    """Turns of the parent in its prefix; None without a parent."""
    unverified: str | None
    """Why its prefix couldn't be verified, where it was forked all the same; None otherwise."""
    status: str | None
    """None while it is open."""
    reward: float | None
    """None: not scored."""
    turns: int
    """Its own actions, without those of its prefix."""
    split: str
    agent: str
    group: str | None
    attempt: int
    children: tuple[Fork, ...] = ()
    """Sorted by turn, then by begin."""


def tree(store: Store, tape: str | None = None) -> tuple[Fork, ...]:
    """Every tree of a run that has forks, or the whole tree that contains `tape` (an id or the start of one).

    A fork whose parent is in another run is the root of its tree. NoSuchTape where no tape has that id.
    """
    tapes = {summary.id: summary for summary in store.summaries()}
    children: dict[str, list[str]] = defaultdict(list)
    for summary in tapes.values():
        if summary.parent in tapes:
            children[summary.parent].append(summary.id)
    if tape is None:
        return tuple(
            _fork(store, name, tapes, children)
            for name, s in tapes.items()
            if s.parent not in tapes and (name in children or s.parent is not None)
        )
    name = store.tape(tape, refresh=False).id
    while (above := tapes[name].parent) is not None and above in tapes:
        name = above
    return (_fork(store, name, tapes, children),)


def _fork(store: Store, name: str, tapes: dict[str, Summary], children: dict[str, list[str]]) -> Fork:
    s, begin = tapes[name], _begin(store, name) if tapes[name].parent is not None else None
    parent = begin.parent if begin is not None else None
    below = [_fork(store, child, tapes, children) for child in children.get(name, ())]
    return Fork(
        tape=name,
        parent=s.parent,
        turn=parent.turn if parent is not None else None,
        unverified=parent.unverified if parent is not None else None,
        turns=s.actions,
        **{name: getattr(s, name) for name in ("status", "reward", "split", "agent", "group", "attempt")},
        children=tuple(sorted(below, key=lambda fork: fork.turn or 0)),
    )


def _begin(store: Store, tape: str) -> Begin:
    places = [place for place in store.index.places(tape) if place.t == "begin"]
    return Begin.model_validate_json(next(store.bodies(places[:1])))
