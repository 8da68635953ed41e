"""Warm start: SFT on recorded tapes, with the same converter, trainer and ledger as the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ...agents.episode.seeds import derive_seed
from ...tapes.store.store import Store
from ..history.history import History, Plan, Source
from ..history.loop_config import WarmStartConfig
from .metrics import imitation_line


def batch_of(tapes: Sequence[str], update: int, batch: int, seed: int) -> tuple[str, ...]:
    """The tapes of SFT update `update`: shuffled epochs, cut into batches. The seed alone decides, so a resumed run
    draws the same batches."""
    if len(tapes) < batch:
        raise ValueError(f"{len(tapes)} tapes don't fill a batch of {batch}: record more, or lower the batch")
    per_epoch = len(tapes) // batch
    epoch, k = divmod(update, per_epoch)
    order = list(range(len(tapes)))
    random.Random(derive_seed(seed, "sft", epoch)).shuffle(order)
    return tuple(tapes[i] for i in order[k * batch : (k + 1) * batch])


def warm_start(
    config: WarmStartConfig,
    *,
    store: Store,
    history: History,
    tapes: Sequence[str],
    source: Source,
    seed: int = 0,
    phase: str = "sft",
    start: int = 0,
    updates: int | None = None,
    checkpoint_every: int = 100,
    agents: tuple[str, ...] | None = None,
    on_update: Callable[[int, dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train until the history has `start + updates` updates (default: the configuration's), or `stop()` is true.

    Continues at the history's present update. Each update is in the ledger; the last one gets a checkpoint that is
    kept. agents: paths of the agents that are imitated; None: all.
    """
    target = start + (config.updates if updates is None else updates)
    while history.updates < target and not stop():
        plan = Plan(phase=phase, tapes=batch_of(tapes, history.updates - start, config.batch, seed), agents=agents)
        stats, uses = history.update(plan, source)
        for use in uses:
            store.append_layer(use)
        done = history.updates - start
        if on_update is not None:
            on_update(done, imitation_line(stats, uses))
        if history.updates % checkpoint_every == 0 and history.updates < target:
            # The records must be durable before the checkpoint: a checkpoint ahead of the ledger can't be resumed from.
            store.writer.sync()
            history.checkpoint()
    store.writer.sync()
    history.settle()
