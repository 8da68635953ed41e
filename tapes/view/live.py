"""Finds the tapes of a run that changed since a revision (the live tail), and reports on the integrity of its bytes.

A revision belongs to one `Live` object. If a revision comes from another object, or is more than `REMEMBERED` revisions
old, the answer is None and the page must reload. The integrity banner shows the result of `quick` or `whole`. `quick`
uses only the index. `whole` returns the report of a `verify`, which reads every byte. Both list what was not checked.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from ..common.text import counted
from ..store.reader import Break
from ..store.store import Store
from ..store.verifier import Report
from ..store.writer import is_live

REMEMBERED = 2_000
"""Number of revisions that are kept."""


class Live:
    """The live tail of one store that is open for reading."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._era = os.urandom(4).hex()
        self._rev = 0
        self._log: deque[tuple[int, frozenset[str]]] = deque(maxlen=REMEMBERED)
        self._lines: dict[str, tuple[int, str]] | None = None
        """(Number of lines, hash of the first line) of each segment, or None before the first call of `now`."""
        self.breaks: dict[str, Break] = {}
        """The breaks in the lines of segments, as found by the last call of `now`."""
        self.training = False
        """Whether updates were recorded since this was last set to False."""
        self.replaced = False
        """Whether another run has replaced this run since this was last set to False."""
        self.grown: set[str] = set()
        """Tapes with new records. Code that reads a tape removes it from this set."""

    def now(self) -> str:
        """Read the new records on the disk, and return the resulting revision."""
        # `Store.refresh` isn't used, because it raises for a corrupt segment. The viewer shows it up to its break.
        self.breaks = self._store.index.refresh()
        lines = {segment.name: (segment.n, segment.first) for segment in self._store.index.segments()}
        before, self._lines = self._lines, lines
        if before is not None and before != lines:
            self._note(before, lines)
        return f"{self._era}.{self._rev}"

    def since(self, rev: str) -> tuple[set[str] | None, str]:
        """Return (tapes that changed since `rev`, revision). The tapes are None if `rev` is unknown or too old."""
        now = self.now()
        era, _, number = rev.partition(".")
        if era != self._era or not number.isdigit() or not self._oldest() <= int(number) <= self._rev:
            return None, now
        return {tape for n, tapes in self._log if n > int(number) for tape in tapes}, now

    def touched(self, tapes: set[str]) -> None:
        """Note a change to these tapes that is not in their records, such as a new verdict."""
        self._rev += 1
        self._log.append((self._rev, frozenset(tapes)))

    def _oldest(self) -> int:
        return self._log[0][0] - 1 if self._log else self._rev

    def _note(self, before: dict[str, tuple[int, str]], lines: dict[str, tuple[int, str]]) -> None:
        if any(lines.get(name, (0, ""))[0] < n or lines[name][1] != first for name, (n, first) in before.items()):
            # Lines never vanish or change, so fewer lines or another first hash mean that this is another run.
            self._era, self._rev = os.urandom(4).hex(), 0
            self._log.clear()
            self.replaced = True
            return
        tapes: set[str] = set()
        for name, (n, _) in lines.items():
            since = before[name][0] if name in before else 0
            written = self._store.index.written(name, since) if n > since else set()
            tapes |= {tape for tape, _ in written if tape}
            self.training = self.training or any(t in ("use", "void") for _, t in written)
        self.grown |= tapes
        self.touched(tapes)


State = Literal["closed", "running", "died", "not sealed"]
"""Whether a run's writer has closed it, still lives, or is gone. `not sealed` means that this is unknown."""


def state_of(store: Store) -> State:
    """Return the state of a run. A corrupt segment doesn't count, because its seal may lie after its break."""
    corrupt = {name for name, found in store.index.refresh().items() if found.verdict == "corrupt"}
    unsealed = [one.name for one in store.index.segments() if one.sealed is None and one.name not in corrupt]
    lives = [is_live(store.folder, name, store.disk) for name in unsealed]
    return "closed" if not lives else "running" if True in lives else "not sealed" if None in lives else "died"


class Integrity(TypedDict):
    """The contents of the integrity banner."""

    kind: str
    verdict: str
    checked: list[str]
    broken: list[str]
    holes: list[str]
    live: list[str]
    """Segments without a seal."""
    not_checked: list[str]
    at: NotRequired[float]
    """When every byte was verified, in seconds since 1970."""
    head: NotRequired[str | None]


def quick(store: Store, breaks: Mapping[str, Break]) -> Integrity:
    """Return what the index shows: the segments that were read, their breaks, and the missing segments."""
    segments = store.index.segments()
    numbers = {int(segment.name[:6]) for segment in segments}
    missing = sorted(set(range(1, max(numbers, default=0))) - numbers)
    corrupt = [
        str(found)
        for found in [*breaks.values(), *store.index.unread()]
        if not isinstance(found, Break) or found.verdict == "corrupt"
    ]
    torn = [str(found) for found in breaks.values() if found.verdict != "corrupt"]
    holes = [f"segment {number:06d} is missing: its records are not shown" for number in missing]
    writing = [segment.name for segment in segments if segment.sealed is None]
    records = sum(segment.n for segment in segments)
    return {
        "kind": "quick",
        "verdict": "broken" if corrupt else "not verified",
        "checked": [
            f"{counted(len(segments), 'segment')}, {counted(records, 'record')}: each line's hash, and its "
            "link to the line before, when the index read it"
        ],
        "broken": corrupt,
        "holes": [*holes, *torn],
        "live": writing,
        "not_checked": [
            "lines that were indexed earlier: a later change on the disk shows when a tape is read, or by verify",
            "pins, media files, the prefixes of forks and the accounting of tokens: verify checks them",
            "what agents, environments, models and training did: replay and reproduce check it",
        ],
    }


def whole(report: Report) -> Integrity:
    """Return the report of `verify` in the form that the banner needs."""
    return {
        "kind": "verify",
        "verdict": report.verdict,
        "at": time.time(),
        "head": report.head,
        "checked": [
            f"{counted(len(report.segments), 'segment')}, {counted(report.records, 'record')} and "
            f"{counted(report.media, 'media file')}, every byte; {counted(report.pins, 'pin')}; the accounting of "
            f"{counted(report.books.sampled, 'sampled token')}"
        ],
        "broken": list(report.broken),
        "holes": [
            *report.torn,
            *report.unknown,
            *report.unsettled,
            *(f"segment {number} is missing, and no pin names it" for number in report.holes),
            *(f"{name}: bytes that a recovery moved out of the store" for name in report.set_aside),
        ],
        "live": [segment.name for segment in report.segments if segment.live],
        "not_checked": list(report.not_checked),
    }
