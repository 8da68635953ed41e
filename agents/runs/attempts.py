"""Where the episodes of a run take place. `LocalAttempts` runs them in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...envs.environment import EnvironmentFactory
from ...tapes import Tape
from ...tapes.journal import Journal
from ..engines.engine import Engine
from ..episode.agent import Agent
from ..episode.rollout import rollout
from ..episode.spec import EpisodeSpec


class Attempts(Protocol):
    """Runs episodes, each of which an `EpisodeSpec` describes."""

    async def run(self, spec: EpisodeSpec, engine: Engine, journal: Journal) -> Tape:
        """Run one episode, write its records to `journal`, and return its closed tape, which is durable. Raises the
        same errors as `rollout`. A call that is cancelled ends the episode as cancelled."""
        ...

    async def close(self) -> None:
        """End what belongs to the caller's event loop. Every call of `run` has returned."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what happened, for the run's summary."""
        ...


@dataclass(frozen=True)
class LocalAttempts:
    """Runs episodes in this process."""

    agent: Agent
    env: EnvironmentFactory
    notes: tuple[str, ...] = ()

    async def run(self, spec: EpisodeSpec, engine: Engine, journal: Journal) -> Tape:
        return await rollout(self.agent, self.env, spec, engine=engine, journal=journal)

    async def close(self) -> None:
        """There is nothing to end."""
