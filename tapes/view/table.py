"""The table of tapes as columns: short to send and quick to filter in the page. Each repeated text is sent once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..store.summary import Summary

SHARD = 8_192
"""Tapes in one piece of the table."""


def columns(
    summaries: Sequence[Summary], versions: dict[str, list[str]], checks: Callable[[str], str]
) -> dict[str, Any]:
    """The columns of these tapes. versions: tape -> policy versions that sampled it; checks: tape -> its verdicts."""
    return {
        "n": len(summaries),
        "id": [s.id for s in summaries],
        "status": coded(s.status or "running" for s in summaries),
        "cause": coded(s.cause or "" for s in summaries),
        "reward": [s.reward for s in summaries],
        "split": coded(s.split or "" for s in summaries),
        "task": coded(s.task or (s.task_hash or "")[:12] for s in summaries),
        "group": coded(s.group or "" for s in summaries),
        "attempt": [s.attempt or 0 for s in summaries],
        "agent": coded(s.agent or "" for s in summaries),
        "env": coded(s.env or "" for s in summaries),
        "version": coded(", ".join(versions.get(s.id, ())) for s in summaries),
        "parent": coded(s.parent or "" for s in summaries),
        "checks": coded(checks(s.id) for s in summaries),
        "begun": [s.begun for s in summaries],
        "seconds": [s.ended - s.begun if s.ended is not None and s.begun is not None else None for s in summaries],
        "turns": [s.actions for s in summaries],
        "calls": [s.calls for s in summaries],
        "tokens": [s.sampled for s in summaries],
    }


def coded(values: Iterable[str]) -> dict[str, Any]:
    """`words`: the distinct texts; `at`: for each row the number of its text."""
    words: dict[str, int] = {}
    at = [words.setdefault(value, len(words)) for value in values]
    return {"words": list(words), "at": at}
