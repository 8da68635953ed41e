"""The books close, place by place, and say where they don't; the ledger is the queue and the redo log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.tapes import NotATape
from tapereel.tapes.records import Use, Void
from tapereel.tapes.store.books import PLACES, Books, BooksFold, spent
from tapereel.tapes.store.ledger import Lineages

from .lab import Lab

lab = Lab()


def account(*bodies: bytes) -> Books:
    books = BooksFold()
    for body in bodies:
        books.add(body)
    return books.books()


def tape(
    name: str,
    tokens: int,
    *,
    status: str | None = "finished",
    cause: str | None = None,
    scored: bool = True,
    split: str = "train",
    sampled: bool = True,
) -> list[bytes]:
    """One episode of one call; open when `status` is None."""
    bodies = [lab.begin(name, split=split), lab.step(name, "see", action=False)]
    bodies.append(lab.call(name, f"{name}.1", tokens, version="main:0" if sampled else None, logprobs=sampled))
    bodies.append(lab.step(name, "do"))
    if scored:
        bodies.append(lab.reward(name))
    if status is not None:
        bodies.append(lab.end(name, status, cause))
    return bodies


def places(books: Books) -> dict[str, int]:
    assert books.closes, books.findings
    assert set(books.tokens) == set(PLACES)
    return {place: n for place, n in books.tokens.items() if n}


@pytest.mark.parametrize(
    ("place", "bodies"),
    [
        ("unused", tape("a", 5)),
        ("unused", tape("a", 5, status="truncated")),
        ("unused", tape("a", 5, status="limit", cause="turns")),
        ("unused", tape("a", 5, status="error", cause="agent")),
        ("errored", tape("a", 5, status="limit", cause="seconds")),
        ("errored", tape("a", 5, status="error", cause="environment")),
        ("errored", tape("a", 5, status="error", cause="model")),
        ("errored", tape("a", 5, status="error", cause="ours")),
        ("errored", tape("a", 5, status="crashed")),
        ("cancelled", tape("a", 5, status="cancelled")),
        ("held_out", tape("a", 5, split="eval")),
        ("held_out", tape("a", 5, split="eval", status="cancelled")),
        ("unscored", tape("a", 5, scored=False)),
        ("in_flight", tape("a", 5, status=None)),
        ("in_flight", tape("a", 5, status=None, split="eval")),
    ],
)
def test_each_place_has_its_tokens(place: str, bodies: list[bytes]) -> None:
    assert places(account(*bodies)) == {place: 5}


def test_an_update_divides_a_call() -> None:
    use = lab.use(
        0,
        [("a", "a.1", 0, 3, 0.1)],
        stale=[["a", "a.1", 3, 5]],
        filtered=[["a", "a.1", 5, 6]],
        context=[["a", "a.1", 6, 9]],
    )
    books = account(*tape("a", 10), use)
    assert places(books) == {"trained": 3, "stale": 2, "filtered": 1, "context": 3, "unused": 1}
    assert books.applied == 3


def test_a_token_that_was_trained_once_stays_trained() -> None:
    first = lab.use(0, [("a", "a.1", 0, 4, 0.1)])
    again = lab.use(0, [("a", "a.1", 0, 2, 0.1)], epoch=1, stale=[["a", "a.1", 2, 4]])
    books = account(*tape("a", 4), first, again)
    assert places(books) == {"trained": 4}
    assert books.applied == 6


def test_an_unscored_tape_may_be_imitated() -> None:
    use = lab.use(0, [("a", "a.1", 0, 4, 0.1)])
    assert places(account(*tape("a", 5, scored=False), use)) == {"trained": 4, "unscored": 1}


def test_written_text_is_counted_beside_the_books() -> None:
    use = lab.use(0, [("a", "a.1", 0, 4, 0.1)])
    books = account(*tape("a", 6, sampled=False, split="demo"), use)
    assert places(books) == {}
    assert (books.sampled, books.authored, books.authored_trained) == (0, 6, 4)


def test_tokens_that_a_layer_added_are_written_text() -> None:
    r, a = lab.records, lab.arrays
    text = r.Call(tape="a", call="a.1", by="agent", text="hello", at=1.0).body()
    layer = r.Tokens(tape="a", call="a.1", prompt=a.ints([1]), completion=a.ints([1, 2, 3]), tokenizer="t").body()
    books = account(lab.begin("a"), text, lab.end("a"), layer)
    assert books.closes
    assert (books.authored, books.textual, books.sampled) == (3, 1, 0)


def test_tokens_that_a_hosted_model_counted_itself_are_told_and_unknown_ones_are_not_zero() -> None:
    r = lab.records
    used = r.Usage(prompt_tokens=10, completion_tokens=5)
    calls = [
        {"text": "a", "usage": used},
        {"text": "b", "usage": used},
        {"text": "c"},
        {"finish": "error"},
    ]
    told = [r.Call(tape="a", call=f"a.{k}", by="agent", at=1.0, **more).body() for k, more in enumerate(calls)]
    books = account(lab.begin("a"), *told, lab.end("a"))
    assert books.reported == {"prompt": 20, "completion": 10, "unknown": 1}
    assert re.findall(r"\d+", spent(books.counts)) == ["10", "20", "1"]
    sampled = account(*tape("a", 4))
    assert (sampled.reported, re.findall(r"\d+", spent(sampled.counts))) == ({}, ["4"])
    assert re.findall(r"\d+", spent(account(lab.begin("a"), lab.end("a")).counts)) == ["0"]


def test_voided_updates_did_not_happen() -> None:
    uses = [lab.use(k, [(f"t{k}", f"t{k}.1", 0, 5, 0.1)]) for k in range(4)]
    tapes = [body for k in range(4) for body in tape(f"t{k}", 5)]
    void = lab.records.Void(lineage="main", update=1, into="next", reason="resumed from 1").body()
    assert places(account(*tapes, *uses, void)) == {"trained": 10, "unused": 10}
    again = lab.use(2, [("t3", "t3.1", 0, 5, 0.1)], lineage="next")
    assert places(account(*tapes, *uses, void, again)) == {"trained": 15, "unused": 5}


@pytest.mark.parametrize(
    ("what", "bodies"),
    [
        ("(eval)", [*tape("a", 5, split="eval"), lab.use(0, [("a", "a.1", 0, 5, 0.1)])]),
        ("cancelled", [*tape("a", 5, status="cancelled"), lab.use(0, [("a", "a.1", 0, 5, 0.1)])]),
        ("open", [*tape("a", 5, status=None), lab.use(0, [("a", "a.1", 0, 5, 0.1)])]),
        ("a.2", [*tape("a", 5), lab.use(0, [("a", "a.2", 0, 5, 0.1)])]),
        ("[0, 6)", [*tape("a", 5), lab.use(0, [("a", "a.1", 0, 6, 0.1)])]),
        ("twice", [*tape("a", 5), lab.use(0, [("a", "a.1", 0, 3, 0.1), ("a", "a.1", 2, 5, 0.1)])]),
        ("twice", [*tape("a", 5), lab.use(0, [("a", "a.1", 0, 5, 0.1)], stale=[["a", "a.1", 0, 1]])]),
        (
            "(update 0)",
            [*tape("a", 5), lab.use(0, [("a", "a.1", 0, 5, 0.1)]), lab.use(0, [("a", "a.1", 0, 5, 0.1)])],
        ),
        ("begins", [lab.begin("a"), lab.begin("a")]),
        ("began", [lab.end("a")]),
        ("after", [*tape("a", 5), lab.end("a")]),
        ("a.1", [*tape("a", 5, status=None), lab.call("a", "a.1", 5)]),
    ],
)
def test_what_does_not_close_is_named(what: str, bodies: list[bytes]) -> None:
    books = account(*bodies)
    assert not books.closes
    assert any(what in finding for finding in books.findings), books.findings


def test_attrition_is_told_by_cause_and_length() -> None:
    long = [lab.begin("b"), *(lab.step("b", str(k)) for k in range(5)), lab.end("b", "limit", "seconds")]
    books = account(*tape("a", 5), *long, *tape("c", 2, status="limit", cause="seconds"), *tape("d", 1, status=None))
    assert (books.begun, books.ended, books.open) == (4, 3, 1)
    (lost,) = (end for end in books.ends if not end.trainable)
    assert (lost.status, lost.cause, lost.episodes, lost.sampled) == ("limit", "seconds", 2, 2)
    assert lost.turns == {"1": 1, "4-7": 1}


status_and_cause = st.sampled_from(
    [
        ("finished", None),
        ("truncated", None),
        ("limit", "turns"),
        ("limit", "seconds"),
        ("error", "agent"),
        ("error", "ours"),
        ("cancelled", None),
        ("crashed", None),
        (None, None),
    ]
)


@settings(max_examples=150)
@given(st.data())
def test_the_books_close_whatever_a_lawful_run_does(data: st.DataObject) -> None:
    """Any episodes in any order; updates that take tokens of what may be trained on, each at most once."""
    bodies: list[bytes] = []
    free: list[tuple[str, str, int, int]] = []
    sampled = 0
    for k in range(data.draw(st.integers(0, 8))):
        status, cause = data.draw(status_and_cause)
        split, scored = data.draw(st.sampled_from(["train", "train", "eval", "demo"])), data.draw(st.booleans())
        n, drawn = data.draw(st.integers(0, 12)), data.draw(st.booleans())
        bodies += tape(f"t{k}", n, status=status, cause=cause, scored=scored, split=split, sampled=drawn)
        sampled += n if drawn else 0
        usable = status in ("finished", "truncated") or (status, cause) in (("limit", "turns"), ("error", "agent"))
        if usable and split != "eval":
            cuts = sorted(data.draw(st.sets(st.integers(0, n), max_size=3)))
            free += [(f"t{k}", f"t{k}.1", a, b) for a, b in pairwise(cuts)]
    for update in range(data.draw(st.integers(0, 3))):
        fates: dict[str, list[Any]] = {"trained": [], "stale": [], "filtered": [], "context": []}
        for item in list(free):
            fate = data.draw(st.sampled_from(["left", "left", *fates]))
            if fate != "left":
                fates[fate].append(item)
                free.remove(item)
        items = [(*item, 0.5) for item in fates.pop("trained")]
        bodies.append(lab.use(update, items, **{name: [list(item) for item in taken] for name, taken in fates.items()}))
    books = account(*bodies)
    assert books.closes, books.findings
    assert books.sampled == sampled


# The ledger


def use(update: int, *, lineage: str = "main", epoch: int = 0) -> Use:
    name = f"{lineage}{update}"
    return Use(lineage=lineage, update=update, epoch=epoch, items=((name, f"{name}.1", 0, 4, 0.5),))


def void(lineage: str, update: int, into: str) -> Void:
    return Void(lineage=lineage, update=update, into=into, reason="test")


def updates(records: Iterable[Use | Void], lineage: str) -> list[tuple[str, int]]:
    return [(use.lineage, use.update) for use in Lineages(records).ledger(lineage).uses]


def test_an_empty_ledger_starts_at_zero() -> None:
    ledger = Lineages().ledger("main")
    assert (ledger.next_update, ledger.uses, "t" in ledger) == (0, (), False)


def test_the_redo_log_is_in_order_whatever_the_order_of_reading() -> None:
    ledger = Lineages([use(2), use(0), use(1, epoch=1), use(1)]).ledger("main")
    assert [(u.update, u.epoch) for u in ledger.uses] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert ledger.next_update == 3
    assert "main1" in ledger
    assert "other" not in ledger


def test_what_was_set_aside_is_taken_too() -> None:
    record = Use(lineage="main", update=0, items=(), info={"filtered": [["a", "a.1", 0, 3]]})
    assert Lineages([record]).ledger("main").taken == {"a": {"a.1"}}


def test_a_lineage_goes_on_from_where_another_was_cut() -> None:
    records = [*(use(k) for k in range(4)), void("main", 1, "b"), use(2, lineage="b"), use(3, lineage="b")]
    assert updates(records, "b") == [("main", 0), ("main", 1), ("b", 2), ("b", 3)]
    records += [void("b", 2, "c"), use(3, lineage="c")]
    assert updates(records, "c") == [("main", 0), ("main", 1), ("b", 2), ("c", 3)]
    assert Lineages(records).living == ["c"]
    ended = Lineages(records).ledger("main").ended
    assert ended is not None
    assert ended.into == "b"


@pytest.mark.parametrize(
    ("what", "records"),
    [
        (r"\(update 0\)", [use(0), use(0)]),
        ("main <- main", [void("main", 0, "main")]),
        (r"'main'.*\b2\b", [void("a", 0, "main"), void("b", 0, "main")]),
        (r"\b2\b.*'main'.*\b3\b", [use(0, lineage="a"), void("a", 3, "main"), use(2)]),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(what: str, records: list[Use | Void]) -> None:
    with pytest.raises(NotATape, match=what):
        Lineages(records).ledger("main")


def led(record: Use | Void, lead: int) -> Use | Void:
    return record.model_copy(update={"lead": lead})


def counted(*records: Use | Void) -> list[tuple[int, int, int | None]]:
    return [(one.update, one.epoch, one.lead) for one in Lineages(records).ledger("main").uses]


def test_a_record_of_a_lead_that_was_replaced_does_not_count() -> None:
    before = [led(use(0), 1), led(use(1), 1)]
    late, later = led(use(2), 1), led(use(2), 2)
    assert counted(*before, late) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)], "no later lead did this update"
    assert counted(*before, late, later) == counted(*before, later, late) == [(0, 0, 1), (1, 0, 1), (2, 0, 2)]
    much_later = led(use(3), 1)
    assert counted(*before, later, much_later) == [(0, 0, 1), (1, 0, 1), (2, 0, 2)]
    assert Lineages([*before, late, later, much_later]).refused == [late, much_later]
    assert counted(*before, led(use(1, epoch=1), 2)) == [(0, 0, 1), (1, 0, 1), (1, 1, 2)], "a resumed update"


def test_records_without_a_lease_all_count() -> None:
    assert counted(led(use(0), 3), use(1)) == [(0, 0, 3), (1, 0, None)]
    assert Lineages([led(use(0), 3), use(1)]).refused == []


def test_a_void_of_a_lead_that_was_replaced_does_not_count() -> None:
    late = led(void("main", 0, "b"), 1)
    ledger = Lineages([led(use(0), 1), led(use(1), 2), late])
    assert (ledger.living, ledger.refused) == (["main"], [late])
    assert Lineages([led(use(0), 1), late]).living == ["b"]
    both = [led(use(0), 1), late, led(void("main", 0, "c"), 2), led(use(1, lineage="c"), 2)]
    assert [one.update for one in Lineages(both).ledger("c").uses] == [0, 1]
    assert Lineages(both).ledger("main").ended == both[2]


def test_updates_that_two_processes_recorded_are_listed() -> None:
    records = [use(0), use(1), use(1), use(2), use(2)]
    assert Lineages(records).doubles == {"main": [1, 2]}
    with pytest.raises(NotATape, match=r"'main'.*\b2\b.*\(update 1, 2\)"):
        Lineages(records).ledger("main")


def test_a_range_that_is_none_is_refused() -> None:
    record = Use(lineage="main", update=0, items=(), info={"stale": [["a", 1]]})
    with pytest.raises(NotATape, match=r"\['a', 1\].*stale"):
        Lineages([record]).ledger("main")
