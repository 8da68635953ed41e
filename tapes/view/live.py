"""The live tail of a run: which tapes have changed since a revision.

A revision belongs to one `Live`. A revision of another `Live`, or one that is older than `REMEMBERED`, gives None: the
page must reload.
"""

from __future__ import annotations

import os
from collections import deque

from ..store.reader import Break
from ..store.store import Store

REMEMBERED = 2_000
"""Revisions."""


class Live:
    """The live tail of one store that is open for reading."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._era = os.urandom(4).hex()
        self._rev = 0
        self._log: deque[tuple[int, frozenset[str]]] = deque(maxlen=REMEMBERED)
        self._lines: dict[str, tuple[int, str]] | None = None
        """Segment -> (number of lines, hash of the first line); None before the first look."""
        self.breaks: dict[str, Break] = {}
        """Segments whose lines break, as of the last look."""
        self.training = False
        """Whether updates were recorded since this was last set to False."""
        self.replaced = False
        """Whether another run has replaced this run since this was last set to False."""
        self.grown: set[str] = set()
        """Tapes with new records; the reader of a tape removes it."""

    def now(self) -> str:
        """Read what is new on the disk; gives the revision after it."""
        # Not `Store.refresh`: a corrupt segment is shown as far as it reads, not raised.
        self.breaks = self._store.index.refresh()
        lines = {segment.name: (segment.n, segment.first) for segment in self._store.index.segments()}
        before, self._lines = self._lines, lines
        if before is not None and before != lines:
            self._note(before, lines)
        return f"{self._era}.{self._rev}"

    def since(self, rev: str) -> tuple[set[str] | None, str]:
        """(tapes with new records since `rev`, the present revision); (None, ...) where `rev` is unknown or too old."""
        now = self.now()
        era, _, number = rev.partition(".")
        if era != self._era or not number.isdigit() or not self._oldest() <= int(number) <= self._rev:
            return None, now
        return {tape for n, tapes in self._log if n > int(number) for tape in tapes}, now

    def touched(self, tapes: set[str]) -> None:
        """Note a change of these tapes that is not in their records, such as a new verdict."""
        self._rev += 1
        self._log.append((self._rev, frozenset(tapes)))

    def _oldest(self) -> int:
        return self._log[0][0] - 1 if self._log else self._rev

    def _note(self, before: dict[str, tuple[int, str]], lines: dict[str, tuple[int, str]]) -> None:
        if any(lines.get(name, (0, ""))[0] < n or lines[name][1] != first for name, (n, first) in before.items()):
            # Lines never vanish and never change: fewer lines or another first hash mean another run in this folder.
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
