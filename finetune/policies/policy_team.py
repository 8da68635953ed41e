"""Team: the models that speak in a run's episodes beside its own policy, trained or frozen (the setting `players`).

Each that is trained has a lineage, checkpoints and a trainer of its own in the run directory, and makes one update from
every batch of the loop. Frozen ones are engines that are made once, and serve the loop and the evaluations. How they
learn is in `players.py`; when they are asked is the loop's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import torch

from ...agents.engines.embedded.pretrained import weights_digest
from ...agents.engines.engine import Engine, TrainableEngine
from ...agents.setup.engine_config import Made
from ...agents.setup.team_config import make_partners, team_of
from ...tapes.common.progress import Progress
from ...tapes.records import Use
from ...tapes.store.run_directory import RunDir
from ..history.history import History
from ..history.loop_config import LoopConfig, WarmStartConfig
from ..objective.recipe import Recipe
from ..trainer.trainer import UpdateStats
from .phases import Phases
from .player_config import PlayerConfig, TrainedConfig
from .players import Player, player_metrics
from .policy import check_begun, load_policy

NO_WARM_START = WarmStartConfig(updates=0, batch=1)


def lineage_of(lead: str, name: str) -> str:
    """The lineage of the player called `name` in the run whose own policy has the lineage `lead`."""
    return f"{lead}-{name}"


class Team:
    """The players of one run. Without any, everything here does nothing."""

    def __init__(self, players: Mapping[str, PlayerConfig] | None = None, *, seed: int = 0) -> None:
        """Loads those that are trained."""
        self.players = dict(players or {})
        self.policies = {
            name: load_policy(cast(TrainedConfig, player.engine), player.trainer, seed)
            for name, player in self.players.items()
            if not player.frozen
        }
        self.histories: dict[str, History] = {}
        """Of those that are trained; each model has its base weights until it is restored."""
        self.frozen: dict[str, Made] = {}
        """Inside `opened`."""

    def begin(self, run: RunDir, loop: LoopConfig, recipe: Recipe) -> None:
        """Give each that is trained its history in the run. BrokenHistory where it began with other weights."""
        for name, policy in self.policies.items():
            self._check_begun(run, name, weights_digest(policy.model.state_dict()))
            phases = Phases(policy.model, self.players[name].loop_of(loop), recipe, NO_WARM_START)
            self.histories[name] = policy.history(
                run.store,
                lineage_of(run.results["lineage"], name),
                run.path / "checkpoints" / name,
                phases.trainer,
                loop,
            )

    def _check_begun(self, run: RunDir, name: str, digest: str) -> None:
        own = run.results.setdefault("players", {}).setdefault(name, {})
        check_begun(own, digest, run.path, self.folder(name))

    def folder(self, name: str) -> str:
        """The model that a player began with."""
        return str(getattr(self.players[name].engine, "model", name))

    def restore(self, progress: Progress) -> tuple[int, dict[int, dict[str, Any]]]:
        """Bring each to its last recorded update; gives how many were applied again, and the metrics of each."""
        again, told = 0, dict[int, dict[str, Any]]()
        for name, history in self.histories.items():
            say = f"re-applying recorded updates of {name}"

            def report(stats: UpdateStats, uses: Sequence[Use], name: str = name) -> None:
                told.setdefault(uses[0].update + 1, {}).update(player_metrics(name, stats))

            again += history.restore(lambda done, of, say=say: progress(say, done, of, ""), report=report)
            if history.updates == 0 and history.version not in history.published:
                history.store.append_layer(history.publish_record("base")[1])
        return again, told

    def behind(self, updates: int) -> bool:
        """Whether one lacks updates that the loop's policy has, which is at `updates`."""
        return any(history.updates < updates or history.unrecorded for history in self.histories.values())

    def settle(self) -> None:
        """See that the weights of each have a checkpoint that stays."""
        for history in self.histories.values():
            history.settle()

    @asynccontextmanager
    async def opened(self, run: RunDir) -> AsyncIterator[None]:
        """Inside, the frozen ones answer; the run says what they sample from."""
        threads = torch.get_num_threads()
        self.frozen = await make_partners({name: one for name, one in self.players.items() if one.frozen})
        torch.set_num_threads(threads)
        try:
            published = {stored.record.version for stored in run.store.run_records("publish")}
            for name, made in self.frozen.items():
                if made.publish is None:
                    continue
                self._check_begun(run, name, made.publish.digest)
                if made.publish.version not in published:
                    run.store.append_layer(made.publish)
                    published.add(made.publish.version)
            yield
        finally:
            frozen, self.frozen = self.frozen, {}
            for made in frozen.values():
                await made.engine.close()

    def measuring(self, lead: TrainableEngine) -> TrainableEngine:
        """`lead` and the others, each with the weights that it has now."""
        return self._seated(
            lead, {name: policy.copy(self.histories[name].version) for name, policy in self.policies.items()}
        )

    async def playing(self, lead: TrainableEngine) -> tuple[TrainableEngine, list[Player]]:
        """(`lead` and the others, as the loop samples; those who learn). Closing the engine closes all but the frozen
        ones."""
        own: dict[str, Engine] = {}
        players: list[Player] = []
        try:
            for name, policy in self.policies.items():
                history = self.histories[name]
                engine = await policy.sampler(history.version)
                own[name] = engine
                _, publish = history.publish_record("start")
                if publish.version not in history.published:
                    history.store.append_layer(publish)
                players.append(Player(history=history, engine=engine, agents=self.players[name].agents, name=name))
            return self._seated(lead, own), players
        except BaseException:
            for engine in own.values():
                await engine.close()
            raise

    def _seated(self, lead: TrainableEngine, own: Mapping[str, Engine]) -> TrainableEngine:
        frozen = {name: made.engine for name, made in self.frozen.items()}
        return team_of(lead, self.players, {**own, **frozen}, lent=frozen)
