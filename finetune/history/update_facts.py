"""Facts of one update for its `use` record: the tokens that counted, the tokens left out, and the numerics used."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import JsonValue
from pydantic_core import to_json

from ..data.provenance import Item, Range, ranges_of, weighed
from ..data.rows import Row
from ..trainer.updates import PolicyTrainer, UpdateStats


def computed_on(trainer: PolicyTrainer) -> dict[str, JsonValue]:
    """What the bits of an update depend on besides tapes and weights: recipe, torch version, threads, device, ranks."""
    device = next(trainer.model.parameters()).device
    chip = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    recipe = hashlib.sha256(to_json(trainer.recipe.model_dump(mode="json"))).hexdigest()
    return {
        "recipe": recipe,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "chip": chip,
        "ranks": trainer.ranks.size,
    }


def items(rows: Sequence[Row], stats: UpdateStats) -> list[Item]:
    """The weight of each token in the loss, as runs of equal weight inside a call; tokens of weight 0 are left out."""
    return weighed(rows, stats.stream, stats.weight)


def left_out(rows: Sequence[Row], stats: UpdateStats) -> list[Range]:
    """The tokens of scored episodes without a part in the loss: the recipe did not select them or their group, they are
    no data for RL, or the whole update was skipped. No later update trains on them, so this update accounts for
    them."""
    stream = stats.stream
    idle = (stats.weight == 0) if stats.applied else torch.ones(len(stream), dtype=torch.bool)
    chosen = (idle & ~stream.episodes.reward.isnan()[stream.episode]).numpy()
    cuts = np.cumsum([len(row.own) for row in rows])[:-1]
    return (
        [
            entry
            for row, part in zip(rows, np.split(chosen, cuts), strict=True)
            if part.any()
            for entry in ranges_of(row, part)
        ]
        if rows
        else []
    )
