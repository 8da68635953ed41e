"""Plans: how an update makes its batch from recorded tapes. The `use` record holds the plan, to make the batch again.

An update makes one version of the policy. It may pass over its batch in several epochs and divide each epoch into
mini-batches, with an optimiser step for each; there is a `use` record for each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..data.by_agent import apart, check_addresses
from ..data.provenance import Range, drop_others, own_ranges
from ..data.rows import Row
from ..data.staleness import drop_stale
from ..data.stream import Episode

Source = Callable[[str], tuple[list[Row], Episode]]
"""Rows and episode of a tape, by its id."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that one update trains on, in order, and the tokens that it leaves out, by reason."""

    rows: list[Row]
    episodes: list[Episode]
    stale: list[Range] = field(default_factory=list)
    context: list[Range] = field(default_factory=list)
    """Tokens of agents that this run doesn't train: the model reads them and has no loss on them."""
    filtered: list[Range] = field(default_factory=list)
    """Tokens of groups that were set aside before the update."""
    shown: list[Row] = field(default_factory=list)
    """Demonstrations, for a recipe with an `nll` regulariser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tapes of an update, and how it trains on them. The field names are those of the `use` record."""

    phase: str
    tapes: tuple[str, ...]
    oldest: int | None = None
    """Tokens that an older version sampled are stale and are left out; None: no bound on staleness."""
    rewards: tuple[float | None, ...] | None = None
    """Rewards in place of the tapes' own (a control experiment); None for an unscored tape."""
    aside: tuple[str, ...] = ()
    """Tapes of flat groups, which were sampled for this update and aren't trained on; counted as `filtered`."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that are trained; tokens of other agents are context. None: all."""
    by_agent: bool = False
    """Compare each agent with itself in the other attempts, by its own reward."""
    batches: tuple[int, ...] = ()
    """The number of tapes of each rollout batch, where an update has several; a recipe's baseline `by = batch` compares
    within one of them. Empty: one batch."""
    epochs: int = 1
    minibatches: int = 1
    """Optimiser steps of an epoch, each on one part of the tapes."""
    order: int = 0
    """The seed of the division into mini-batches."""
    shown: tuple[str, ...] = ()
    """Demonstrations: tapes that the update imitates as well."""

    @property
    def every(self) -> tuple[str, ...]:
        """All tapes that the update takes from the queue."""
        return (*self.tapes, *self.aside)

    @property
    def read(self) -> tuple[str, ...]:
        """All tapes that the update reads, with its demonstrations."""
        return (*self.every, *self.shown)

    def info(self) -> dict[str, Any]:
        """The plan as a `use` record holds it. Fields at their defaults are left out, so a record of before a field
        existed equals one that is made now."""
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
        """The plan in a record's info; other keys of the info are ignored."""
        known: dict[str, Any] = {one.name: info[one.name] for one in fields(cls) if one.name in info}
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(value)
        return cls(**known)

    def batch(self, lineage: str, source: Source) -> Batch:
        """The batch. `oldest` counts versions of `lineage`; tokens of other lineages have no age."""
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
