"""Makes a run longer, if it is resumed with a larger `loop.updates`.

The recorded updates stay as they are, so no other setting may change. Learning-rate schedules aren't stretched: their
`total` is a separate setting, and the recorded learning rates depend on it. The evaluation at the earlier end stays
valid for the weights of that update and moves to `evaluations`. The new end gets its own evaluation and split.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...tapes.errors import UsageError
from ...tapes.store.run_directory import Change, Lengthened, Results, RunDir
from ..loop.loop_config import LoopConfig, OptimiserConfig
from .player_config import PlayerConfig

UPDATES = "loop.updates"


def lengthening(loop: LoopConfig, warm: int, players: Mapping[str, PlayerConfig] | None = None) -> Change:
    """Return the function that `open_run` calls if `loop.updates` has changed. `loop` has the new value. `warm` is the
    number of updates before the loop."""
    optimisers = {"loop.optimiser": loop.optimiser}
    for name, player in (players or {}).items():
        if player.optimiser is not None:
            optimisers[f"players.{name}.optimiser"] = player.optimiser

    def change(run: RunDir, then: int, now: int) -> str:
        done = max(run.store.ledger(run.results.lineage).next_update - warm, 0)
        if now < done:
            raise UsageError(
                f"loop.updates is {now}, and {run.path} has made {done} updates of its loop already: set it to "
                f"{done} or more, or use the checkpoint of an earlier update"
            )
        if now > then:
            for name, optimiser in optimisers.items():
                _check_rate(name, optimiser, then, now, steps=loop.epochs * loop.minibatches)
        if run.results.after is not None:
            run.results.evaluations[str(done)], run.results.after = run.results.after, None
        if (entry := Lengthened(updates=then, done=done)) not in run.results.lengths[-1:]:
            run.results.lengths.append(entry)
        return f"when {done} updates of the loop were done"

    return change


def end_name(results: Results, updates: int) -> str:
    """Return the name of the evaluation at the end. It is `after`, or `after-UPDATES` if the run had reached an earlier
    end. This is because evaluations at different ends must not share a split."""
    ended = any(one.done >= one.updates for one in results.lengths)
    return f"after-{updates:06d}" if ended else "after"


def _check_rate(name: str, optimiser: OptimiserConfig, then: int, now: int, *, steps: int) -> None:
    schedule = optimiser.schedule
    if schedule.factor(now * steps - 1) > 0:
        return
    raise UsageError(
        f"{name}.schedule is {schedule.kind} and ends at 0 after {schedule.total} optimiser steps, so the last of the "
        f"updates {then + 1} to {now} would change nothing. The schedule can't change, since the recorded updates "
        f"follow it: set loop.updates to at most {schedule.total // steps if schedule.total else then}, or begin "
        "another run with the model of the last checkpoint (its hf/ as engine.model) and a schedule of its own"
    )
