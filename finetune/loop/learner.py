"""A policy that learns in a loop, with its history and its engine.

A loop has one or several of them. The first leads: the loop's plan is made for it, and its record is written first. The
others are players. Each has its own weights, lineage, checkpoints and trainer, and for every batch of the loop, it
makes one update on the tokens of its own agents.

A crash may come after the record of the first policy and before the record of another. That policy is then one update
behind, and a resumed run makes this update from the record of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...agents.engines.engine import TrainableEngine
from ...tapes.errors import TapereelError
from ...tapes.records import Publish, Use
from ...tapes.store.store import Store
from ..trainer.trainer import UpdateStats
from .history import BrokenHistory, History
from .plan import Plan, Source
from .staleness import stale_before


class BadPlayers(TapereelError, ValueError):
    """Raised if two policies would train the same agent or have the same lineage, or if the loop's own agents aren't
    named."""


class Updated(NamedTuple):
    """The result of one policy's update."""

    stats: UpdateStats
    uses: tuple[Use, ...]
    weights: Mapping[str, Tensor]
    publish: Publish


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A policy that learns the tokens of its own agents. They are only context for all other policies."""

    history: History
    """The policy's history in the loop's store."""
    engine: TrainableEngine
    """The engine that samples with the policy's weights."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that this policy speaks for. None means all agents."""
    name: str = ""
    """The policy's name in metrics. If it is empty, the lineage (the name of the policy's sequence of updates) is
    used."""

    @property
    def called(self) -> str:
        """The policy's name in metrics."""
        return self.name or self.history.lineage

    def plan(self, plan: Plan, max_lag: int) -> Plan:
        """Return the plan of this policy for an update. `plan` is the first policy's plan for the same update. Flat
        groups (`aside`) are left out, because only the first policy accounts for them."""
        oldest = stale_before(self.history.updates, max_lag)
        return plan.model_copy(update={"agents": self.agents, "oldest": oldest, "aside": (), "beyond": ()})

    def update(self, plan: Plan, source: Source, mode: str) -> Updated:
        """Make one update from the loop's batch. Return the statistics, the `use` records, the weights for the
        engine and their `publish` record. This may run in a thread."""
        stats, uses = self.history.update(plan, source)
        return Updated(stats, uses, *self.history.publish_record(mode))

    async def catch_up(self, store: Store, lineage: str, max_lag: int) -> None:
        """Write the records that a crash left out, and make the updates that the first policy (with this `lineage`) has
        recorded and this one hasn't. Each update is recorded before the engine gets the new weights."""
        for use in self.history.unrecorded:
            store.append_layer(use)
        self.history.unrecorded.clear()
        for use in store.ledger(lineage).uses:
            # Later epochs have the plan of the first, and an update makes all of its epochs.
            if use.epoch or use.update < self.history.updates:
                continue
            plan = self.plan(Plan.of(use), max_lag)
            # From the store, because the tapes may be those of a process that ended.
            done = await asyncio.to_thread(self.update, plan, self.history.from_store, "reprefill")
            for record in (*done.uses, done.publish):
                store.append_layer(record)
            await self.engine.sync_weights(done.weights, done.publish.version)
        await store.writer.durable()


def check_learners(learners: Sequence[Learner]) -> None:
    """Raise BadPlayers if two policies train the same agent or have the same lineage, or if one of several has no
    agents of its own. Raise BrokenHistory if a policy has more updates than the first."""
    first, *players = learners
    if not players:
        return
    if first.agents is None:
        raise BadPlayers(
            "with players, loop.agents must name the agents of the loop's own policy: set loop.agents to their paths"
        )
    every = [path for learner in learners for path in learner.agents or ()]
    twice = sorted({path for path in every if every.count(path) > 1})
    if twice:
        raise BadPlayers(f"two policies train {twice[0]!r}: an agent has one policy, so remove it from one of them")
    lineage, updates = first.history.lineage, first.history.updates
    for player in players:
        if player.history.lineage == lineage:
            raise BadPlayers(f"a player has the loop's own lineage {lineage!r}: give each policy its own lineage")
        if player.history.updates > updates:
            raise BrokenHistory(
                f"lineage {player.history.lineage!r} has {player.history.updates} updates, the loop's "
                f"{lineage!r} only {updates}: the run directory is incomplete"
            )
