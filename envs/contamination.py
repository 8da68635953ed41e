"""Contamination: the overlap of held-out tasks with training tasks.

Four kinds, from the narrowest: the same task (hash); the same question (public part) with another answer; the same text
apart from case, space and punctuation; a text that shares most of its word n-grams. The last kind finds texts that were
copied and edited, and by design also templates; the threshold decides. All comparisons run locally.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from ..tapes.records import Task
from ..tapes.value import Value

N = 8
"""Words of an n-gram."""
SHARE = 0.5
"""Share of a held-out text's n-grams that must occur in training to count as overlap."""
SHOWN = 5
"""Examples per kind in the report."""
_WORD = re.compile(r"\w+")


class Overlap(Value):
    """One held-out task that occurs in training."""

    held_out: str
    """Hash of the task."""
    train: str | None
    """Hash of the first training task that it was found in; None for shared n-grams, which may come from several."""
    share: float
    """Share of its word n-grams that are in training; 1 for the other kinds."""
    text: str
    """The first 80 characters."""


class Kind(Value):
    """One kind of overlap."""

    tasks: int
    """Held-out tasks of this kind that belong to no narrower kind."""
    shown: tuple[Overlap, ...]
    """The first `SHOWN` of them."""


class Contamination(Value):
    """The report. Assert `clean`."""

    train: int
    held_out: int
    exact: Kind
    """The same task."""
    question: Kind
    """The same public part with another private part."""
    normalised: Kind
    """The same words."""
    runs: Kind
    """At least `share` of its n-grams of `n` words."""
    n: int
    share: float
    too_short: int
    """Held-out tasks with fewer than `n` words; they have no n-gram and are compared as a whole only."""

    @property
    def clean(self) -> bool:
        """True if no held-out task overlaps with training in any of these ways."""
        return not any(kind.tasks for kind in (self.exact, self.question, self.normalised, self.runs))

    def __str__(self) -> str:
        lines = [f"{self.held_out:,} held-out tasks against {self.train:,} of training"]
        for name, what in (
            ("exact", "the same task"),
            ("question", "the same question, another answer"),
            ("normalised", "the same words"),
            ("runs", f"{self.share:.0%} of their runs of {self.n} words"),
        ):
            kind: Kind = getattr(self, name)
            lines.append(f"{kind.tasks:>8,}  {what}")
            lines.extend(f"          {one.held_out[:12]} {one.share:.0%}  {one.text}" for one in kind.shown)
        if self.too_short:
            lines.append(f"{self.too_short:,} have fewer than {self.n} words and were compared as a whole only")
        return "\n".join(lines)


def contamination(
    train: Iterable[Task],
    held_out: Iterable[Task],
    *,
    n: int = N,
    share: float = SHARE,
) -> Contamination:
    """Compare held-out tasks with training tasks, by all texts of the public part, or of the private part of a task
    without a public one. Training is read once; memory is 8 bytes for each n-gram, plus the overhead of a set.
    """
    if n < 1 or not 0 < share <= 1:
        raise ValueError(f"n must be at least 1 and share in (0, 1], not {n} and {share:g}")
    known = _Known(n)
    for task in train:
        known.add(task, texts(task))
    found: dict[str, list[Overlap]] = {name: [] for name in ("exact", "question", "normalised", "runs")}
    short = count = 0
    for task in held_out:
        count += 1
        words = _words(texts(task))
        short += len(words) < n
        kind, where, part = known.find(task, words, share)
        if kind is not None:
            found[kind].append(Overlap(held_out=task.hash, train=where, share=part, text=texts(task)[:80]))
    kinds = {name: Kind(tasks=len(found), shown=tuple(found[:SHOWN])) for name, found in found.items()}
    return Contamination(train=known.tasks, held_out=count, n=n, share=share, too_short=short, **kinds)


class _Known:
    """Hashes of the training tasks, their questions, texts and n-grams."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tasks = 0
        self.hashes: set[str] = set()
        self.questions: dict[int, str] = {}
        self.words: dict[int, str] = {}
        self.runs: set[int] = set()

    def add(self, task: Task, text: str) -> None:
        self.tasks += 1
        self.hashes.add(task.hash)
        if task.public is not None:
            self.questions.setdefault(_key(json.dumps(task.public, sort_keys=True)), task.hash)
        words = _words(text)
        if words:
            self.words.setdefault(_key(" ".join(words)), task.hash)
        self.runs.update(_runs(words, self.n))

    def find(self, task: Task, words: list[str], share: float) -> tuple[str | None, str | None, float]:
        """(kind or None, hash of the training task, share of n-grams)."""
        if task.hash in self.hashes:
            return "exact", task.hash, 1.0
        asked = None if task.public is None else _key(json.dumps(task.public, sort_keys=True))
        if asked in self.questions:
            return "question", self.questions[asked], 1.0
        same = self.words.get(_key(" ".join(words))) if words else None
        if same is not None:
            return "normalised", same, 1.0
        runs = list(_runs(words, self.n))
        part = sum(run in self.runs for run in runs) / len(runs) if runs else 0.0
        return ("runs" if runs and part >= share else None), None, part


def texts(task: Task) -> str:
    """All texts in the public part of a task, or in the private part if there is no public one."""
    return " ".join(_texts(task.public if task.public is not None else task.private))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _texts(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield json.dumps(value)


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _runs(words: list[str], n: int) -> Iterator[int]:
    for k in range(len(words) - n + 1):
        yield _key(" ".join(words[k : k + n]))


def _key(text: str) -> int:
    """A 64-bit hash: among 10^9 n-grams, any two collide with a probability of about 0.03. A collision can only report
    an overlap that isn't there."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
