"""Rebuilds the beginning of a training run: its base weights, and a `History` that can apply the run's updates to them.

`reproduce` and `lab` use this module. It builds everything from the configuration in the run directory, with the code
of `train`. It needs neither agent, environment nor tasks, and only reads the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ...agents.engines.embedded.pretrained import device_of
from ...tapes.common.config import ConfigError, load_config
from ...tapes.common.config_yaml import YamlProblem
from ...tapes.errors import OtherVersion, TapereelError, UsageError
from ...tapes.store.run_directory import CONFIG, RESULTS, Results, RunDir, recorded_config
from ...tapes.store.store import Store
from ..loop.history import BrokenHistory, History
from ..recipes import BrokenRecipes
from ..run.loaded_run import LoadedRun
from ..run.player_config import TrainerConfig
from ..run.players import folder_of, lineage_of
from ..run.train_config import TrainConfig
from ..run.training import Training
from ..trainer.ranks import Ranks


class Unknown(TapereelError, ValueError):
    """Raised if the base weights or the configuration of a run can't be rebuilt. The message names the missing part."""


@dataclass(frozen=True)
class RebuiltRun:
    """The beginning of a run: a `history` without checkpoints, whose model has the base weights."""

    training: Training
    history: History
    base: str
    """A description of the base weights."""

    @classmethod
    def of(cls, run: Path, store: Store, scratch: Path, lineage: str, ranks: Ranks | None = None) -> RebuiltRun:
        """Rebuild the beginning of the run in the directory `run`, which is open as `store`.

        `lineage` names the policy. `ranks` compute the updates, by default this process alone. The history writes to
        the empty directory `scratch`. Raises Unknown if the base weights or the configuration can't be rebuilt.
        """
        if not (run / CONFIG).exists():
            raise Unknown(f"{run} has no {CONFIG}, which would say how its weights were trained")
        results = _results(run)
        player = next(
            (name for name in results.players if lineage_of(results.lineage, name) == lineage),
            None,
        )
        own = results if player is not None else results.model_copy(update={"lineage": lineage})
        training, base = _begin(run, RunDir(scratch, own, store, resumed=True), ranks or Ranks())
        if player is None:
            return cls(training, training.history, base)
        if player not in training.histories:
            raise Unknown(f"{run / RESULTS} has the trained player {player!r}, and {run / CONFIG} doesn't have it")
        model = folder_of(player, training.players[player])
        return cls(training, training.histories[player], f"the model in {model}")


def _results(run: Path) -> Results:
    try:
        return Results.read(run)
    except (FileNotFoundError, ValueError) as error:
        raise Unknown(
            f"{run / RESULTS}, which names the weights that the run began with, can't be read: {error}"
        ) from error


def follow(run: Path, ranks: Ranks) -> object:
    """Compute this rank's share of the updates that rank 0 applies again, and return rank 0's result."""
    try:
        config = present_config(run)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = LoadedRun.recorded(config, run, ranks)
    except TapereelError:
        command, result = cast("tuple[str, object]", ranks.broadcast())
        if command != "end":  # only this rank has the error
            raise
        return result
    return loaded.policy.weights.follow()


def present_config(run: Path) -> TrainConfig:
    """Return the run's configuration, with devices that this machine has. Raises Unknown if it can't be read."""
    return _on_present_devices(_read_config(run))


def _begin(run: Path, directory: RunDir, ranks: Ranks) -> tuple[Training, str]:
    try:
        keys = recorded_config(run).keys()
    except (OSError, YamlProblem) as error:
        raise Unknown(f"{run / CONFIG} can't be read: {error}") from error
    if not {"engine", "loop"} <= keys:
        raise Unknown(f"{run / CONFIG} is not the configuration of a training run, so nothing was trained there")
    config = present_config(run)
    base = f"the model in {config.engine.model}"
    try:
        training = Training(LoadedRun.recorded(config, run, ranks), directory)
    except BrokenRecipes as error:
        raise Unknown(str(error)) from error
    except (UsageError, BrokenHistory) as error:
        raise Unknown(f"a model that the run began with is gone: {error}") from error
    # The model folder may have been overwritten since the run. Every update would differ with other base weights.
    begun = directory.results.base
    found = training.policy.weights.digest(begun)
    if begun not in (None, found):
        raise Unknown(
            f"the base weights are gone: the run began with weights of digest {begun}, and those of {base} have digest "
            f"{found} now"
        )
    return training, base


def _read_config(run: Path) -> TrainConfig:
    try:
        return load_config(TrainConfig, run / CONFIG)
    except (ConfigError, OtherVersion) as error:
        raise Unknown(str(error)) from error


def _on_present_devices(config: TrainConfig) -> TrainConfig:
    """Replace the recorded devices that this machine lacks. A machine without a GPU can then inspect a run that used
    one."""
    players = {
        name: player if player.frozen else player.model_copy(update={"trainer": _on_present_device(player.trainer)})
        for name, player in config.players.items()
    }
    return config.model_copy(update={"trainer": _on_present_device(config.trainer), "players": players})


def _on_present_device(trainer: TrainerConfig) -> TrainerConfig:
    try:
        device_of(trainer.device)
    except UsageError:
        return trainer.model_copy(update={"device": "auto"})
    return trainer
