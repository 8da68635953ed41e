"""Redo: a recorded update, applied again to the weights that it was applied to.

The tapes are read as the update read them, and all that the record says of the update is compared with what comes out:
tokens, weights in the loss, learning rate, loss and gradient norm, bit for bit. Resuming a run and reproducing one are
this walk. Where the record comes from, and what is made of a difference, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..tapes.errors import NoSuchTape, NotATape, TapereelError
from ..tapes.records import Use
from .plan import Plan, Source
from .trainer import UpdateStats
from .use import ChangedTape

if TYPE_CHECKING:
    from .history import History


class BrokenHistory(TapereelError, ValueError):
    """The recorded updates can't be applied: a tape is missing, or a checkpoint belongs to another run."""


class Differs(BrokenHistory):
    """An update isn't what its record says."""

    def __init__(self, use: Use, field: str, sentence: str, *, recorded: Any = None, found: Any = None) -> None:
        super().__init__(f"lineage {use.lineage!r}: update {use.update} {sentence}")
        self.update, self.field, self.sentence = use.update, field, sentence
        self.recorded, self.found = recorded, found


class GoneTape(BrokenHistory):
    """A tape that an update trained on isn't in the run any more."""

    def __init__(self, use: Use, error: Exception) -> None:
        super().__init__(f"lineage {use.lineage!r}: update {use.update} can't be applied again: {error}")
        self.update = use.update


def apply_again(history: History, epochs: Sequence[Use]) -> tuple[UpdateStats, tuple[Use, ...]]:
    """Apply one update, recorded in `epochs`, to the history's weights; gives its account and its records as they are
    made now. Differs or GoneTape where it isn't what was recorded."""
    use = epochs[0]
    if use.update != history.updates:
        raise BrokenHistory(
            f"lineage {history.lineage!r}: update {history.updates} is not in the ledger, but update "
            f"{use.update} is; the run directory is incomplete"
        )
    info: Any = use.info
    with with_threads((info.get("on") or {}).get("threads")):
        try:
            stats, again = history.update(Plan.of(info), as_read(history, use))
        except ChangedTape as error:
            raise Differs(use, "tape", f"can't be applied again: {error}") from error
        except (NoSuchTape, NotATape) as error:
            raise GoneTape(use, error) from error
    try:
        for then, now in zip(epochs, again, strict=False):
            _compare(then, now)
    except Differs as error:
        raise _by_recipe(error, use, again[0]) from None
    return stats, again


def as_read(history: History, use: Use) -> Source:
    """Tapes with the content that they had for that update. ChangedTape where it isn't there any more."""
    pins: Any = use.info.get("pins") or {}
    return lambda tape: history.from_store(tape, tuple(pins[tape]) if pins.get(tape) else None)


@contextmanager
def with_threads(recorded: int | None) -> Iterator[None]:
    """With as many threads as then: sums in another order have other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(recorded or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_recipe(error: Differs, use: Use, again: Use) -> Differs:
    """The recipe's digest is asked last: a library that has given a word a new constant changes it, and no update."""
    then: Any = use.info.get("on") or {}
    now: Any = again.info.get("on") or {}
    if then.get("recipe") in (None, now.get("recipe")):
        return error
    return Differs(
        use,
        "recipe",
        "was made by another recipe than the configuration gives now, and applied again "
        f"trains on other tokens or weights than recorded: {error.sentence}",
        recorded=then["recipe"],
        found=now.get("recipe"),
    )


def _compare(use: Use, again: Use) -> None:
    for k in range(max(len(use.items), len(again.items))):
        then, now = (list(u.items[k]) if k < len(u.items) else None for u in (use, again))
        if then != now:
            raise Differs(
                use,
                "items",
                f"applied again trains on other tokens or weights than recorded: {_item(now)} "
                f"where the record has {_item(then)}; the code, the tapes or the configuration changed",
                recorded=then,
                found=now,
            )
    for field in ("stale", "filtered", "context", "skipped", "lr", "loss", "grad_norm"):
        then, now = use.info.get(field), again.info.get(field)
        if field in use.info and then != now:
            name = field.replace("_", " ")
            what = (
                f"sets other tokens aside as {name}"
                if isinstance(now, list)
                else f"has {name} {now!r}, the record says {then!r}"
            )
            raise Differs(
                use,
                field,
                f"applied again {what}: the weights, a tape, the code or the configuration "
                f"changed{_elsewhere(use, again)}",
                recorded=then,
                found=now,
            )


def _item(item: Any) -> str:
    if item is None:
        return "nothing"
    tape, call, start, end, weight = item
    return f"tokens [{start}, {end}) of call {call} of tape {tape} with weight {weight!r}"


def elsewhere(then: Any, now: Any) -> str:
    """What of torch and the machine is other than at the update; empty where all is the same."""
    names = [
        f"{name} {now.get(name)} and not {value}"
        for name, value in (then or {}).items()
        if name != "recipe" and now.get(name) != value
    ]
    return ", ".join(names)


def _elsewhere(use: Use, again: Use) -> str:
    other = elsewhere(use.info.get("on"), again.info.get("on"))
    return f" (here is {other})" if other else ""
