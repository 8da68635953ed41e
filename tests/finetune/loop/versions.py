"""Every token of a run against the weights that its version names, whatever became of the processes that wrote it."""

from __future__ import annotations

from pathlib import Path

from tapereel.finetune.inspect.rebuild import RebuiltRun
from tapereel.finetune.inspect.requery import Policies, requery
from tapereel.tapes.store import Store


def assert_versions_true(run: Path, fresh: Path, model: Path, lineage: str, updates: int) -> int:
    """Each recorded log-prob is that of the version stamped on it; gives the number of tokens.

    The weights follow from the ledger, so that those of updates count which death kept from having a checkpoint. They
    go to `fresh`, which isn't there; `model` is what the run began with."""
    fresh.mkdir()
    with Store.open(run) as store:
        history = RebuiltRun.of(run, store, fresh, lineage).history
        for update in range(1, updates + 1):
            history.restore(until=update)
            history.checkpoint(pinned=True)
        published = [stored.record for stored in store.run_records("publish")]
        sampled = [tape for tape in store.tapes(closed=True) if any(call.completion for call in tape.calls)]
        tokens = sum(len(call.completion or ()) for tape in sampled for call in tape.calls)
        verdicts = requery(sampled, Policies(fresh, published, begun=((str(model), "float32"),)))
    assert not [verdict for verdict in verdicts if verdict.outcome != "verified"]
    assert sum(verdict.checked["tokens"] for verdict in verdicts) == tokens
    return tokens
