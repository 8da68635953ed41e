"""Requery of a whole run: recorded tokens go through model weights again, and the log-probs are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ...tapes.audit.checking import chosen_tapes, torn_tails
from ...tapes.audit.verdict import Verdict, Verdicts
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import recorded_settings
from ...tapes.store.store import Store
from .requery import BATCH, TOLERANCE, Policies, requery


def requery_run(
    run: str | Path,
    model: str | None = None,
    *,
    tolerance: float = TOLERANCE,
    threads: int = 1,
    tapes: Sequence[str] = (),
    split: str | None = None,
    progress: Progress = silent,
) -> tuple[Verdicts, str | None]:
    """(the verdicts, why there are none) of the named tapes, or of all closed tapes of a split with sampled tokens.

    model: a checkpoint or model folder that every token is compared with; None: the weights of each token's own
    version, from the run's checkpoints. tolerance: the largest difference that counts as equal, in nats. threads: of
    torch.
    """
    if tolerance < 0 or threads < 1:
        raise UsageError(
            f"tolerance is {tolerance} and threads {threads}; tolerance must be 0 or more, and threads 1 or more"
        )
    torch.set_num_threads(threads)
    started, found = time.perf_counter(), list[Verdict]()
    with Store.open(run) as store:
        torn = torn_tails(store)
        chosen = chosen_tapes(store, tapes, split)
        ids = chosen if tapes else [one.id for one in store.summaries(split=split, closed=True) if one.sampled]
        published = [stored.record for stored in store.run_records("publish")]
        policies = Policies(store.path, published, only=model, begun=_begun(run))
        # A batch shares forward passes; only one batch of tapes is in memory at a time.
        for k in range(0, len(ids), BATCH):
            batch = [store.tape(name, refresh=False) for name in ids[k : k + BATCH]]
            verdicts = requery(batch, policies, tolerance=tolerance)
            found += [verdict.of(tape) for verdict, tape in zip(verdicts, batch, strict=True)]
            progress("requery", len(found), len(ids), "")
    reason = (
        None
        if ids
        else f"none of the {len(chosen):,} closed tapes holds a token that a model sampled, so there is nothing to "
        "compare: scripted and text-only engines record text"
    )
    seconds = round(time.perf_counter() - started, 3)
    return Verdicts(verb="requery", run=str(run), verdicts=tuple(found), torn=tuple(torn), seconds=seconds), reason


def _begun(run: str | Path) -> list[str]:
    """The model folders that the run began with, those of its players included."""
    models = {keys: value for keys, value in recorded_settings(run).items() if keys[-2:] == ("engine", "model")}
    return [folder for keys, folder in models.items() if keys[0] in ("engine", "players") and isinstance(folder, str)]
