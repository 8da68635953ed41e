"""The players of a run, which are other models that speak in its episodes (the setting `players`).

A trained player learns in the loop (`loop/learner.py`). A frozen player has one engine for the loop and the
evaluations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import torch

from ...agents.engines.embedded.pretrained import weights_digest
from ...agents.engines.engine import Engine, TrainableEngine
from ...agents.setup.engine_config import LoadedEngine
from ...agents.setup.team_config import make_partners, team_of
from ...tapes.common.progress import Progress
from ...tapes.records import Use
from ...tapes.store.run_directory import PlayerResults, RunDir
from ..loop.history import History
from ..loop.learner import Learner
from ..loop.loop_config import LoopConfig
from ..objective.recipe import Recipe
from ..trainer.checkpoint import Digest
from ..trainer.trainer import UpdateStats
from .load_policy import check_begun, load_policy
from .player_config import PlayerConfig, TrainedConfig


def lineage_of(lead: str, name: str) -> str:
    """Return the lineage of the player `name`. `lead` is the lineage of the run's own policy."""
    return f"{lead}-{name}"


class Team:
    """The players of one run. There may be none."""

    def __init__(self, players: Mapping[str, PlayerConfig], loop: LoopConfig, recipe: Recipe, *, seed: int) -> None:
        """Load the models of the trained players, and those that the recipe compares them with. Raises UsageError if
        any of these can't be used."""
        self.players = dict(players)
        self.policies = {
            name: load_policy(
                cast(TrainedConfig, player.engine), player.trainer, player.loop_of(loop), recipe, seed=seed
            )
            for name, player in self.players.items()
            if not player.frozen
        }
        self.histories: dict[str, History] = {}
        """The history of each trained player, by name. Its model has the base weights until `restore`."""
        self.frozen: dict[str, LoadedEngine] = {}
        """The engine of each frozen player, by name. The dictionary is empty outside of `opened`."""

    def begin(self, run: RunDir) -> None:
        """Make the history of each trained player. Raises BrokenHistory if a player began the run with other
        weights."""
        for name, policy in self.policies.items():
            self._check_begun(run, name, policy.weights.digest)
            lineage, folder = lineage_of(run.results.lineage, name), run.path / "checkpoints" / name
            self.histories[name] = History(policy, run.store, lineage, folder)

    def _check_begun(self, run: RunDir, name: str, digest: Digest) -> None:
        own = run.results.players.setdefault(name, PlayerResults())
        check_begun(own, digest, run.path, self.folder(name))

    def folder(self, name: str) -> str:
        """Return the folder of the model that a player began the run with."""
        return str(getattr(self.players[name].engine, "model", name))

    def restore(
        self,
        progress: Progress,
        checkpoint_every: int,
        line: Callable[[str, UpdateStats, Sequence[Use]], dict[str, object]],
    ) -> tuple[int, dict[int, dict[str, object]]]:
        """Restore each player's weights after its last recorded update. Return the number of updates that were applied
        again, and the players' metrics by update. `checkpoint_every` is passed to `History.restore`. `line` computes
        the metrics of one update of a player."""
        again, metrics = 0, dict[int, dict[str, object]]()
        for name, history in self.histories.items():
            say = f"re-applying recorded updates of {name}"

            def report(stats: UpdateStats, uses: Sequence[Use], name: str = name) -> None:
                metrics.setdefault(uses[0].update + 1, {}).update(line(name, stats, uses))

            again += history.restore(
                lambda done, of, say=say: progress(say, done, of, ""), report=report, checkpoint_every=checkpoint_every
            )
            if history.updates == 0:
                history.record_version("base")
        return again, metrics

    def behind(self, updates: int) -> bool:
        """Return whether any player has fewer than `updates` updates, or has updates without a record."""
        return any(history.updates < updates or history.unrecorded for history in self.histories.values())

    def settle(self) -> None:
        """Write a pinned checkpoint of each player's current weights, unless there is one."""
        for history in self.histories.values():
            history.settle()

    @asynccontextmanager
    async def opened(self, run: RunDir) -> AsyncIterator[None]:
        """Make the frozen players' engines for the block, and record the weights of these engines in the run."""
        # An embedded engine sets torch's number of threads for the whole process, so the run's number is restored.
        threads = torch.get_num_threads()
        self.frozen = await make_partners({name: one for name, one in self.players.items() if one.frozen})
        torch.set_num_threads(threads)
        try:
            for name, made in self.frozen.items():
                if made.publish is not None:
                    self._check_begun(run, name, partial(weights_digest, made.weights))
                    run.store.record_weights(made.publish)
            yield
        finally:
            frozen, self.frozen = self.frozen, {}
            for made in frozen.values():
                await made.engine.close()

    def measuring(self, lead: TrainableEngine) -> TrainableEngine:
        """Return a team of `lead` and the players. For trained players, it has copies of the current weights."""
        return self._team_with(
            lead, {name: policy.copy(self.histories[name].version) for name, policy in self.policies.items()}
        )

    async def learners(self, first: History, lead: TrainableEngine) -> list[Learner]:
        """Return the policies that learn: the run's own, and the trained players. The engine of the first is the team
        that the loop samples with (`lead` and the players). Closing it leaves the frozen players' engines open, because
        evaluations use them too."""
        own: dict[str, Engine] = {}
        players: list[Learner] = []
        try:
            for name, policy in self.policies.items():
                history = self.histories[name]
                engine = await policy.sampler(history.version)
                own[name] = engine
                history.record_version("start")
                players.append(Learner(history=history, engine=engine, agents=self.players[name].agents, name=name))
            return [Learner(history=first, engine=self._team_with(lead, own)), *players]
        except BaseException:
            for engine in own.values():
                await engine.close()
            raise

    def _team_with(self, lead: TrainableEngine, own: Mapping[str, Engine]) -> TrainableEngine:
        frozen = {name: made.engine for name, made in self.frozen.items()}
        return team_of(lead, self.players, {**own, **frozen}, lent=frozen)
