"""Team: the models that speak in a run's episodes beside its own policy, trained or frozen (the setting `players`).

Each trained player has a lineage, checkpoints and a trainer of its own in the run directory, and makes one update from
every batch of the loop (`players.py`). Frozen players are engines that are made once, for the loop and the evaluations.
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
from ...tapes.store.run_directory import PlayerResults, RunDir
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
    """The lineage of the player `name` in a run whose own policy has the lineage `lead`."""
    return f"{lead}-{name}"


class Team:
    """The players of one run; may be empty."""

    def __init__(self, players: Mapping[str, PlayerConfig] | None = None, *, seed: int = 0) -> None:
        """Loads the models of the trained players."""
        self.players = dict(players or {})
        self.policies = {
            name: load_policy(cast(TrainedConfig, player.engine), player.trainer, seed)
            for name, player in self.players.items()
            if not player.frozen
        }
        self.histories: dict[str, History] = {}
        """Of the trained players; each model has its base weights until `restore`."""
        self.frozen: dict[str, Made] = {}
        """The engines of the frozen players; empty outside of `opened`."""

    def begin(self, run: RunDir, loop: LoopConfig, recipe: Recipe) -> None:
        """Give each trained player its history in the run. BrokenHistory where it began with other weights."""
        for name, policy in self.policies.items():
            self._check_begun(run, name, weights_digest(policy.model.state_dict()))
            phases = Phases(policy.model, self.players[name].loop_of(loop), recipe, NO_WARM_START)
            self.histories[name] = policy.history(
                run.store,
                lineage_of(run.results.lineage, name),
                run.path / "checkpoints" / name,
                phases.trainer,
                loop,
            )

    def _check_begun(self, run: RunDir, name: str, digest: str) -> None:
        own = run.results.players.setdefault(name, PlayerResults())
        check_begun(own, digest, run.path, self.folder(name))

    def folder(self, name: str) -> str:
        """The folder of the model that a player began with."""
        return str(getattr(self.players[name].engine, "model", name))

    def restore(self, progress: Progress) -> tuple[int, dict[int, dict[str, Any]]]:
        """Bring each player to its last recorded update; returns how many updates were applied again, and the players'
        metrics of each update."""
        again, metrics = 0, dict[int, dict[str, Any]]()
        for name, history in self.histories.items():
            say = f"re-applying recorded updates of {name}"

            def report(stats: UpdateStats, uses: Sequence[Use], name: str = name) -> None:
                metrics.setdefault(uses[0].update + 1, {}).update(player_metrics(name, stats))

            again += history.restore(lambda done, of, say=say: progress(say, done, of, ""), report=report)
            if history.updates == 0:
                history.record_version("base")
        return again, metrics

    def behind(self, updates: int) -> bool:
        """Whether a player has fewer updates than the loop's policy, which has `updates`."""
        return any(history.updates < updates or history.unrecorded for history in self.histories.values())

    def settle(self) -> None:
        """Make sure that the present weights of each player have a checkpoint that is kept."""
        for history in self.histories.values():
            history.settle()

    @asynccontextmanager
    async def opened(self, run: RunDir) -> AsyncIterator[None]:
        """Inside, the frozen players answer; the run records their weights."""
        # Making an embedded engine sets torch's threads for the whole process; the run's own number must hold.
        threads = torch.get_num_threads()
        self.frozen = await make_partners({name: one for name, one in self.players.items() if one.frozen})
        torch.set_num_threads(threads)
        try:
            for name, made in self.frozen.items():
                if made.publish is not None:
                    self._check_begun(run, name, made.publish.digest)
                    run.store.record_weights(made.publish)
            yield
        finally:
            frozen, self.frozen = self.frozen, {}
            for made in frozen.values():
                await made.engine.close()

    def measuring(self, lead: TrainableEngine) -> TrainableEngine:
        """A team of `lead` and the players, each with a copy of its present weights."""
        return self._team_with(
            lead, {name: policy.copy(self.histories[name].version) for name, policy in self.policies.items()}
        )

    async def playing(self, lead: TrainableEngine) -> tuple[TrainableEngine, list[Player]]:
        """(a team of `lead` and the players, as the loop samples; the trained players). Closing the team closes all
        engines but the frozen ones, which evaluations use too."""
        own: dict[str, Engine] = {}
        players: list[Player] = []
        try:
            for name, policy in self.policies.items():
                history = self.histories[name]
                engine = await policy.sampler(history.version)
                own[name] = engine
                history.record_version("start")
                players.append(Player(history=history, engine=engine, agents=self.players[name].agents, name=name))
            return self._team_with(lead, own), players
        except BaseException:
            for engine in own.values():
                await engine.close()
            raise

    def _team_with(self, lead: TrainableEngine, own: Mapping[str, Engine]) -> TrainableEngine:
        frozen = {name: made.engine for name, made in self.frozen.items()}
        return team_of(lead, self.players, {**own, **frozen}, lent=frozen)
