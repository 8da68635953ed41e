"""Players: other policies that learn from the same episodes as the loop's own, each from the words of its agents.

Each has weights, a trainer and a history of its own in the loop's store, and makes one update from every batch that the
loop takes. An update that the loop recorded and a player did not (the process died in between) is made up for from the
loop's record, so all of them have the same number of updates. The loop's engine must sample for each player with the
player's own weights (`TeamEngine`); what else samples in it is frozen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Agents that nobody or that two policies would train; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """One more policy. Its agents' tokens are context to the others, as theirs are to it."""

    history: History
    """Of a lineage of its own, in the loop's store; with a model, a trainer and a folder of checkpoints of its own."""
    engine: TrainableEngine
    """What samples for its agents; takes its weights."""
    agents: tuple[str, ...] = ()
    """Paths of the agents that it speaks for."""
    name: str = ""
    """What its metrics are called by; empty: as its lineage."""

    @property
    def called(self) -> str:
        """Its name, or else its lineage."""
        return self.name or self.history.lineage

    def plan(self, plan: Plan, max_lag: int) -> Plan:
        """What it makes of an update of the loop. Groups that were set aside are booked by the loop."""
        return replace(plan, agents=self.agents, oldest=stale_before(self.history.updates, max_lag), aside=())

    def update(self, plan: Plan, source: Source, mode: str) -> tuple[UpdateStats, tuple[Use, ...], Any, Publish]:
        """(account, records, copied weights, their record): one update beside the loop's. May run in a thread."""
        stats, uses = self.history.update(plan, source)
        return stats, uses, *self.history.publish_record(mode)

    def line(self, stats: UpdateStats) -> dict[str, Any]:
        """The metrics of its update, under its name."""
        return player_metrics(self.called, stats)

    async def catch_up(self, store: Store, lineage: str, max_lag: int) -> None:
        """Make the updates that `lineage` recorded and this history didn't."""
        for use in self.history.unrecorded:
            store.append_layer(use)
        self.history.unrecorded.clear()
        for use in store.ledger(lineage).uses:
            if use.epoch or use.update < self.history.updates:
                continue
            plan = self.plan(Plan.of(use.info), max_lag)
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
    """BadPlayers where an agent is trained by two policies, or the loop's own are not named; BrokenHistory where a
    player has learned what the loop did not."""
    if not players:
        return
    if agents is None:
        raise BadPlayers(
            "with other players the loop must know whom it trains itself: name its own agents in loop.agents"
        )
    every = [*agents, *(path for player in players for path in player.agents)]
    twice = sorted({path for path in every if every.count(path) > 1})
    if twice:
        raise BadPlayers(f"{twice[0]!r} is trained by two policies: each agent has one")
    for player in players:
        if player.history.lineage == lineage:
            raise BadPlayers(f"a player has the loop's own lineage {lineage!r}: give each policy another")
        if player.history.updates > updates:
            raise BrokenHistory(
                f"lineage {player.history.lineage!r} has {player.history.updates} updates, the loop's "
                f"{lineage!r} only {updates}: the run directory is incomplete"
            )
