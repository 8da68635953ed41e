"""Plans: how an update's batch is made of recorded tapes, and all that a `use` record says for it to be made again.

An update makes one version of the policy. It may go over its batch in several epochs and cut each into mini-batches, an
optimiser step for each; there is a `use` record for each epoch. Knows nothing of models and files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..data.by_agent import apart, check_addresses
from ..data.provenance import Range, drop_others, drop_stale, own_ranges
from ..data.rows import Row
from ..data.stream import Episode

Source = Callable[[str], tuple[list[Row], Episode]]
"""Rows and episode of a tape, by its id."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update trains on, in order, and what it sets aside."""

    rows: list[Row]
    episodes: list[Episode]
    stale: list[Range] = field(default_factory=list)
    context: list[Range] = field(default_factory=list)
    """Tokens of agents that this run doesn't train."""
    filtered: list[Range] = field(default_factory=list)
    """Tokens of groups that were set aside before the update."""
    shown: list[Row] = field(default_factory=list)
    """Demonstrations, for a recipe with an `nll` regulariser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a batch is made of tapes, and how it is gone over."""

    phase: str
    tapes: tuple[str, ...]
    oldest: int | None = None
    """Tokens of versions below this one are stale; None: age plays no part."""
    rewards: tuple[float | None, ...] | None = None
    """Rewards that take the place of the tapes' own (a control experiment); None for a tape that is unscored."""
    aside: tuple[str, ...] = ()
    """Tapes of groups that were sampled for this update and found to teach nothing; booked with it as `filtered`."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that are trained; the tokens of others are context. None: all are."""
    by_agent: bool = False
    """Each agent of an episode is compared with itself in the other attempts, by its own reward (`by_agent`)."""
    batches: tuple[int, ...] = ()
    """Tapes of each rollout batch, where several make one update: what a recipe compares `by = batch` it compares
    within one of them. Empty: one batch."""
    epochs: int = 1
    minibatches: int = 1
    """Optimiser steps of an epoch; the tapes are cut into so many parts."""
    order: int = 0
    """Seeds the cuts into mini-batches."""
    shown: tuple[str, ...] = ()
    """Tapes imitated beside the batch."""

    @property
    def every(self) -> tuple[str, ...]:
        """All tapes that the update has taken from the queue."""
        return (*self.tapes, *self.aside)

    @property
    def read(self) -> tuple[str, ...]:
        """All tapes that it names, those imitated included."""
        return (*self.every, *self.shown)

    def info(self) -> dict[str, Any]:
        """What a `use` record says of it; settings at their defaults are left out."""
        own = {
            "phase": self.phase,
            "tapes": list(self.tapes),
            "oldest": self.oldest,
            "rewards": list(self.rewards) if self.rewards is not None else None,
        }
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in own and value != one.default:
                own[one.name] = list(value) if isinstance(value, tuple) else value
        return own

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Plan:
        """The plan that a record's info was made by."""
        known: dict[str, Any] = {one.name: info[one.name] for one in fields(cls) if one.name in info}
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(value)
        return cls(**known)

    def batch(self, lineage: str, source: Source) -> Batch:
        """What it trains on. Ages count in versions of `lineage`."""
        batch = Batch([], [])
        if self.by_agent:
            found = [source(tape) for tape in self.tapes]
            check_addresses((episode for _, episode in found), (row for rows, _ in found for row in rows))
        for k, tape in enumerate(self.tapes):
            found, episode = source(tape)
            batch.context.extend(episode.kept_out)
            if self.agents is not None:
                found, others = drop_others(found, self.agents)
                batch.context.extend(others)
            if self.oldest is not None:
                found, stale = drop_stale(found, lineage, self.oldest)
                batch.stale.extend(stale)
            if self.rewards is not None:
                episode = replace(episode, reward=self.rewards[k], turn_rewards=None)
            found, episodes = apart(found, episode) if self.by_agent else (found, [episode])
            batch.rows.extend(found)
            batch.episodes.extend(episodes)
        for tape in self.aside:
            found, episode = source(tape)
            if episode.reward is not None:
                batch.filtered.extend(own_ranges(found))
        for tape in self.shown:
            found, _ = source(tape)
            batch.shown.extend(found if self.agents is None else drop_others(found, self.agents)[0])
        return batch
