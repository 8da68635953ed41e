"""Longer: a run that goes on for more updates than it was begun with.

The recorded updates stay what they are, so `loop.updates` is all that may change, and no schedule is stretched: its
`total` is a setting of its own, by which the recorded rates were. What was measured at the earlier end belongs to the
weights of that moment. It goes among the evaluations, and the new end is measured anew, under a split of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...tapes.errors import UsageError
from ...tapes.store.run_directory import Change, RunDir
from ..history.loop_config import LoopConfig, OptimiserConfig
from ..policies.player_config import PlayerConfig

UPDATES = "loop.updates"
LENGTHS = "lengths"
"""In a run's results: how long it was to be before, and how many updates of the loop were done when that changed."""


def lengthening(loop: LoopConfig, warm: int, players: Mapping[str, PlayerConfig] | None = None) -> Change:
    """What `open_run` asks where a run goes on with another `loop.updates`; `loop` has the new one. warm: updates ahead
    of the loop."""
    optimisers = dict(_optimisers(loop, players or {}))

    def change(run: RunDir, then: int, now: int) -> str:
        done = max(run.store.ledger(run.results["lineage"]).next_update - warm, 0)
        if now < done:
            raise UsageError(
                f"loop.updates is {now}, and {run.path} has made {done} updates of its loop already: give "
                f"{done} or more, or take the checkpoint of an earlier update"
            )
        if now > then:
            for name, optimiser in optimisers.items():
                _check_rate(name, optimiser, then, now, steps=loop.epochs * loop.minibatches)
        _set_end_aside(run.results, done)
        lengths = run.results.setdefault(LENGTHS, [])
        if (entry := {"updates": then, "done": done}) not in lengths[-1:]:
            lengths.append(entry)
        return f"when {done} updates of the loop were done"

    return change


def end_name(results: Mapping[str, Any], updates: int) -> str:
    """What the evaluation at the end is called: `after`, or with the update where the run came to an end before."""
    ended = any(one["done"] >= one["updates"] for one in results.get(LENGTHS, ()))
    return f"after-{updates:06d}" if ended else "after"


def _optimisers(loop: LoopConfig, players: Mapping[str, PlayerConfig]) -> Iterator[tuple[str, OptimiserConfig]]:
    yield "loop.optimiser", loop.optimiser
    yield from (
        (f"players.{name}.optimiser", player.optimiser)
        for name, player in players.items()
        if player.optimiser is not None
    )


def _check_rate(name: str, optimiser: OptimiserConfig, then: int, now: int, *, steps: int) -> None:
    schedule = optimiser.schedule
    if schedule.factor(now * steps - 1) > 0:
        return
    raise UsageError(
        f"{name}.schedule is {schedule.kind} and ends at 0 after {schedule.total} optimiser steps, so the last of the "
        f"updates {then + 1} to {now} would change nothing; it stays what the recorded updates were made by. Give no "
        f"more than {schedule.total // steps if schedule.total else then} updates, or begin another run with the model "
        "of the last checkpoint (its hf/ as engine.model) and a schedule of its own"
    )


def _set_end_aside(results: dict[str, Any], done: int) -> None:
    if (found := results.pop("after", None)) is not None:
        results.setdefault("evaluations", {})[str(done)] = found
