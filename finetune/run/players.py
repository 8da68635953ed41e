"""The players of a run, which are other models that speak in its episodes (the setting `players`).

A trained player is one more policy of the run (`loop/learner.py`). A frozen player has one engine for the loop and the
evaluations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import torch

from ...agents.engines.embedded.pretrained import weights_digest
from ...agents.engines.engine import Engine
from ...agents.setup.team_config import make_partners
from ...tapes.store.run_directory import PlayerResults, RunDir
from ..trainer.checkpoint import Digest
from .load_policy import check_begun
from .player_config import PlayerConfig

OWN = ""
"""Name of the run's own policy among its policies. The others have the names of their players."""


def lineage_of(lead: str, name: str) -> str:
    """Return the lineage of the player `name`. `lead` is the lineage of the run's own policy, which is `OWN`."""
    return f"{lead}-{name}" if name else lead


def folder_of(name: str, player: PlayerConfig) -> str:
    """Return the folder of the model that a player began the run with."""
    return str(getattr(player.engine, "model", name))


def check_player(run: RunDir, name: str, player: PlayerConfig, digest: Digest) -> None:
    """Raise BrokenHistory if the player began the run with weights of another digest."""
    check_begun(run.results.players.setdefault(name, PlayerResults()), digest, run.path, folder_of(name, player))


@asynccontextmanager
async def frozen_engines(players: Mapping[str, PlayerConfig], run: RunDir) -> AsyncIterator[dict[str, Engine]]:
    """Make the frozen players' engines for the block, by name, and record the weights of these engines in the run."""
    # An embedded engine sets torch's number of threads for the whole process, so the run's number is restored.
    threads = torch.get_num_threads()
    made = await make_partners({name: player for name, player in players.items() if player.frozen})
    torch.set_num_threads(threads)
    try:
        for name, loaded in made.items():
            if loaded.publish is not None:
                check_player(run, name, players[name], partial(weights_digest, loaded.weights))
                run.store.record_weights(loaded.publish)
        yield {name: loaded.engine for name, loaded in made.items()}
    finally:
        for loaded in made.values():
            await loaded.engine.close()
