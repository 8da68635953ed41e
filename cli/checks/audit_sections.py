"""The sections of an audit, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...tapes.audit.auditor import Audit, Spent
from ...tapes.common.stats import fixed
from ...tapes.store.books import Books, left_out_by
from ..console import Section

MOST = 20
"""Maximum number of rows in a printed table. `--json` has all rows."""
UNKNOWN = "?"


def sections(books: Books, audit: Audit) -> list[Section]:
    """Return all sections in reading order."""
    return [
        _tokens(books),
        _ends(books, audit),
        _lengths(audit, "turns"),
        _lengths(audit, "tokens"),
        *_cost_sections(audit),
        _components(audit),
        _earned(audit),
        _anomalies(audit),
    ]


def _tokens(books: Books) -> Section:
    rows = [
        (place.replace("_", " "), f"{n:,}", _share(n / books.sampled if books.sampled else None))
        for place, n in books.tokens.items()
        if n
    ]
    if books.sampled or rows:
        rows += [("together", f"{sum(books.tokens.values()):,}", ""), ("sampled", f"{books.sampled:,}", "")]
    notes = []
    if books.authored:
        notes.append(f"in addition: {books.authored:,} authored tokens, {books.authored_trained:,} of them trained on")
    if books.left_out:
        left = sum(books.left_out.values())
        notes.append(f"labels leave {left:,} sampled tokens out of training: {left_out_by(books.left_out)}")
    if books.applied:
        notes.append(f"{books.applied:,} token-updates applied")
    if books.textual:
        notes.append(f"{books.textual:,} calls of engines that return only text: their tokens appear only in the cost")
    return Section(("tokens", "#number", "#share"), rows, "sampled tokens", "none", tuple(notes))


def _ends(books: Books, audit: Audit) -> Section:
    rows = [
        (
            end.status if end.cause is None else f"{end.status} ({end.cause})",
            f"{end.episodes:,}",
            f"{end.unscored:,}",
            "if scored" if end.trainable else "never",
            f"{end.sampled:,}",
            f"{end.seconds:,.1f}",
            _first_tapes(end.tapes),
        )
        for end in audit.ends
    ]
    ended = f"{audit.tapes:,} episodes began, {_ended(audit.tapes - audit.open, audit.open)}"
    if audit.unscored:
        ended += f"; {audit.unscored:,} of the ended ones are unscored, which doesn't count as reward 0"
    whole = f"the whole run: {books.begun:,} began, {_ended(books.ended, books.open)}"
    notes = (ended,) if audit.tapes == books.begun else (ended, whole)
    return Section(
        ("end", "#number", "#unscored", "trained on", "#tokens", "#seconds", "tapes"),
        rows,
        "how episodes ended",
        "no episode ended",
        notes,
        optional=("seconds", "tapes"),
    )


def _ended(ended: int, open: int) -> str:
    return f"{ended:,} ended, {open:,} still open" if open else "all of them ended"


def _lengths(audit: Audit, length: str) -> Section:
    found = audit.lost_by(length)
    rows = [(name, f"{ended:,}", f"{lost:,}", _share(lost / ended)) for name, (ended, lost) in found.items() if lost]
    headings = (length, "#ended", "#never trained on", "#share")
    return Section(headings, rows, f"attrition by length in {length}", "none" if found else "no episode ended")


def _cost_sections(audit: Audit) -> list[Section]:
    by_path: dict[tuple[str, str], list[Spent]] = {}
    by_version: dict[str, list[Spent]] = {}
    for one in audit.spent:
        by_path.setdefault((one.by, one.engine), []).append(one)
        if one.version is not None:
            by_version.setdefault(one.version, []).append(one)
    headings = ("#calls", "#prompt", "#completion", "#seconds", "#USD")
    paths = [(by, engine or UNKNOWN, *_spent_cells(parts)) for (by, engine), parts in by_path.items()]
    versions = [(version, *_spent_cells(parts)) for version, parts in by_version.items()]
    notes = tuple(
        f"{n:,} of {sum(one.calls for one in audit.spent):,} calls {why}"
        for n, why in (
            (sum(one.uncounted for one in audit.spent), "have no token counts"),
            (sum(one.untimed for one in audit.spent), "have no time"),
            (sum(one.unpriced for one in audit.spent), "have no price"),
        )
        if n
    )
    return [
        Section(
            ("agent", "engine", *headings),
            paths[:MOST],
            "cost by agent and engine",
            "no calls",
            (*notes, *_more(len(paths), "agents and engines")),
        ),
        Section(
            ("version", *headings),
            versions[-MOST:],
            "cost by policy version",
            "no call names a version",
            _more(len(versions), "versions, the oldest"),
        ),
    ]


def _spent_cells(parts: Sequence[Spent]) -> tuple[str, ...]:
    prompt, completion = _sum(one.prompt for one in parts), _sum(one.completion for one in parts)
    seconds, cost = _sum(one.seconds for one in parts), _sum(one.cost for one in parts)
    return (
        f"{sum(one.calls for one in parts):,}",
        _number(prompt, ",.0f"),
        _number(completion, ",.0f"),
        _number(seconds, ",.1f"),
        _number(cost, ",.4f"),
    )


def _components(audit: Audit) -> Section:
    rows = [
        (
            one.name if one.layer is None else f"{one.name} (layer {one.layer or 'without a name'})",
            f"{one.scores:,}",
            _number(one.low, ".4g"),
            _number(one.mean, ".4g"),
            _number(one.high, ".4g"),
            "metric" if one.metric else fixed(one.total, ",.2f"),
            _share(one.share),
            f"{one.evidence:,}",
        )
        for one in audit.components
    ]
    unknown = sum(one.unknown for one in audit.components)
    notes = (f"{unknown:,} values are not numbers, and are left out of the sums",) if unknown else ()
    return Section(
        ("component", "#scores", "#low", "#mean", "#high", "#total", "#share", "#with evidence"),
        rows[:MOST],
        "reward by component",
        "nothing was scored",
        (*notes, *_more(len(rows), "components")),
    )


def _earned(audit: Audit) -> Section:
    rows = [
        (
            one.name,
            one.kind if one.kind is not None else "(the episode)",
            f"{one.scores:,}",
            f"{one.mean:.4g}",
            fixed(one.total, ",.2f"),
            _share(one.share),
            _first_tapes(one.tapes),
        )
        for one in audit.earned
    ]
    return Section(
        ("component", "action", "#scores", "#mean", "#total", "#share", "most on tapes"),
        rows[:MOST],
        "reward by action",
        "nothing was scored",
        _more(len(rows), "actions"),
    )


def _anomalies(audit: Audit) -> Section:
    rows = [
        (
            f"{one.kind}: {one.what}" if one.what else one.kind,
            f"{one.count:,}",
            "" if one.of is None else f"{one.of:,}",
            one.detail,
            _first_tapes(one.tapes),
        )
        for one in audit.anomalies
    ]
    return Section(
        ("anomaly", "#number", "#of", "detail", "tapes"),
        rows[:MOST],
        "anomalies",
        "no anomaly was found",
        _more(len(rows), "anomalies"),
    )


def _more(n: int, what: str) -> tuple[str, ...]:
    return (f"{n - MOST:,} more {what}: --json has all",) if n > MOST else ()


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _number(value: float | None, how: str) -> str:
    return UNKNOWN if value is None else format(value, how)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _first_tapes(tapes: Sequence[str]) -> str:
    return " ".join(tapes[:3])
