"""Which tapes of a run are the attempts at each task, from summaries alone."""

from __future__ import annotations

from collections.abc import Iterable

from ..records import CauseType, Status, trains
from .index import Summary

GROUP_LAYER = "group"
"""The layer of rewards that compare a tape with its group. Training adds them to the reward on the tape."""


def attempts_of(closed: Iterable[Summary]) -> dict[str, list[Summary]]:
    """task hash -> for each attempt its last episode that counts, else its first one."""
    found: dict[str, dict[tuple[str, int], Summary]] = {}
    for s in closed:
        place = (s.group or s.id, s.attempt)
        attempts = found.setdefault(s.task_hash, {})
        if counts(s) or place not in attempts:
            attempts[place] = s
    return {task: list(attempts.values()) for task, attempts in found.items()}


def counts(summary: Summary) -> bool:
    """Whether the episode's reward measures the agent: no fault of the environment, model or machine ended it."""
    status = Status(summary.status) if summary.status is not None else None
    return trains(status, CauseType(summary.cause) if summary.cause is not None else None)
