"""Players: other policies that learn from the same episodes as the loop's own, each from the tokens of its agents.

Each player has weights, a trainer and a history of its own in the loop's store, and makes one update from every batch
of the loop. A crash between the loop's record and a player's leaves the player an update behind; the player makes that
update from the loop's record, so all have the same number of updates. The loop's engine must sample for each player
with the player's own weights (`TeamEngine`); all other models in that engine are frozen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...agents.engines.engine import TrainableEngine
from ...tapes.errors import TapereelError
from ...tapes.records import Publish, Use
from ...tapes.store.store import Store
from ..data.by_agent import reward_by_agent
from ..data.staleness import stale_before
from ..history.history import BrokenHistory, History
from ..history.plan import Plan, Source
from ..trainer.trainer import UpdateStats


class BadPlayers(TapereelError, ValueError):
    """Agents that no policy or two policies would train; names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """One more policy. Its agents' tokens are context to the other policies, and their tokens to it."""

    history: History
    """Its history in the loop's store, with its own lineage, model, trainer and folder of checkpoints."""
    engine: TrainableEngine
    """The engine that samples for its agents and takes its weights."""
    agents: tuple[str, ...] = ()
    """Paths of its agents."""
    name: str = ""
    """Its name in metrics; empty: its lineage."""

    @property
    def called(self) -> str:
        """Its name, or its lineage where it has none."""
        return self.name or self.history.lineage

    def plan(self, plan: Plan, max_lag: int) -> Plan:
        """Its own plan for an update of the loop. The loop alone accounts for the flat groups (`aside`)."""
        oldest = stale_before(self.history.updates, max_lag)
        return plan.model_copy(update={"agents": self.agents, "oldest": oldest, "aside": ()})

    def update(self, plan: Plan, source: Source, mode: str) -> tuple[UpdateStats, tuple[Use, ...], Any, Publish]:
        """Make one update from the loop's batch; returns (statistics, records, copied weights, their record). May run
        in a thread."""
        stats, uses = self.history.update(plan, source)
        return stats, uses, *self.history.publish_record(mode)

    def line(self, stats: UpdateStats) -> dict[str, Any]:
        """The metrics of its update, under its name."""
        return player_metrics(self.called, stats)

    async def catch_up(self, store: Store, lineage: str, max_lag: int) -> None:
        """Make the updates that `lineage` recorded and this history lacks, from the plans in the loop's records.

        Each is recorded before the engine gets its weights, as in the loop.
        """
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


def player_metrics(name: str, stats: UpdateStats) -> dict[str, Any]:
    """Metrics of one update of the player called `name`."""
    values = {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": stats.skipped,
        "mismatch": stats.mismatch,
        "ess": stats.ess,
    }
    return {f"players/{name}/{key}": value for key, value in values.items()} | reward_by_agent(stats.stream)


def check_players(players: Sequence[Player], agents: tuple[str, ...] | None, lineage: str, updates: int) -> None:
    """BadPlayers where two policies train one agent, or the loop's own agents are not named; BrokenHistory where a
    player has more updates than the loop."""
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
