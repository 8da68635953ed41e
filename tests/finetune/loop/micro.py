"""A demo of seconds, and what must hold of its run directory whatever became of the processes that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tapereel.agents import Limits
from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune import History, LoopConfig, OptimiserConfig, WarmStartConfig
from tapereel.finetune.run import DemoConfig
from tapereel.finetune.run.demonstrations import PicturesDemoConfig
from tapereel.finetune.run.loaded_run import LoadedRun
from tapereel.finetune.run.training import Training
from tapereel.finetune.trainer import checkpoints, copied_weights
from tapereel.tapes import Sampling, Status
from tapereel.tapes.store import METRICS, Results, RunDir, Store, read_metrics, verify

from .lab import assert_books_close

WARM, UPDATES = 8, 14

MICRO = DemoConfig(
    model_size="micro",
    tasks=200,
    held_out=16,
    demonstrations=128,
    warm=WarmStartConfig(updates=WARM, batch=16, optimiser=OptimiserConfig(lr=1e-2)),
    # A bonus on entropy moves the weights also where all attempts failed, as a model this small makes them do.
    loop=LoopConfig(
        updates=UPDATES,
        groups=3,
        group_size=4,
        checkpoint_every=2,
        keep_checkpoints=3,
        sampling=Sampling(max_tokens=12),
        limits=Limits(turns=3, agent_seconds=120.0, system_seconds=120.0),
        optimiser=OptimiserConfig(lr=1e-3),
        changes={"regulariser": [{"kind": "entropy", "coefficient": 0.05}]},
    ),
)

PICTURED = PicturesDemoConfig(
    tasks=64,
    held_out=16,
    demonstrations=64,
    warm=MICRO.warm,
    loop=MICRO.loop.model_copy(update={"sampling": Sampling(max_tokens=2)}),
)
"""The same with pictures."""


def closed_tapes(path: Path) -> dict[str, str]:
    """id -> digest of every tape that ended, as a reader finds them."""
    if not (path / "tapes").is_dir():
        return {}
    store = Store.open(path, cache=False)
    try:
        return {tape.id: tape.digest for tape in store.tapes(closed=True)}
    finally:
        store.close()


def assert_sound(path: Path, kept: dict[str, str], lineage: str) -> None:
    """No closed tape is lost, no update applied twice, no rollout trained on twice, and the books close."""
    final = closed_tapes(path)
    assert {name: final.get(name) for name in kept} == kept
    report = verify(path)
    assert report.exit_code == 0, report
    books = assert_books_close(path)
    assert books.open == 0
    store = Store.open(path, cache=False)
    uses = [stored.record for stored in store.run_records("use") if stored.record.lineage == lineage]
    assert [use.update for use in uses] == list(range(WARM + UPDATES)), "each update once, none missing"
    assert {use.epoch for use in uses} == {0}
    taken = [name for use in uses if use.info["phase"] == "rl" for name in use.info["tapes"]]
    assert len(taken) == len(set(taken)) > 0, "no rollout is trained on twice"
    applied = [(use.update, use.epoch, call, k) for use in uses for _, call, a, b, _ in use.items for k in range(a, b)]
    assert len(applied) == len(set(applied))
    lines = [line["update"] for line in read_metrics(path / METRICS) if line["phase"] in ("sft", "rl")]
    assert lines == list(range(1, WARM + UPDATES + 1)), "a line for each update, whoever died before writing it"
    published = [stored.record.version for stored in store.run_records("publish")]
    assert len(published) == len(set(published))
    groups: dict[tuple[str, int], list[Any]] = {}
    for summary in store.summaries(split="train"):
        tape = store.tape(summary.id, refresh=False)
        groups.setdefault((tape.begin.group or "", tape.begin.attempt), []).append(tape)
    for tapes in groups.values():
        assert sum(tape.trains for tape in tapes) <= 1, "an attempt that is on tape is not sampled again"
        own = [tape for tape in tapes if tape.status not in (Status.CRASHED, Status.CANCELLED)]
        assert len({tape.begin.seed for tape in own}) == len(own)
    store.close()


def assert_reproduced(path: Path, fresh: Path, lineage: str, config: DemoConfig = MICRO) -> None:
    """The final weights are those that the `use` records make of the base weights, bit for bit."""
    torch.set_num_threads(1)
    store = Store.open(path, cache=False)
    history = history_of(store, path, fresh, lineage, config)
    base = weights_digest(copied_weights(history.model))
    assert history.restore() == WARM + UPDATES, "from the base weights: there is no checkpoint here"
    found = weights_digest(copied_weights(history.model))
    assert found != base
    final = {c.update: c for c in checkpoints(path / "checkpoints")}[WARM + UPDATES]
    assert final.state["pinned"]
    assert found == final.state["digest"] == weights_digest(final.weights())
    last = next(s.record for s in store.run_records("publish") if s.record.version == f"{lineage}:{WARM + UPDATES}")
    assert last.digest == found
    assert {WARM, WARM + UPDATES} <= {c.update for c in checkpoints(path / "checkpoints") if c.state["pinned"]}
    store.close()


def history_of(store: Store, path: Path, fresh: Path, lineage: str, config: DemoConfig = MICRO) -> History:
    """The history of the demo in `path` with the base weights, in a directory without checkpoints."""
    fresh.mkdir()
    directory = RunDir(fresh, Results(lineage=lineage), store, resumed=True)
    return Training(LoadedRun.recorded(config.training(path), path), directory).history
