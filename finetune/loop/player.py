"""A player is another model that learns from a loop's episodes, in addition to the loop's own policy.

Each player has its own weights, lineage, checkpoints and trainer. For every batch of the loop, it makes one update on
the tokens of its own agents.

A crash may come after the loop has recorded an update and before the player has. The player is then one update behind,
and a resumed run makes this update from the loop's record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """One more policy. It trains the tokens of its own agents, which are only context for all other policies."""

    history: History
    """The player's history in the loop's store, with a separate lineage, model, trainer and checkpoint folder."""
    engine: TrainableEngine
    """The engine that samples for the player's agents with the player's weights."""
    agents: tuple[str, ...] = ()
    """Paths of the agents that this player trains."""
    name: str = ""
    """The player's name in metrics. If it is empty, the lineage (the name of the player's sequence of updates) is
    used."""

    @property
    def called(self) -> str:
        """The player's name in metrics."""
        return self.name or self.history.lineage

    def plan(self, plan: Plan, max_lag: int) -> Plan:
        """Return the player's plan for an update. `plan` is the loop's plan for the same update. Flat groups (`aside`)
        are left out, because only the loop accounts for them."""
        oldest = stale_before(self.history.updates, max_lag)
        return plan.model_copy(update={"agents": self.agents, "oldest": oldest, "aside": (), "beyond": ()})

    def update(
        self, plan: Plan, source: Source, mode: str
    ) -> tuple[UpdateStats, tuple[Use, ...], Mapping[str, Tensor], Publish]:
        """Make one update from the loop's batch. Return the statistics, the `use` records, a copy of the weights and
        their `publish` record. This may run in a thread."""
        stats, uses = self.history.update(plan, source)
        return stats, uses, *self.history.publish_record(mode)

    async def catch_up(self, store: Store, lineage: str, max_lag: int) -> None:
        """Make the updates that the loop (with this `lineage`) has recorded and this player hasn't. Each update is
        recorded before the engine gets the new weights."""
        for use in self.history.unrecorded:
            store.append_layer(use)
        self.history.unrecorded.clear()
        for use in store.ledger(lineage).uses:
            if use.epoch or use.update < self.history.updates:
                continue
            plan = self.plan(Plan.of(use), max_lag)
            _, uses, weights, publish = await asyncio.to_thread(self.update, plan, self.history.from_store, "reprefill")
            for one in (*uses, publish):
                store.append_layer(one)
            await self.engine.sync_weights(weights, publish.version)
        await store.writer.durable()


def check_players(players: Sequence[Player], agents: tuple[str, ...] | None, lineage: str, updates: int) -> None:
    """Raise BadPlayers if two policies train the same agent or have the same lineage, or if `agents` is None. Raise
    BrokenHistory if a player has more updates than the loop."""
    if not players:
        return
    if agents is None:
        raise BadPlayers(
            "with players, loop.agents must name the agents of the loop's own policy: set loop.agents to their paths"
        )
    every = [*agents, *(path for player in players for path in player.agents)]
    twice = sorted({path for path in every if every.count(path) > 1})
    if twice:
        raise BadPlayers(f"two policies train {twice[0]!r}: an agent has one policy, so remove it from one of them")
    for player in players:
        if player.history.lineage == lineage:
            raise BadPlayers(f"a player has the loop's own lineage {lineage!r}: give each policy its own lineage")
        if player.history.updates > updates:
            raise BrokenHistory(
                f"lineage {player.history.lineage!r} has {player.history.updates} updates, the loop's "
                f"{lineage!r} only {updates}: the run directory is incomplete"
            )
