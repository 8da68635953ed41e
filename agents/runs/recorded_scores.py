"""Evaluation of recorded episodes: mean reward and pass@k of a run, and the difference to another run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ...tapes.errors import UsageError
from ...tapes.store.store import Store
from ...tapes.value import Value
from .pass_at_k import Comparison, Rewards, Scores, compare, evaluate_rewards
from .runner import rewards_of, scores_of


class RunScores(Value):
    """What the recorded episodes of a run say of its policy."""

    run: str
    split: str | None
    """None: all splits."""
    scores: Scores
    against: str | None = None
    against_scores: Scores | None = None
    difference: Comparison | None = None
    """`run` less `against`, paired by task; None without another run."""


def score_run(
    run: str | Path,
    split: str | None = None,
    *,
    k: Sequence[int] = (),
    success: float = 1.0,
    by: str | None = None,
    against: str | Path | None = None,
    against_split: str | None = None,
) -> tuple[RunScores, dict[str, Rewards]]:
    """(the scores, the rewards by task of the run and of the one it is compared with, by name).

    k: pass@k for these; empty: powers of two as far as there are attempts. success: the least reward of a success. by:
    also by label, the value under this key in each task's public part. against_split: None takes `split`. UsageError
    where a split has no closed tape.
    """
    with ExitStack() as stores:
        store = stores.enter_context(Store.open(run))
        rewards = _rewards(store, str(run), split)
        other: Rewards | None = None
        if against is not None:
            # One path is opened once: two readers of one run may see different states of a run that grows.
            second = store if str(against) == str(run) else stores.enter_context(Store.open(against))
            other = _rewards(second, str(against), against_split or split)
        k = k or _powers(rewards, other)
        found = RunScores(run=str(run), split=split, scores=scores_of(store, split, k=k, success=success, by=by))
    if against is None or other is None:
        return found, {str(run): rewards}
    found = found.model_copy(
        update={
            "against": str(against),
            "against_scores": evaluate_rewards(other, k=k, success=success),
            "difference": compare(rewards, other, k=k, success=success),
        }
    )
    return found, {str(run): rewards, f"{against} {against_split or ''}".strip(): other}


def _rewards(store: Store, name: str, split: str | None) -> Rewards:
    rewards = rewards_of(store, split)
    if not rewards:
        splits = ", ".join(sorted({s.split for s in store.summaries()})) or "none"
        of = "" if split is None else f" of split {split!r}"
        raise UsageError(f"{name} has no closed tape{of}; its splits: {splits}")
    return rewards


def _powers(*evaluations: Rewards | None) -> tuple[int, ...]:
    """1, 2, 4 ... up to the number of scored attempts that some task of each evaluation has."""
    most = min(max(sum(r is not None for r in own) for own in rewards.values()) for rewards in evaluations if rewards)
    return tuple(2**i for i in range(most.bit_length()))
