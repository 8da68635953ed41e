"""Ends a run early by `loop.stop_at`, and makes a run longer if it is resumed with another `loop.updates` or `stop_at`.

The recorded updates stay as they are, so no other setting may change. Learning-rate schedules aren't stretched: their
`total` is a separate setting, and the recorded learning rates depend on it. The evaluation at the earlier end stays
valid for the weights of that update and moves to `evaluations`. The new end gets its own evaluation and split.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...tapes.common.stats import TOLERANCE
from ...tapes.common.text import counted
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import Change, Lengthened, Results, RunDir
from ..loop.loop_config import LoopConfig
from .player_config import PlayerConfig

UPDATES, STOP_AT = "loop.updates", "loop.stop_at"


def reached(results: Results, stop_at: float | None) -> bool:
    """Return whether the mean reward of an evaluation on held-out tasks is at least `stop_at`. The loop has then ended,
    also in a resumed run."""
    parts = (results.before, *results.evaluations.values(), results.after)
    means = [part["sampled"].mean for part in parts if part]
    return stop_at is not None and any(mean is not None and mean >= stop_at - TOLERANCE for mean in means)


def lengthening(loop: LoopConfig, warm: int, players: Mapping[str, PlayerConfig]) -> dict[str, Change]:
    """Return the functions that `open_run` calls if `loop.updates` or `loop.stop_at` has changed. `loop` has the new
    values. `warm` is the number of updates before the loop."""

    def done_by(run: RunDir) -> int:
        return max(run.store.ledger(run.results.lineage).next_update - warm, 0)

    def new_updates(run: RunDir, then: int, now: int) -> str:
        done = done_by(run)
        if now < done:
            raise UsageError(
                f"loop.updates is {now}, and {run.path} has made {done} updates of its loop already: set it to "
                f"{done} or more, or use the checkpoint of an earlier update"
            )
        if now > then and reached(run.results, loop.stop_at):
            raise UsageError(
                f"loop.updates={now} would change nothing: the reward on held-out tasks has reached "
                f"loop.stop_at={loop.stop_at:g} in {run.path}; raise loop.stop_at too, or set it to null"
            )
        if now > then:
            check_rates(loop, players, begun=True)
        return continued(run, then)

    def new_stop(run: RunDir, then: float | None, now: float | None) -> str:
        return continued(run, None)

    def continued(run: RunDir, updates: int | None) -> str:
        """Keep the evaluation at the earlier end, if the loop had ended and now continues. `updates` is the earlier
        value of `loop.updates` if it has changed."""
        results, done = run.results, done_by(run)
        if results.after is not None and done < loop.updates and not reached(results, loop.stop_at):
            results.evaluations[str(done)], results.after = results.after, None
            updates = done
        if updates is not None and (entry := Lengthened(updates=updates, done=done)) not in results.lengths[-1:]:
            results.lengths.append(entry)
        return f"when {done} updates of the loop were done"

    return {UPDATES: new_updates, STOP_AT: new_stop}


def end_name(results: Results, updates: int) -> str:
    """Return the name of the evaluation at the end, after this number of updates. It is `after`, or `after-UPDATES` if
    the run had reached an earlier end. This is because evaluations at different ends must not share a split."""
    ended = any(one.done >= one.updates for one in results.lengths)
    return f"after-{updates:06d}" if ended else "after"


def check_rates(loop: LoopConfig, players: Mapping[str, PlayerConfig], *, begun: bool = False) -> None:
    """Raise UsageError if a policy's learning rate is 0 before the last update of the loop. In a run that has `begun`,
    the schedules can't change."""
    optimisers = {"loop.optimiser": loop.optimiser}
    optimisers |= {f"players.{name}.optimiser": player.optimiser for name, player in players.items()}
    first = loop.critic.first if loop.critic is not None else 0
    for name, optimiser in optimisers.items():
        last = loop.updates - first - 1
        if optimiser is None or last < 0 or optimiser.schedule.factor(last) > 0:
            continue
        schedule, remedy = optimiser.schedule, f"{name}.schedule.total to at least {last + 1}"
        if begun:
            remedy = "begin another run with the last checkpoint's hf/ as engine.model and a schedule of its own"
        raise UsageError(
            f"{name}.schedule is {schedule.kind} and ends at 0 after {counted(schedule.total or 0, 'update')}, so the "
            f"rest of the {loop.updates} updates (loop.updates) would change nothing. Set loop.updates to at most "
            f"{(schedule.total or 0) + first}, or {remedy}"
        )
